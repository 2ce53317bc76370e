"""A measurement as a value and as JSON.

::

    {"format": "byzuldp bench latency 1", "began": …, "seconds": …, "command": […], "network": …, "seed": …,
     "machine": {…}, "load_average": [before, after],
     "points": [{"clients": n, "dimension": d, "byzantine": f, "rule": …, "epsilon": …, "delta": …, "processes": …,
                 "compute_s": …, "rounds": …, "warm_up": …, "missing": …,
                 "round_s": {"p50": …, "p95": …, "p99": …, "max": …, "mean": …},
                 "phases_s": {"open": {the same}, …}, "spans_s": {"download": {the same}, …},
                 "bytes": {"down": a round, "up": a round}, "runs_s": [[a round's seconds, …], …]}]}

With a single point, its ``round_s``, ``phases_s``, ``spans_s`` and ``bytes`` are at the top too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, StoreUnwritable
from deploy.bench.asked import Setting
from deploy.bench.statistics import quantiles
from ps.records import RoundMetrics, Span

__all__ = ["FORMAT", "Measurement", "Point", "Run", "point_of", "read", "write"]

FORMAT = "byzuldp bench latency 1"
SHOWN_ALONE = ("round_s", "phases_s", "spans_s", "bytes")


@dataclass(frozen=True)
class Run:
    """The rounds of one run that count, and what happened beside each of them."""

    rounds: Sequence[RoundMetrics]
    spans: Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Point:
    """One setting, measured in one run or several; times in seconds, each as quantiles over all its rounds."""

    clients: int
    dimension: int
    byzantine: int
    rule: str
    epsilon: float | None
    delta: float
    processes: int | None
    compute_s: float
    overrides: Sequence[str]
    rounds: int
    warm_up: int
    missing: int
    """Momenta that did not count, in all rounds."""
    round_s: Mapping[str, float]
    phases_s: Mapping[str, Mapping[str, float]]
    """In order. Of the same round they add up to ``round_s``; their quantiles do not."""
    spans_s: Mapping[str, Mapping[str, float]]
    """Over all clients of all rounds; they overlap one another and the phases, and add up to nothing."""
    bytes: Mapping[str, float]
    runs_s: Sequence[Sequence[float]] = field(repr=False)

    @property
    def name(self) -> str:
        """What two measurements of the same have in common, for people."""
        return f"n = {self.clients:,}, d = {self.dimension:,}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What two measurements of the same have in common."""
        asked = (self.clients, self.dimension, self.byzantine, self.rule, self.epsilon, self.delta)
        return (*asked, self.processes, self.compute_s, tuple(self.overrides))


@dataclass(frozen=True)
class Measurement:
    """All points of one command."""

    began: str
    seconds: float
    command: Sequence[str]
    network: str
    seed: int
    machine: Mapping[str, str]
    load_average: Sequence[float]
    points: Sequence[Point]

    def as_json(self) -> dict[str, Any]:
        tree = {"format": FORMAT, **asdict(self)}
        if len(self.points) == 1:
            tree |= {key: tree["points"][0][key] for key in SHOWN_ALONE}
        return tree


def point_of(setting: Setting, runs: Sequence[Run], *, processes: int | None) -> Point:
    """What the runs of one setting gave.

    Raises
    ------
    ValueError
        There is no round.
    """
    rounds = [one for run in runs for one in run.rounds]
    spans: dict[str, list[float]] = {}
    for run in runs:
        for of_round in run.spans:
            for span in of_round:
                spans.setdefault(span.name, []).append(span.seconds)
    names = list(dict.fromkeys(name for one in rounds for name in one.segments))
    count = len(rounds) or 1
    return Point(
        clients=setting.clients,
        dimension=setting.dimension,
        byzantine=setting.byzantine,
        rule=setting.rule,
        epsilon=setting.epsilon,
        delta=setting.delta,
        processes=processes,
        compute_s=setting.load.compute_s,
        overrides=setting.overrides,
        rounds=len(rounds),
        warm_up=setting.warm_up,
        missing=sum(len(one.missing) for one in rounds),
        round_s=quantiles([one.latency_s for one in rounds]),
        phases_s={name: quantiles([one.segments.get(name, 0.0) for one in rounds]) for name in names},
        spans_s={name: quantiles(values) for name, values in spans.items()},
        bytes={
            "down": sum(one.bytes_down for one in rounds) / count,
            "up": sum(one.bytes_up for one in rounds) / count,
        },
        runs_s=[[one.latency_s for one in run.rounds] for run in runs],
    )


def write(path: Path, measurement: Measurement) -> None:
    """Write a measurement.

    Raises
    ------
    StoreUnwritable
        It cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measurement.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise StoreUnwritable(f"--json {path}: cannot be written ({problem}); name another file") from None


def read(path: Path) -> Measurement:
    """Read what :func:`write` wrote.

    Raises
    ------
    ConfigError
        The file cannot be read, or is something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path}: cannot be read ({problem}); expected a file of `byzuldp bench latency --json`"
        ) from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(f"{path}: the format is {found!r}, expected {FORMAT!r}: measure with this version")
    try:
        points = [Point(**one) for one in tree["points"]]
        checked = [float(second) for point in points for run in point.runs_s for second in run]
        if not all(0.0 < second < float("inf") for second in checked):
            raise ValueError("a round that took no time")
        rest = {key: tree[key] for key in Measurement.__dataclass_fields__ if key != "points"}
        return Measurement(points=points, **rest)
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(f"{path}: is damaged ({problem}); measure again") from None

"""Two measurements of the same settings, point by point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import ConfigError
from deploy.bench.result import Measurement
from deploy.bench.statistics import ALPHA, LEVEL, Difference, difference, holm

__all__ = ["SLOWER", "Compared", "Comparison", "compared"]

SLOWER, FASTER, SAME, UNKNOWN = "slower", "faster", "no difference beyond the noise", "too few rounds to tell"


@dataclass(frozen=True)
class Compared:
    """One point; ``p`` is corrected for the number of points."""

    name: str
    before: float
    after: float
    difference: Difference
    p: float
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """All points that both measurements have; ``remarks`` say what else differs."""

    points: Sequence[Compared]
    remarks: Sequence[str]

    @property
    def slower(self) -> bool:
        return any(point.verdict == SLOWER for point in self.points)

    def as_json(self) -> dict[str, Any]:
        return {"alpha": ALPHA, "remarks": list(self.remarks), "points": [asdict(point) for point in self.points]}


def compared(a: Measurement, b: Measurement) -> Comparison:
    """Compare what both have.

    Raises
    ------
    ConfigError
        They have nothing in common.
    """
    before, after = ({point.key: point for point in one.points} for one in (a, b))
    shared = [key for key in before if key in after]
    if not shared:
        raise ConfigError(
            "the two files have no setting in common: clients, dimension, rule, f, ε, δ, processes, compute time and "
            "--set have to be the same"
        )
    found = {str(key): difference(before[key].runs_s, after[key].runs_s) for key in shared}
    p = holm({name: one.p for name, one in found.items() if one.enough})
    points = []
    for key in shared:
        one = found[str(key)]
        corrected = p.get(str(key), 1.0)
        points.append(
            Compared(
                before[key].name,
                before[key].round_s["p50"],
                after[key].round_s["p50"],
                one,
                corrected,
                _verdict(one, corrected),
            )
        )
    return Comparison(points, list(_remarks(a, b, left_out=len(before) + len(after) - 2 * len(shared))))


def _verdict(found: Difference, p: float) -> str:
    if not found.enough:
        return UNKNOWN
    if p >= LEVEL or found.ratio == 1.0:
        return SAME
    return SLOWER if found.ratio > 1.0 else FASTER


def _remarks(a: Measurement, b: Measurement, *, left_out: int) -> list[str]:
    remarks = []
    if a.network != b.network:
        remarks.append(f"The networks differ: {a.network}; {b.network}.")
    for name in sorted(a.machine.keys() | b.machine.keys()):
        one, other = a.machine.get(name, "unknown"), b.machine.get(name, "unknown")
        if one != other:
            remarks.append(f"{name} differs: {one}; {other}.")
    if left_out:
        remarks.append(f"{left_out} of the points are in one file only.")
    return remarks

"""What a report shows, as plain data.

What only the operator may see (who answered, when, and with what) is in :class:`Operations`, and nowhere else: a public
report has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ClientFacts",
    "FaultSpan",
    "Floats",
    "Operations",
    "PrivacyFacts",
    "RunData",
    "ScoredModel",
    "Signal",
    "Waterfall",
    "percentiles_of",
]

Floats = NDArray[np.float64]


class ScoredModel(NamedTuple):
    """How the model of a round did on the public test set; loss is NaN where the model diverged."""

    round_id: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class PrivacyFacts:
    """What a run promised and spent, recomputed from its ledger.

    Attributes
    ----------
    epsilon, delta
        The budget's; None without one.
    rounds, spent
        ε of the first ``rounds[k]`` releases, earlier runs on the same budget included; sampled in a long run.
    spent_now
        ε of all releases; infinite if one had no noise.
    head
        Of the ledger's chain, hexadecimal.
    """

    private: bool
    because: str
    premises: tuple[str, ...]
    neighbouring: str
    epsilon: float | None
    delta: float | None
    calibration: str
    noise_multiplier: float
    rounds: Sequence[int]
    spent: Sequence[float]
    spent_now: float | None
    previous: tuple[str, ...]
    rows: int
    head: str


@dataclass(frozen=True)
class Signal:
    """Signal and noise, as L2 norms. None of it is measured: it follows from the configuration and the ledger.

    Attributes
    ----------
    rounds, noise
        √d σ of each release: the norm of its noise, but for a small spread.
    most
        The largest norm that an aggregate can have before the noise.
    until, moved_by_signal, moved_by_noise
        How far the first ``until[k]`` releases move θ: at most by training, and about by noise.
    clip_norm
        C, in whose multiples all of these are best read; None where nothing is clipped.
    """

    rounds: NDArray[np.int64]
    noise: Floats
    most: float
    until: Sequence[int]
    moved_by_signal: Sequence[float]
    moved_by_noise: Sequence[float]
    clip_norm: float | None

    @property
    def ratio(self) -> float | None:
        """Signal over noise in what has moved θ so far."""
        if not self.until or not self.moved_by_noise[-1]:
            return None
        return self.moved_by_signal[-1] / self.moved_by_noise[-1]


class ClientFacts(NamedTuple):
    """One client; times in seconds after θ_t was available, None where nothing was recorded.

    Percentiles, and payload that travelled, are over the rounds that were looked at (:attr:`Operations.looked_at`).
    Of a process that holds several clients only one of them downloads.
    """

    client_id: int
    adversary: bool
    answered: int
    missed: int
    arrival_p50: float | None
    arrival_p95: float | None
    upload_p50: float | None
    training_p50: float | None
    bytes_down: int
    bytes_up: int
    refusals: Mapping[str, int]


@dataclass(frozen=True)
class Waterfall:
    """Rounds in all detail, for the page's own drawing; times in microseconds.

    Attributes
    ----------
    segments, spans
        Names; what follows refers to them by place.
    rounds
        One dictionary a round: ``r`` its number, ``l`` latency, ``n`` how many answered, ``m`` who did not, ``s`` pairs
        (segment, time), flat, ``c`` how many clients there are spans of, ``k`` how many of these are shown, ``p``
        (span, client or −1, start, time, bytes), flat.
    how
        Which rounds and clients these are, in words.
    """

    segments: tuple[str, ...]
    spans: tuple[str, ...]
    rounds: Sequence[Mapping[str, Any]]
    adversaries: tuple[int, int]
    how: str


@dataclass(frozen=True)
class FaultSpan:
    """A fault of a chaos scenario, on the timeline of a run. Rounds done when it began and ended."""

    do: str
    on: tuple[str, ...]
    detail: str
    began_round: int | None
    ended_round: int | None
    began_s: float | None
    ended_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Operations:
    """What is for the operator alone.

    Attributes
    ----------
    rounds, latency_s, answered
        One entry for each recorded round.
    segments
        Name to seconds of each round, NaN where the round has no such segment; in the order of a round.
    looked_at
        How many rounds' spans the clients' times are taken from.
    """

    message: str
    started_at: float
    updated_at: float
    seconds: float | None
    rounds: NDArray[np.int64]
    latency_s: Floats
    answered: NDArray[np.int64]
    segments: Mapping[str, Floats]
    bytes_down: int
    bytes_up: int
    refusals: Mapping[str, int]
    strangers: Mapping[str, int]
    clients: Sequence[ClientFacts]
    looked_at: int
    waterfall: Waterfall | None
    faults: Sequence[FaultSpan] = ()
    scenario: str | None = None
    late_models: int = 0


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes
    ----------
    label
        What the report calls it.
    ended
        False while it says ``running``: it may be going on, or its server was killed.
    command, toml
        What starts the same run; ``toml`` is the whole configuration where the command names a file.
    configuration
        ``section.key`` to JSON value.
    """

    label: str
    run_id: str
    status: str
    message: str
    rounds: int
    planned: int
    parameters: int
    command: str
    toml: str
    configuration: Mapping[str, Any]
    scores: Sequence[ScoredModel]
    final: ScoredModel | None
    privacy: PrivacyFacts
    signal: Signal | None
    no_signal_because: str
    quorum: int | None
    clients: int
    operations: Operations | None = None
    notes: Sequence[str] = field(default=())

    @property
    def ended(self) -> bool:
        return self.status != "running"

    @property
    def latest(self) -> ScoredModel | None:
        """The best that is known of the last model."""
        return self.final or (self.scores[-1] if self.scores else None)


def percentiles_of(values: Floats) -> tuple[float, float, float, float]:
    """p50, p95, p99 and the largest of what is not NaN; NaN of nothing."""
    there = values[~np.isnan(values)]
    if not there.size:
        return (float("nan"),) * 4
    p50, p95, p99 = np.percentile(there, (50, 95, 99))
    return float(p50), float(p95), float(p99), float(there.max())

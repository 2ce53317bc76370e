"""Earlier runs on the same identities: what they released, and may still release, counts against one budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from common.config import experiment_from
from common.errors import ConfigError, PrivacyError, StoreProblem
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Ledger, cost_of
from ps.reader import RunReader

__all__ = ["NOTHING", "Previous", "previous_runs"]

_FINAL = ("completed", "budget_exhausted")


@dataclass(frozen=True)
class Previous:
    """What earlier runs leave behind.

    Attributes
    ----------
    runs
        One string per run: its id, its ledger's head, its mechanism and its cost.
    carried
        Σ 1/z² of them all, rounded up.
    premises
        What their claims rest on, and so this run's too.
    discrete
        Whether one had discrete noise, which the exact conversion does not cover.
    """

    runs: tuple[str, ...] = ()
    carried: float = 0.0
    premises: tuple[str, ...] = ()
    discrete: bool = False


NOTHING = Previous()


def previous_runs(folders: Iterable[Path]) -> Previous:
    """Read earlier runs' ledgers, checking their chains, and add up what they cost.

    A run that could be resumed counts with every release it planned. A run that an earlier one named counts once.

    Raises
    ------
    PrivacyError
        A folder holds no sound ledger, or a run that was not private: nothing can be continued from it.
    """
    known: dict[str, _Earlier] = {}
    premises: set[str] = set()
    for folder in folders:
        ledger, final = _read(folder)
        premises.update(ledger.genesis.premises)
        for run in (*map(_Earlier.parsed, ledger.genesis.previous), _Earlier.of(ledger, final=final)):
            known[run.run_id] = max(known.get(run.run_id, run), run, key=lambda one: one.cost)
    runs = [known[run_id] for run_id in sorted(known)]
    return Previous(
        runs=tuple(map(str, runs)),
        carried=_up(sum((Fraction(run.cost) for run in runs), Fraction(0))),
        premises=tuple(sorted(premises)),
        discrete=any(run.mechanism == "discrete" for run in runs),
    )


@dataclass(frozen=True)
class _Earlier:
    """One run: what it cost, or could still cost."""

    run_id: str
    head: str
    mechanism: str
    cost: float

    @classmethod
    def of(cls, ledger: Ledger, *, final: bool) -> _Earlier:
        genesis = ledger.genesis
        own = (ledger.spent or Fraction(0)) - Fraction(genesis.carried)
        if not final:
            own = max(own, genesis.rounds * (cost_of(genesis.noise_multiplier or 0.0) or Fraction(0)))
        return cls(genesis.run_id, ledger.head.hex(), genesis.mechanism, _up(own))

    @classmethod
    def parsed(cls, text: str) -> _Earlier:
        run_id, head, mechanism, cost = text.split(" ")
        return cls(run_id, head, mechanism, float(cost))

    def __str__(self) -> str:
        return f"{self.run_id} {self.head} {self.mechanism} {self.cost!r}"


def _read(folder: Path) -> tuple[Ledger, bool]:
    """A private run's ledger, and whether nothing can be added to it."""
    try:
        reader = RunReader(folder)
        ledger, status = Ledger.restored((row, head) for _, row, head in reader.ledger_rows()), reader.status().status
        experiment = experiment_from(dict(reader.run.configuration), where=f"{folder}: the stored configuration")
    except (StoreProblem, ConfigError) as problem:
        raise PrivacyError(f"privacy.previous: {problem}") from None
    private, because = claim_of(experiment, ledger.genesis.premises)
    if not private or ledger.spent is None:
        raise PrivacyError(f"privacy.previous: {folder} cannot be continued, its clients were not protected: {because}")
    return ledger, status in _FINAL


def _up(value: Fraction) -> float:
    """The smallest float64 that is not below."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)

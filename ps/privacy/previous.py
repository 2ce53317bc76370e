"""Earlier runs on the same identities: what they released, and may still release, counts against one budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from common.config import digest_of, experiment_from
from common.errors import ConfigError, PrivacyError, StoreProblem
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Ledger, cost_of
from ps.reader import RunReader

__all__ = ["NOTHING", "Previous", "carried_by", "previous_runs"]

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
    neighbouring
        Between which runs their claims hold: this one's cannot be wider.
    discrete
        Whether one had discrete noise, which the exact conversion does not cover.
    """

    runs: tuple[str, ...] = ()
    carried: float = 0.0
    premises: tuple[str, ...] = ()
    neighbouring: tuple[str, ...] = ()
    discrete: bool = False


NOTHING = Previous()


def previous_runs(folders: Iterable[Path]) -> Previous:
    """Read earlier runs' ledgers, checking their chains, and add up what they cost.

    A run that could be resumed counts with every release it planned. A run that an earlier one named counts once.

    Raises
    ------
    PrivacyError
        A folder holds no sound ledger, a run that was not private (nothing can be continued from it), or one of two
        histories of the same run.
    """
    known: dict[str, _Earlier] = {}
    premises: set[str] = set()
    relations: set[str] = set()
    for folder in folders:
        ledger, final = _read(folder)
        premises.update(ledger.genesis.premises)
        relations.add(ledger.genesis.neighbouring)
        for run in (*map(_Earlier.parsed, ledger.genesis.previous), _Earlier.of(ledger, final=final)):
            known[run.run_id] = run.merged(known.get(run.run_id, run))
    runs = tuple(str(known[run_id]) for run_id in sorted(known))
    return Previous(
        runs=runs,
        carried=carried_by(runs),
        premises=tuple(sorted(premises)),
        neighbouring=tuple(sorted(relations)),
        discrete=any(run.mechanism == "discrete" for run in known.values()),
    )


def carried_by(runs: Iterable[str]) -> float:
    """Σ 1/z² of runs as :attr:`Previous.runs` lists them, rounded up.

    Raises
    ------
    PrivacyError
        An entry is not in that form.
    """
    try:
        return _up(sum((Fraction(_Earlier.parsed(text).cost) for text in runs), Fraction(0)))
    except (ValueError, OverflowError):
        raise PrivacyError(f"previous = {tuple(runs)!r}: expected 'RUN_ID HEAD MECHANISM COST'") from None


@dataclass(frozen=True)
class _Earlier:
    """One run: what it cost, or could still cost."""

    run_id: str
    head: str
    mechanism: str
    cost: float
    heads: frozenset[str] = frozenset()
    """All heads of its chain, where its folder was read."""

    @classmethod
    def of(cls, ledger: Ledger, *, final: bool) -> _Earlier:
        genesis = ledger.genesis
        own = (ledger.spent or Fraction(0)) - Fraction(genesis.carried)
        if not final:
            own = max(own, genesis.rounds * (cost_of(genesis.noise_multiplier or 0.0) or Fraction(0)))
        heads = frozenset(head.hex() for _, head in ledger.rows())
        return cls(genesis.run_id, ledger.head.hex(), genesis.mechanism, _up(own), heads)

    def merged(self, other: _Earlier) -> _Earlier:
        """One history of a run, told twice: the longer telling.

        Raises
        ------
        PrivacyError
            They are two histories: the folder was copied, and both copies went on.
        """
        shorter, longer = sorted((other, self), key=lambda run: (run.cost, len(run.heads)))
        if shorter.head != longer.head and shorter.head not in longer.heads:
            raise PrivacyError(
                f"privacy.previous: run {self.run_id} has two histories, which end at {self.head[:16]}… and "
                f"{other.head[:16]}…: its folder was copied, and releases of one copy are missing from the other; no "
                "ledger says what they cost together"
            )
        return longer

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
        reader.verify()
        ledger, status = Ledger.restored((row, head) for _, row, head in reader.ledger_rows()), reader.status().status
        experiment = experiment_from(dict(reader.run.configuration), where=f"{folder}: the stored configuration")
    except (StoreProblem, ConfigError) as problem:
        raise PrivacyError(f"privacy.previous: {problem}") from None
    if digest_of(reader.run.configuration) != ledger.genesis.configuration:
        raise PrivacyError(f"privacy.previous: {folder} was changed: row 0 was opened with another configuration")
    private, because = claim_of(experiment, ledger.genesis.premises, late=reader.late_models())
    if not private or ledger.spent is None:
        raise PrivacyError(f"privacy.previous: {folder} cannot be continued, its clients were not protected: {because}")
    return ledger, status in _FINAL and (status != "completed" or ledger.next_round == ledger.genesis.rounds)


def _up(value: Fraction) -> float:
    """The smallest float64 that is not below."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)

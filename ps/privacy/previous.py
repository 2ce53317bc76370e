"""Earlier runs on the same identities: what they released, and may still release, counts against one budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from common.errors import PrivacyError, StoreProblem
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
        One string per run: its id, its ledger's head and its cost.
    carried
        Σ 1/z² of them all, rounded up.
    premises
        What their claims rest on, and so this run's too.
    """

    runs: tuple[str, ...] = ()
    carried: float = 0.0
    premises: tuple[str, ...] = ()


NOTHING = Previous()


def previous_runs(folders: Iterable[Path]) -> Previous:
    """Read earlier runs' ledgers, checking their chains, and add up what they cost.

    A run that could be resumed counts with every release it planned. A run that an earlier one named counts once.

    Raises
    ------
    PrivacyError
        A folder holds no sound ledger, or a run that was not private: nothing can be continued from it.
    """
    costs: dict[str, tuple[str, float]] = {}
    premises: dict[str, None] = {}
    for folder in folders:
        for run_id, head, cost in _costs_of(folder, premises):
            costs[run_id] = max(costs.get(run_id, (head, 0.0)), (head, cost), key=lambda known: known[1])
    runs = tuple(f"{run_id} {head} {cost!r}" for run_id, (head, cost) in sorted(costs.items()))
    return Previous(
        runs, _up(sum((Fraction(cost) for _, cost in costs.values()), Fraction(0))), tuple(sorted(premises))
    )


def _costs_of(folder: Path, premises: dict[str, None]) -> list[tuple[str, str, float]]:
    """(run id, head, cost) of a run and of those it continued; its premises are added to what is given."""
    try:
        reader = RunReader(folder)
        ledger, status = Ledger.restored((row, head) for _, row, head in reader.ledger_rows()), reader.status().status
    except StoreProblem as problem:
        raise PrivacyError(f"privacy.previous: {problem}") from None
    genesis, spent = ledger.genesis, ledger.spent
    if genesis.epsilon is None or spent is None:
        raise PrivacyError(
            f"privacy.previous: {folder} released models without noise: no budget covers that; its clients have "
            "nothing left to protect by continuing it"
        )
    configuration = reader.run.configuration
    if configuration.get("privacy", {}).get("noise_seed") is not None:
        raise PrivacyError(f"privacy.previous: {folder} had its noise from a seed (privacy.noise_seed): not private")
    attack = configuration.get("attack", {})
    if attack.get("knowledge") == "omniscient" and attack.get("name") != "none":
        raise PrivacyError(f"privacy.previous: {folder} had a wiretap (attack.knowledge = omniscient): not private")
    own = spent - Fraction(genesis.carried)
    if status not in _FINAL:
        own = max(own, genesis.rounds * (cost_of(genesis.noise_multiplier or 0.0) or Fraction(0)))
    premises.update(dict.fromkeys(genesis.premises))
    before = [_parsed(text) for text in genesis.previous]
    return [*before, (genesis.run_id, ledger.head.hex(), _up(own))]


def _parsed(text: str) -> tuple[str, str, float]:
    run_id, head, cost = text.split(" ")
    return run_id, head, float(cost)


def _up(value: Fraction) -> float:
    """The smallest float64 that is not below."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)

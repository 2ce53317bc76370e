"""What is fixed about a run before its first round, as far as its status page shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Experiment
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Budget, Ledger
from ps.records import RoundMetrics

__all__ = ["Happened", "RunFacts"]

Happened = deque[tuple[float, Mapping[str, Any] | RoundMetrics]]
"""When (monotonic seconds), and what: written by the run's threads, read by the page's."""


@dataclass(frozen=True)
class RunFacts:
    """A run, before its next round.

    Attributes
    ----------
    ledger
        Of the rounds it has had so far.
    folder
        Where what was measured so far is read.
    """

    run_id: str
    experiment: Experiment
    ledger: Ledger
    folder: Path
    rule: str
    parameters: int

    @property
    def rounds(self) -> int:
        return self.experiment.training.rounds

    @property
    def clients(self) -> int:
        return self.experiment.federation.clients

    @property
    def on_schedule(self) -> bool:
        """Whether a model can be late, which changes the claim."""
        return self.experiment.privacy.round_timing == "fixed"

    @property
    def budget(self) -> Budget | None:
        return Budget.of(self.ledger.genesis)

    def claim(self, late: int) -> dict[str, Any]:
        """What the run claims, given how many models were late: the keys that ``public/summary.json`` has too."""
        genesis, budget = self.ledger.genesis, self.budget
        private, because = claim_of(self.experiment, genesis.premises, late=late)
        return {
            "private": private,
            "private_because": because,
            "premises": list(genesis.premises) if budget else [],
            "neighbouring": genesis.neighbouring if budget else None,
            "epsilon": budget.epsilon if budget else None,
            "delta": budget.delta if budget else None,
        }

"""ε of the first releases of a ledger, for as many counts as a curve needs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from common.privacy.conversions import epsilon_of
from common.privacy.costs import cost_of, mu_from
from ps.privacy.ledger import Budget, Ledger

__all__ = ["odometer"]


def odometer(ledger: Ledger, budget: Budget, places: Sequence[int]) -> list[float]:
    """ε at the budget's δ of the first k releases, for each k in ``places`` (ascending), in one pass over the rows.

    Releases of earlier runs on the same budget count; ∞ once a release had no noise.
    """
    wanted, spent = set(places), []
    total: Fraction | None = Fraction(ledger.genesis.carried)
    costs: dict[float, Fraction | None] = {}  # of few multipliers, usually one: its square is long
    for count in range(ledger.next_round + 1):
        if count:
            z = ledger.entries[count - 1].noise_multiplier
            cost = costs[z] if z in costs else costs.setdefault(z, cost_of(z))
            total = None if total is None or cost is None else total + cost
        if count in wanted:
            found = epsilon_of(mu_from(total), budget.delta, budget.calibration)
            spent.append(found if isfinite(found) else float("inf"))
    return spent

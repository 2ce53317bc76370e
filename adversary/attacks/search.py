"""The search for the factor that moves the aggregate furthest: against the very rule in use, on a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from adversary.attacks.attack import Setting, Sight
from common.aggregation import RoundContext, Rule
from common.errors import AttackError
from common.randomness import stream

__all__ = ["FactorSearch", "RuleCopy", "chosen", "line_search"]

EVALUATIONS, FIRST_STEP, RATIO = 20, 10.0, 0.8


class FactorSearch:
    """The factor for which the aggregate of the honest momenta and k copies of a vector is furthest from their mean.

    The line search of the ByzFL library's optimised attacks; then the attack's usual factor is tried too, so that the
    result is never worse than that one.

    Parameters
    ----------
    setting
        Gives the rule.
    name
        The attack's.
    usual
        A factor that is tried beside the search.

    Notes
    -----
    Costs 22 aggregations of n rows a round; the rule is built once a process.
    """

    def __init__(self, setting: Setting, name: str, *, usual: float) -> None:
        if setting.rule is None:
            raise AttackError(f"{name}: searching for a factor needs the aggregation rule, which was not given")
        self._setting, self._usual = setting, usual
        self._copy: RuleCopy | None = None

    def best(self, sight: Sight, vector_of: Callable[[float], Tensor]) -> float:
        """The factor, of at least 0.

        Parameters
        ----------
        sight
            With an estimate of at least one row.
        vector_of
            float32 (d,), what would be sent with a factor.
        """
        self._copy = self._copy or RuleCopy(self._setting)
        self._copy.see(sight)
        aim, copy_ = sight.honest.mean(dim=0, dtype=torch.float64), self._copy

        def distance(factor: float) -> float:
            moved = copy_.aggregate(sight.honest, vector_of(factor)).to(torch.float64).sub_(aim)
            return float(torch.linalg.vector_norm(moved))

        found = line_search(distance)
        return max(found, self._usual, key=distance)


def chosen(
    given: float | None, search: FactorSearch | None, sight: Sight, vector_of: Callable[[float], Tensor]
) -> Tensor:
    """What is sent with the factor that was given, or else with the one that is found."""
    if given is not None:
        return vector_of(given)
    assert search is not None  # noqa: S101 - exactly one is given
    return vector_of(search.best(sight, vector_of))


class RuleCopy:
    """What the server would make of some momenta, as far as the public configuration and the published models tell.

    Parameters
    ----------
    setting
        Gives the rule, the clip norm, and n and k.

    Notes
    -----
    Estimates of fewer than n - k honest momenta stand for all, each several times. A rule that is centred on the last
    released aggregate gets it as (θ_{t-1} - θ_t)/η, and public random streams are the server's. Server momentum inside
    the rule is not simulated; for equivariant rules it makes no difference. Every call is on a fresh copy of the rule,
    so that a user's rule with a memory learns nothing from a search.
    """

    def __init__(self, setting: Setting) -> None:
        assert setting.rule is not None  # noqa: S101 - refused before
        self._setting, self._rule = setting, setting.rule()
        self._weights: Tensor | None = None
        if (weights := getattr(self._rule, "weights", None)) is not None:
            self._weights = torch.as_tensor(weights, dtype=torch.float64)
        self._last: tuple[int, Tensor] | None = None
        self._context = RoundContext()

    def see(self, sight: Sight) -> None:
        """Take note of a round."""
        before, eta = self._last, self._setting.learning_rate
        if before is None or before[0] != sight.round_id - 1 or eta is None:
            centre = torch.zeros_like(sight.theta) if sight.round_id == 0 else self._context.centre
        else:
            centre = (before[1] - sight.theta) / eta(before[0])
        self._last = (sight.round_id, sight.theta.clone())
        self._context = RoundContext(
            round_id=sight.round_id,
            weights=self._weights,
            centre=centre,
            generator=stream(self._setting.seed, "rule", round_id=sight.round_id),
        )

    def aggregate(self, honest: Tensor, vector: Tensor) -> Tensor:
        """float32 (d,): the rule on n rows, of which k are ``vector``."""
        setting = self._setting
        places = torch.arange(max(1, setting.num_clients - setting.num_adversaries)) % honest.shape[0]
        rows = torch.cat([honest[places], vector.expand(setting.num_adversaries, -1)])
        if setting.projects_rows and setting.clip_norm is not None:
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
            rows = rows * (setting.clip_norm / norms.clamp_min(setting.clip_norm)).to(torch.float32)
        rule: Rule = copy.deepcopy(self._rule)
        return rule(rows, self._context)


def line_search(
    value: Callable[[float], float],
    *,
    evaluations: int = EVALUATIONS,
    start: float = 0.0,
    first_step: float = FIRST_STEP,
    ratio: float = RATIO,
) -> float:
    """Where a function is largest, as far as so many evaluations tell, looking forward only.

    While a step improves on the best it is taken, and doubled; from the first that does not, every step is ``ratio``
    times the one before, taken or not.
    """
    best, highest, step, expanding = start, value(start), first_step, True
    for _ in range(evaluations - 1):
        tried = best + step
        if (height := value(tried)) > highest:
            best, highest = tried, height
        else:
            expanding = False
        step *= 2.0 if expanding else ratio
    return best

"""How far noise moves a model, against how far training could: what decides whether a private run can learn.

Server momentum averages what was released, so the release of round s moves θ, over the rounds that are left, by e_s
times itself:

    e_s = (1 − β_s) Σ_{t ≥ s} η_t Π_{s < r ≤ t} β_r          (η (1 − β^{T−s}) for constants: soon η)

T releases with independent noise of standard deviation σ = z S in d coordinates move θ by about σ √(d Σ e_s²); T
aggregates of norm A, all in one direction, by A Σ e_s. For constant η and many rounds these are η z S √(T d) and
η T A, and with z = √T / μ their ratio is μ A / (S √d): neither η nor T is in it.

A is the largest norm an aggregate can have. For the trimmed mean of rows in the ball of radius C it is C √(n/(n − f)):
in a coordinate whose kept values average a ≥ 0 the n − f largest values average at least a, so that (n − f) a² is at
most that coordinate's sum of squares; add up over the coordinates, and n C² is what all rows have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from common.errors import PrivacyError, RuleError

if TYPE_CHECKING:
    from common.schedules import Schedule
    from ps.release import Mechanism

__all__ = [
    "MOST_CLIENTS",
    "Learning",
    "Steps",
    "effective_steps",
    "largest_aggregate",
    "learning_of",
    "sensitivity_of",
    "smallest",
]

MOST_CLIENTS = 10**9
"""The search for a number of clients ends here."""

_BLOCK = 1 << 20
_ALL_TRIED = 1024


@dataclass(frozen=True)
class Steps:
    """The effective steps e_s of a run's releases, summed up.

    Parameters
    ----------
    total
        Σ e_s: how far releases of norm 1 in one direction move θ.
    root_square
        √(Σ e_s²): how far independent releases of norm 1 move it.
    """

    total: float
    root_square: float


@lru_cache(maxsize=16)
def effective_steps(learning_rate: Schedule, server_momentum: Schedule, rounds: int) -> Steps:
    """The effective steps of ``rounds`` releases under the schedules η_t and β_t; O(T) time."""
    if learning_rate.kind == server_momentum.kind == "constant":
        return _constant_steps(learning_rate(0), server_momentum(0), rounds)
    total, squares, later, kept = 0.0, 0.0, 0.0, 0.0
    for round_id in reversed(range(rounds)):
        later = learning_rate(round_id) + kept * later  # what one unit in R_s moves θ, from round s on
        kept = server_momentum(round_id)
        step = (1.0 - kept) * later
        total += step
        squares += step * step
    return Steps(total, math.sqrt(squares))


def _constant_steps(learning_rate: float, server_momentum: float, rounds: int) -> Steps:
    if server_momentum == 0.0:
        return Steps(learning_rate * rounds, abs(learning_rate) * math.sqrt(rounds))
    total, squares = 0.0, 0.0
    for begin in range(1, rounds + 1, _BLOCK):
        left = np.arange(begin, min(begin + _BLOCK, rounds + 1), dtype=np.float64)
        steps = -np.expm1(left * math.log(server_momentum))
        total += float(steps.sum())
        squares += float(steps @ steps)
    return Steps(learning_rate * total, abs(learning_rate) * math.sqrt(squares))


def largest_aggregate(mechanism: Mechanism) -> float:
    """A: the largest norm an aggregate of rows in the ball of radius C can have.

    ===========================================  ===============================================
    rule                                         A
    ===========================================  ===============================================
    keeps k of n values in every coordinate      C √(2n/(n + k))  (CWTM: C √(n/(n − f)); mean: C)
    its output is projected                      C
    normalises its rows                          1, whatever C is
    another                                      C √(n/(n − f))
    ===========================================  ===============================================
    """
    from common.aggregation import SumRule

    rule, n = mechanism.rule, mechanism.num_clients
    if not rule.needs_clipping:
        return 1.0
    if mechanism.projects_output():
        return mechanism.radius
    kept = rule.divisor(n) if isinstance(rule, SumRule) else max(n - 2 * mechanism.num_byzantine, 0)
    return mechanism.radius * math.sqrt(2 * n / (n + kept))


def sensitivity_of(mechanism: Mechanism, num_parameters: int | None, server_momentum: float) -> float:
    """S as the parameter server charges it, with what rounding can add in dimension d where that is known.

    With momentum inside the rule this is round 0: what rounding adds later follows the released R.
    """
    if num_parameters is None:
        return mechanism.sensitivity_for(server_momentum)
    if not (mechanism.inside and mechanism.private):
        return mechanism.charged_sensitivity(num_parameters)
    import torch

    from ps.release import Shift

    return mechanism.charged_sensitivity(num_parameters, Shift(server_momentum, torch.zeros(1)))


@dataclass(frozen=True)
class Learning:
    """Signal and noise of a run, as norms. None where it depends on a T that is not given, or there is no noise."""

    signal_norm: float
    noise_norm: float | None
    signal_displacement: float | None
    noise_displacement: float | None
    ratio: float | None


def learning_of(
    mechanism: Mechanism,
    num_parameters: int,
    learning_rate: Schedule,
    server_momentum: Schedule,
    rounds: int | None,
    mu: float | None = None,
) -> Learning:
    """Signal and noise, in one round and in all.

    Parameters
    ----------
    mechanism
        With the run's z; any z above 0 where ``rounds`` is None.
    num_parameters
        d.
    learning_rate, server_momentum
        η_t and β_t.
    rounds
        T. None: the ratio for constant η and many rounds, of releases that compose to ``mu``.
    """
    passed_on = not mechanism.inside or mechanism.rule.needs_clipping  # Fed-NGA's mean of directions does not add up
    signal, root_d = largest_aggregate(mechanism), math.sqrt(num_parameters)
    if mechanism.inside and passed_on:
        betas = {server_momentum(t) for t in range(rounds or 1)} if server_momentum.kind != "constant" else set()
        betas = {min(betas), max(betas)} if betas else {server_momentum(0)}
        moved = max(sensitivity_of(mechanism, num_parameters, beta) / (1.0 - beta) for beta in betas)
    else:
        moved = sensitivity_of(mechanism, num_parameters, server_momentum(0))
    if rounds is None:
        return Learning(signal, None, None, None, _ratio(signal * mu, moved * root_d) if mu is not None else None)
    steps = effective_steps(learning_rate, server_momentum if passed_on else _none(server_momentum), rounds)
    noise = mechanism.noise_multiplier * moved * root_d
    return Learning(
        signal,
        noise,
        signal * abs(steps.total),
        noise * steps.root_square,
        _ratio(signal * abs(steps.total), noise * steps.root_square),
    )


def _ratio(signal: float, noise: float) -> float | None:
    return signal / noise if 0.0 < noise < math.inf and math.isfinite(signal) else None


def _none(schedule: Schedule) -> Schedule:
    return type(schedule)("constant", (0.0,))


def smallest(ratio_of: Callable[[int], float | None], wanted: float, share: Fraction) -> int | None:
    """The smallest n with ``ratio_of(n) >= wanted``; None if there is none up to :data:`MOST_CLIENTS`.

    Parameters
    ----------
    ratio_of
        Signal over noise with n clients; may raise RuleError or PrivacyError where the rule is not defined. Small n
        are all tried. Beyond, it must grow with n, but for the unevenness of f = ⌊share · n⌋ and of an even or odd n.
    share
        Byzantine clients among all; 0 where their number is fixed.
    """

    def suffices(n: int) -> bool:
        try:
            ratio = ratio_of(n)
        except (RuleError, PrivacyError):
            return False
        return ratio is not None and ratio >= wanted

    for n in range(1, _ALL_TRIED + 1):
        if suffices(n):
            return n
    low, high = _ALL_TRIED, 2 * _ALL_TRIED
    while not suffices(high):
        if high > MOST_CLIENTS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    uneven = 64 + math.ceil(8 / max(1 - 2 * share, Fraction(1, 1000)))  # f going up by one is made up for within
    return next(n for n in range(max(1, high - uneven), high + 1) if suffices(n))

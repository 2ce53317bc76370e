"""Algorithm 1 of ByzULDP at the server, as pure functions: aggregate, add noise, server momentum, model step.

    A = rule(m_1 … m_n)      Y = A + N(0, σ² I)      R = β R + (1 - β) Y      θ = θ - η R

Only Y, and what is computed from it, ever leaves the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation import RoundContext, Rule, SumRule
from common.aggregation import step as steps
from common.errors import PrivacyError, RuleError, RunFailed

__all__ = ["Mechanism", "ServerState", "advance", "initial_state", "release"]

Answered = Sequence[int] | NDArray[np.bool_]
Noise = NDArray[np.float64] | Tensor


@dataclass(frozen=True)
class Mechanism:
    """What turns a round's momenta into what is released.

    Parameters
    ----------
    rule
        The aggregation rule.
    num_clients
        n, identities on the public roster. Under DP neither the divisor nor σ depends on who answered.
    num_byzantine
        f, as the rule was made with.
    clip_norm
        C, the radius of the ball that holds every row.
    noise_multiplier
        z, relative to the sensitivity S; 0 is no DP.

    Raises
    ------
    RuleError
        The rule is not defined for n, or was made for another f.
    PrivacyError
        z is negative or not finite, or z > 0 without a C.
    """

    rule: Rule
    num_clients: int
    num_byzantine: int
    clip_norm: float | None
    noise_multiplier: float

    def __post_init__(self) -> None:
        if self.rule.num_byzantine != self.num_byzantine:
            raise RuleError(
                f"the rule was made for f = {self.rule.num_byzantine}, the mechanism for {self.num_byzantine}"
            )
        self.rule.require(self.num_clients)
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"noise_multiplier = {self.noise_multiplier!r}: expected a finite number of at least 0")
        if self.projects:
            if self.clip_norm is None:
                raise PrivacyError("privacy needs training.clip_norm: without it one row moves the aggregate anywhere")
            steps.grid_of(self.clip_norm)  # refuses a C that has no grid

    @property
    def projects(self) -> bool:
        """Whether rows are projected and put on the grid: exactly when there is noise."""
        return self.noise_multiplier > 0.0

    @property
    def grid(self) -> float | None:
        """g under DP, else None."""
        return steps.grid_of(self.clip_norm) if self.projects and self.clip_norm is not None else None

    @property
    def sensitivity(self) -> float:
        """S of the rule, in L2, for one client's row replaced; infinite without a C."""
        if self.clip_norm is None:
            return math.inf
        return self.rule.sensitivity(num_clients=self.num_clients, clip_norm=self.clip_norm)

    @property
    def sigma(self) -> float:
        """z S, rounded up: the standard deviation of the noise on Y per coordinate; 0 without DP."""
        return self._sigma(self.sensitivity) if self.projects else 0.0

    def charged_sensitivity(self, num_parameters: int) -> float:
        """S plus what rounding the aggregate to the grid can add to it, in dimension d.

        Nothing when the rule is an exact sum, or when its output is projected and then truncated toward zero.
        Otherwise both neighbours' aggregates move by up to g/2 per coordinate: g √d.
        """
        if self.grid is None or isinstance(self.rule, SumRule) or self.rule.project_output:
            return self.sensitivity
        return _up(self.sensitivity + _up(self.grid * math.sqrt(num_parameters)))

    def charged_sigma(self, num_parameters: int) -> float:
        """z times :meth:`charged_sensitivity`, rounded up: the σ that :func:`release` uses; 0 without DP."""
        return self._sigma(self.charged_sensitivity(num_parameters)) if self.projects else 0.0

    def condition(self, row: Tensor) -> bool:
        """Make a received row safe in place: projected and on the grid under DP, else only checked.

        Returns
        -------
        bool
            False if the row was not finite; it is zero then.
        """
        return steps.condition_row(row, self.clip_norm if self.projects else None, self.grid)

    def _sigma(self, sensitivity: float) -> float:
        return _up(self.noise_multiplier * _up(sensitivity))


@dataclass(frozen=True)
class ServerState:
    """What the server knows before round ``round_id``: θ and R, float32 (d,)."""

    round_id: int
    theta: Tensor
    momentum: Tensor


def initial_state(theta: Tensor) -> ServerState:
    """Before round 0: R = 0."""
    return ServerState(0, theta, torch.zeros_like(theta))


def release(
    mechanism: Mechanism, rows: Tensor, answered: Answered, noise: Noise | None, context: RoundContext | None = None
) -> Tensor:
    """Y: the aggregate, with noise under DP.

    Parameters
    ----------
    mechanism
        The rule and its noise.
    rows
        float32 (n, d), conditioned (:meth:`Mechanism.condition`), zero where nobody answered; not modified.
    answered
        Who did: indices of rows, or a mask (n,).
    noise
        (d,) float64, standard normal, fresh; None exactly when z = 0.
    context
        For rules that need one.

    Returns
    -------
    Tensor
        float32 (d,), on the device of ``rows``.

    Raises
    ------
    RuleError
        Fewer rows answered than the rule needs.
    PrivacyError
        Noise is missing under DP, or given without.

    Notes
    -----
    Under DP an absent row is one more point of the ball, the zero momentum, and counts among the n. An exact sum of
    what the rule keeps gets its noise, rounded to the same grid, *before* the division; that equals rounding the
    noisy sum, hence post-processing of a Gaussian mechanism on the sum. Rules whose output is projected leave absent
    rows out: their charge of 2C holds for any function. Without DP every rule runs over the rows that answered, with
    f unchanged.
    """
    n, d = rows.shape
    if n != mechanism.num_clients:
        raise ValueError(f"rows {tuple(rows.shape)}: expected one per identity, {mechanism.num_clients}")
    if (noise is None) == mechanism.projects:
        raise PrivacyError(
            f"noise_multiplier = {mechanism.noise_multiplier}: noise is needed exactly when it is above 0"
        )
    present = np.zeros(n, dtype=np.bool_)
    present[np.asarray(answered, dtype=None if len(answered) else np.intp)] = True
    if noise is None:
        return _over_present(mechanism.rule, rows, present, context)

    if not present.all() and bool(rows[torch.from_numpy(np.flatnonzero(~present)).to(rows.device)].any()):
        raise ValueError("the row of an identity that did not answer is not zero")
    grid, rule = mechanism.grid, mechanism.rule
    assert grid is not None  # noqa: S101 - noise is given, so z > 0
    sigma = mechanism.charged_sigma(d)
    draw = torch.as_tensor(noise, dtype=torch.float64).to(rows.device)
    if draw.shape != (d,):
        raise ValueError(f"noise {tuple(draw.shape)}: expected ({d},)")
    if isinstance(rule, SumRule):
        total, divisor = rule.kept_sum(rows)
        return total.add_(_on_grid(draw * _up(sigma * divisor), grid)).div_(divisor).to(torch.float32)
    if rule.project_output:
        aggregate = _over_present(rule, rows, present, context).clone()
        steps.condition_row(aggregate, mechanism.clip_norm, grid)
        rounded = aggregate.to(torch.float64)
    else:
        rounded = _on_grid(rule(rows, context).to(torch.float64), grid)
    return rounded.add_(_on_grid(draw * sigma, grid)).to(torch.float32)


def advance(state: ServerState, released: Tensor, learning_rate: float, server_momentum: float) -> ServerState:
    """The state before the next round, from Y alone: post-processing.

    Parameters
    ----------
    state
        θ and R before this round; not modified.
    released
        Y, float32 (d,).
    learning_rate, server_momentum
        η and β of this round.

    Raises
    ------
    RunFailed
        θ would not be finite.
    """
    momentum = steps.server_momentum(state.momentum, released, server_momentum)
    theta = steps.model_step(state.theta, momentum, learning_rate)
    if not bool(torch.isfinite(theta).all()):
        raise RunFailed(
            f"round {state.round_id} would publish a non-finite model: the released aggregate is too large or not "
            f"finite; lower training.learning_rate, or choose a robust aggregation.rule if clients may lie"
        )
    return ServerState(state.round_id + 1, theta, momentum)


def _over_present(rule: Rule, rows: Tensor, present: NDArray[np.bool_], context: RoundContext | None) -> Tensor:
    if present.all():
        return rule(rows, context)
    indices = torch.from_numpy(np.flatnonzero(present)).to(rows.device)
    return rule(rows[indices], context.of_rows(indices) if context is not None else None)


def _on_grid(values: Tensor, grid: float) -> Tensor:
    """To the nearest multiple of a power of two: exact but for the rounding meant."""
    return values.div_(grid).round_().mul_(grid)


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)

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
from common.randomness import stream

__all__ = ["Mechanism", "ServerState", "Shift", "advance", "context_of", "initial_state", "release"]

Answered = Sequence[int] | NDArray[np.bool_]
Noise = NDArray[np.float64] | Tensor

_FLOAT32_ROUNDING = 2.0**-22  # relative: three float32 roundings an entry of M_i, with room


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
        C, the radius of the ball that holds every row; None for no projection, which only a rule whose sensitivity
        does not rest on it (Fed-NGA's) allows under DP.
    noise_multiplier
        z, relative to the sensitivity S; 0 is no DP.
    strict
        Calibrate for adversaries that read the protected client's momentum: f rows besides it may change too.
    inside
        The paper's form of server momentum: the rule is applied to M_i = β R + (1 - β) m_i, and its noisy output is
        the next R. Otherwise the rule is applied to the m_i, and R averages what was released.

    Raises
    ------
    RuleError
        The rule is not defined for n, was made for another f, or states nothing for server momentum inside it.
    PrivacyError
        z is negative or not finite, or z > 0 without a C that the rule needs.
    """

    rule: Rule
    num_clients: int
    num_byzantine: int
    clip_norm: float | None
    noise_multiplier: float
    strict: bool = False
    inside: bool = False

    def __post_init__(self) -> None:
        if self.rule.num_byzantine != self.num_byzantine:
            raise RuleError(
                f"the rule was made for f = {self.rule.num_byzantine}, the mechanism for {self.num_byzantine}"
            )
        self.rule.require(self.num_clients)
        if not 0.0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"noise_multiplier = {self.noise_multiplier!r}: expected a finite number of at least 0")
        if self.private:
            if self.clip_norm is None and self.rule.needs_clipping:
                raise PrivacyError(
                    f"privacy needs training.clip_norm: without it one row moves {self.rule.name} anywhere"
                )
            steps.grid_of(self.radius)  # refuses a C that has no grid
            stated = self.sensitivity_for(0.0)  # refuses a rule that states none for this form
            if not 0.0 < stated < math.inf:
                raise PrivacyError(f"{self.rule.name} states a sensitivity of {stated!r}: expected a positive number")

    @property
    def private(self) -> bool:
        """Whether there is noise."""
        return self.noise_multiplier > 0.0

    @property
    def radius(self) -> float:
        """C, or 1 where rows are not projected: the scale of the grid, and of an output that is projected."""
        return 1.0 if self.clip_norm is None else self.clip_norm

    @property
    def grid(self) -> float | None:
        """g under DP, else None."""
        return steps.grid_of(self.radius) if self.private else None

    @property
    def sensitivity(self) -> float:
        """S of the rule, in L2, for one client's row replaced, β = 0; infinite where it needs a C and there is none."""
        return self.sensitivity_for(0.0)

    def sensitivity_for(self, server_momentum: float) -> float:
        """S of what the rule is applied to; β matters only where server momentum is inside the rule."""
        if self.clip_norm is None and self.rule.needs_clipping:
            return math.inf
        n, radius = self.num_clients, self.radius
        if self.inside:
            return self.rule.inside_sensitivity(
                num_clients=n, clip_norm=radius, server_momentum=server_momentum, strict=self.strict
            )
        stated = self.rule.strict_sensitivity if self.strict else self.rule.sensitivity
        return stated(num_clients=n, clip_norm=radius)

    @property
    def sigma(self) -> float:
        """z S, rounded up: the standard deviation of the noise on Y per coordinate; 0 without DP."""
        return self._sigma(self.sensitivity) if self.private else 0.0

    @property
    def projects_output(self) -> bool:
        """Whether S holds because the output is projected onto the ball that holds the rows."""
        return self.rule.projects_output(num_clients=self.num_clients, clip_norm=self.radius, strict=self.strict)

    @property
    def sums_exactly(self) -> bool:
        """Whether noise is added to an exact sum of grid multiples, which leaves nothing to charge for rounding."""
        return isinstance(self.rule, SumRule) and not self.inside and not self.projects_output

    def charged_sensitivity(self, num_parameters: int, shift: Shift | None = None) -> float:
        """S plus what rounding can add to it, in dimension d.

        Nothing for an exact sum, or for an output that is projected and then truncated toward zero. Otherwise both
        neighbours' aggregates move by up to g/2 per coordinate, g √d in all; and server momentum inside the rule
        rounds the entries of every M_i to float32 besides.
        """
        base = self.sensitivity_for(shift.server_momentum if shift else 0.0)
        if self.grid is None or self.sums_exactly or self.projects_output:
            return base
        extra = self.grid * math.sqrt(num_parameters)
        if shift is not None:
            extra += 2.0 * math.sqrt(num_parameters) * _FLOAT32_ROUNDING * shift.reach(self.radius)
        return _up(base + _up(extra))

    def charged_sigma(self, num_parameters: int, shift: Shift | None = None) -> float:
        """z times :meth:`charged_sensitivity`, rounded up: the σ that :func:`release` uses; 0 without DP."""
        return self._sigma(self.charged_sensitivity(num_parameters, shift)) if self.private else 0.0

    def condition(self, row: Tensor) -> bool:
        """Make a received row safe in place: projected and on the grid under DP, else only checked.

        Returns
        -------
        bool
            False if the row was not finite; it is zero then.
        """
        return steps.condition_row(row, self.clip_norm if self.private else None, self.grid)

    def _sigma(self, sensitivity: float) -> float:
        return _up(self.noise_multiplier * _up(sensitivity))


@dataclass(frozen=True)
class Shift:
    """How server momentum inside the rule moves the rows: M_i = β R + (1 - β) m_i, R float32 (d,) and released."""

    server_momentum: float
    centre: Tensor

    def reach(self, radius: float) -> float:
        """No entry of an M_i is larger, when ‖m_i‖ ≤ ``radius``. A function of released data."""
        largest = float(self.centre.abs().max()) if self.centre.numel() else 0.0
        return _up(self.server_momentum * largest + (1.0 - self.server_momentum) * radius)

    def of(self, rows: Tensor) -> Tensor:
        """The M_i, float32 (n, d); a new matrix."""
        return rows.mul(1.0 - self.server_momentum).add_(self.centre, alpha=self.server_momentum)


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
    mechanism: Mechanism,
    rows: Tensor,
    answered: Answered,
    noise: Noise | None,
    context: RoundContext | None = None,
    shift: Shift | None = None,
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
    shift
        Server momentum inside the rule; given exactly when the mechanism has it there.

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
    rows out, while enough are left: their charge of 2C holds for any function. Without DP every rule runs over the
    rows that answered, with f unchanged.
    """
    n, d = rows.shape
    if n != mechanism.num_clients:
        raise ValueError(f"rows {tuple(rows.shape)}: expected one per identity, {mechanism.num_clients}")
    if (noise is None) == mechanism.private:
        raise PrivacyError(
            f"noise_multiplier = {mechanism.noise_multiplier}: noise is needed exactly when it is above 0"
        )
    if (shift is None) == mechanism.inside:
        raise ValueError("a shift is needed exactly when server momentum is inside the rule")
    present = np.zeros(n, dtype=np.bool_)
    present[np.asarray(answered, dtype=None if len(answered) else np.intp)] = True
    if mechanism.private and not present.all() and bool(rows[_indices(~present, rows)].any()):
        raise ValueError("the row of an identity that did not answer is not zero")
    inputs = rows if shift is None else shift.of(rows)
    if noise is None:
        return _over_present(mechanism.rule, inputs, present, context).to(torch.float32)

    grid, rule, sigma = steps.grid_of(mechanism.radius), mechanism.rule, mechanism.charged_sigma(d, shift)
    draw = torch.as_tensor(noise, dtype=torch.float64).to(rows.device)
    if draw.shape != (d,):
        raise ValueError(f"noise {tuple(draw.shape)}: expected ({d},)")
    if mechanism.sums_exactly and isinstance(rule, SumRule):
        total, divisor = rule.kept_sum(inputs)
        return total.add_(_on_grid(draw * _up(sigma * divisor), grid)).div_(divisor).to(torch.float32)
    if mechanism.projects_output:
        if present.sum() < rule.minimum_clients:
            present[:] = True  # too few for the rule: then zeros stand for the absent, as they do for other rules
        radius = mechanism.radius if shift is None else (1.0 - shift.server_momentum) * mechanism.radius
        grid = steps.grid_of(radius)  # of output and noise alike: bits below the noise's grid would be bare
        aggregate = _projected(_over_present(rule, inputs, present, context), radius, grid, shift)
    else:
        aggregate = _on_grid(rule.evaluate(inputs, context), grid)
    noisy = aggregate.add_(_on_grid(draw * sigma, grid))
    if shift is not None and mechanism.projects_output:
        noisy.add_(shift.centre.to(torch.float64), alpha=shift.server_momentum)  # public, so after the noise
    return noisy.to(torch.float32)


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


def context_of(mechanism: Mechanism, state: ServerState, seed: int) -> RoundContext:
    """What the rule may know of a round: public weights, the last released R as centre, a public random stream."""
    weights = getattr(mechanism.rule, "weights", None)
    return RoundContext(
        round_id=state.round_id,
        weights=None if weights is None else torch.as_tensor(weights, dtype=torch.float64),
        centre=state.momentum,
        generator=stream(seed, "rule", round_id=state.round_id),
    )


def _projected(aggregate: Tensor, radius: float, grid: float, shift: Shift | None) -> Tensor:
    """float64 (d,), on the grid: the output projected onto the ball of the rows, about that ball's centre.

    Server momentum inside the rule moves the ball to β R and shrinks it by 1 - β.
    """
    output = aggregate.to(torch.float32, copy=True)
    if shift is not None:
        output.sub_(shift.centre, alpha=shift.server_momentum)
    steps.condition_row(output, radius, grid)
    return output.to(torch.float64)


def _indices(mask: NDArray[np.bool_], rows: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(rows.device)


def _over_present(rule: Rule, rows: Tensor, present: NDArray[np.bool_], context: RoundContext | None) -> Tensor:
    """float64 (d,): the rule over the rows of those who answered; only copies when some are missing."""
    if present.all():
        return rule.evaluate(rows, context)
    indices = _indices(present, rows)
    return rule.evaluate(rows[indices], context.of_rows(indices) if context is not None else None)


def _on_grid(values: Tensor, grid: float) -> Tensor:
    """To the nearest multiple of a power of two: exact but for the rounding meant."""
    return values.div_(grid).round_().mul_(grid)


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)

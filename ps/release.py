"""The release: a rule, what one client can move it by, and the noise that hides as much.

    A = rule(m_1 … m_n)      Y = A + N(0, σ² I)      σ = z S

:class:`Mechanism` knows n, f, C, z and the rule, hence S. :func:`release` is the only place where what is not yet
private is opened and made so; nothing else of A leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation import RoundContext, Rule, SumRule
from common.aggregation import step as steps
from common.errors import PrivacyError, RuleError
from ps.privacy.released import Unreleased, open_for_mechanism

if TYPE_CHECKING:
    from common.noise import GridNoise

__all__ = ["Answered", "Mechanism", "Noise", "Shift", "release", "who_answered"]

Answered = Sequence[int] | NDArray[np.bool_]
Noise: TypeAlias = "NDArray[np.float64] | Tensor | GridNoise"
"""Standard normals, (d,) float64; or what draws on the grid itself."""

_LARGEST_NOISE = 2.0**49  # in steps of the grid: draws of 13.7 σ, beyond which there are none, stay below 2^53
_FLOAT32_ROUNDING = 2.0**-22  # relative: three float32 roundings an entry of M_i, with room


@dataclass(frozen=True)
class Mechanism:
    """What turns a round's momenta into what is released.

    Parameters
    ----------
    rule
        The aggregation rule.
    num_clients
        n, identities on the public roster.
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
    rescales
        An absent identity is left out, and n is the number of those who answered. Otherwise, under DP, it is the zero
        momentum, and neither the divisor nor σ depends on who answered.

    Raises
    ------
    RuleError
        The rule is not defined for n, was made for another f, or states nothing for server momentum inside it.
    PrivacyError
        z is negative or not finite, or z > 0 without a C that the rule needs; or absent clients are to be left out
        where that has no meaning (public weights) or would break the claim (strict).
    """

    rule: Rule
    num_clients: int
    num_byzantine: int
    clip_norm: float | None
    noise_multiplier: float
    strict: bool = False
    inside: bool = False
    rescales: bool = False

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
            divisor = self.rule.divisor(self.num_clients) if isinstance(self.rule, SumRule) else 1
            if self.sigma * divisor > _LARGEST_NOISE * steps.grid_of(self.radius):
                raise PrivacyError(
                    f"noise of σ = {self.sigma:.3g} on a grid for clip_norm = {self.radius:.3g} has more digits than "
                    "exact sums allow: ask for a larger epsilon, or a clip_norm nearer to what the rule is sensitive to"
                )
            if self.rescales and (self.strict or self.rule.takes_weights):
                raise PrivacyError(
                    'privacy.missing = "rescale": not with privacy.premise = "strict", and not with a rule whose rows '
                    'have public weights; use privacy.missing = "zero"'
                )

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

    def counted(self, answered: int) -> int:
        """How many rows the rule is charged for: n, whoever answered; or, rescaled, those who did."""
        return answered if self.rescales else self.num_clients

    def sensitivity_for(self, server_momentum: float, counted: int | None = None) -> float:
        """S of what the rule is applied to; β matters only where server momentum is inside the rule.

        Raises
        ------
        RuleError
            The rule is not defined for so few rows.
        """
        if self.clip_norm is None and self.rule.needs_clipping:
            return math.inf
        n, radius = self.num_clients if counted is None else counted, self.radius
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

    def projects_output(self, shift: Shift | None = None, counted: int | None = None) -> bool:
        """Whether S, for these rows in their ball, holds because the output is projected onto that ball."""
        shrinkage = 1.0 if shift is None else 1.0 - shift.server_momentum
        n = self.num_clients if counted is None else counted
        return self.rule.projects_output(num_clients=n, clip_norm=shrinkage * self.radius, strict=self.strict)

    def sums_exactly(self, counted: int | None = None) -> bool:
        """Whether noise is added to an exact sum of grid multiples, which leaves nothing to charge for rounding."""
        return isinstance(self.rule, SumRule) and not self.inside and not self.projects_output(None, counted)

    def charged_sensitivity(self, num_parameters: int, shift: Shift | None = None, counted: int | None = None) -> float:
        """S plus what rounding can add to it, in dimension d, for ``counted`` rows (default n).

        Nothing for an exact sum, or for an output that is projected and then truncated toward zero. Otherwise both
        neighbours' aggregates move by up to g/2 per coordinate, g √d in all; and server momentum inside the rule
        rounds the entries of every M_i to float32 besides.
        """
        base = self.sensitivity_for(shift.server_momentum if shift else 0.0, counted)
        if self.grid is None or self.sums_exactly(counted) or self.projects_output(shift, counted):
            return base
        extra = self.grid * math.sqrt(num_parameters)
        if shift is not None:
            extra += 2.0 * math.sqrt(num_parameters) * _FLOAT32_ROUNDING * shift.reach(self.radius)
        return _up(base + _up(extra))

    def charged_sigma(self, num_parameters: int, shift: Shift | None = None, counted: int | None = None) -> float:
        """z times :meth:`charged_sensitivity`, rounded up: the σ that :func:`release` uses; 0 without DP."""
        return self._sigma(self.charged_sensitivity(num_parameters, shift, counted)) if self.private else 0.0

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


def release(
    mechanism: Mechanism,
    rows: Unreleased[Tensor],
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
        float32 (n, d), conditioned (:meth:`Mechanism.condition`), zero where nobody answered; not modified. They
        come in their box, and this function opens it.
    answered
        Who did: indices of rows, or a mask (n,).
    noise
        (d,) float64, standard normal, fresh, or what draws on the grid itself; None exactly when z = 0.
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
    matrix = open_for_mechanism(rows)
    n, d = matrix.shape
    if n != mechanism.num_clients:
        raise ValueError(f"rows {tuple(matrix.shape)}: expected one per identity, {mechanism.num_clients}")
    if (noise is None) == mechanism.private:
        raise PrivacyError(
            f"noise_multiplier = {mechanism.noise_multiplier}: noise is needed exactly when it is above 0"
        )
    if (shift is None) == mechanism.inside:
        raise ValueError("a shift is needed exactly when server momentum is inside the rule")
    present = who_answered(answered, n)
    if mechanism.private and not present.all() and bool(matrix[_indices(~present, matrix)].any()):
        raise ValueError("the row of an identity that did not answer is not zero")
    inputs = matrix if shift is None else shift.of(matrix)
    if noise is None:
        return _over_present(mechanism.rule, inputs, present, context).to(torch.float32)

    grid, rule, counted = steps.grid_of(mechanism.radius), mechanism.rule, mechanism.counted(int(present.sum()))
    sigma = mechanism.charged_sigma(d, shift, counted)
    projects = mechanism.projects_output(shift, counted)
    if mechanism.sums_exactly(counted) and isinstance(rule, SumRule):
        total, divisor = rule.kept_sum(_left(inputs, present) if mechanism.rescales else inputs)
        noisy = total.add_(_on_grid(noise, _up(sigma * divisor), grid, total)).div_(divisor)
        return _published(noisy)
    if projects:
        if present.sum() < rule.minimum_clients:
            present[:] = True  # too few for the rule: then zeros stand for the absent, as they do for other rules
        radius = mechanism.radius if shift is None else (1.0 - shift.server_momentum) * mechanism.radius
        grid = steps.grid_of(radius)  # of output and noise alike: bits below the noise's grid would be bare
        aggregate = _projected(_over_present(rule, inputs, present, context), radius, grid, shift)
    elif mechanism.rescales:
        aggregate = _rounded(_over_present(rule, inputs, present, context), grid)
    else:
        aggregate = _rounded(rule.evaluate(inputs, context), grid)
    noisy = aggregate.add_(_on_grid(noise, sigma, grid, aggregate))
    if shift is not None and projects:
        noisy.add_(shift.centre.to(torch.float64), alpha=shift.server_momentum)  # public, so after the noise
    return _published(noisy)


def who_answered(answered: Answered, num_clients: int) -> NDArray[np.bool_]:
    """A mask (n,) from indices of rows, or from a mask."""
    present = np.zeros(num_clients, dtype=np.bool_)
    present[np.asarray(answered, dtype=None if len(answered) else np.intp)] = True
    return present


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


def _left(rows: Tensor, present: NDArray[np.bool_]) -> Tensor:
    """The rows of those who answered; a copy only when some are missing."""
    return rows if present.all() else rows[_indices(present, rows)]


def _over_present(rule: Rule, rows: Tensor, present: NDArray[np.bool_], context: RoundContext | None) -> Tensor:
    """float64 (d,): the rule over the rows of those who answered."""
    if context is not None and not present.all():
        context = context.of_rows(_indices(present, rows))
    return rule.evaluate(_left(rows, present), context)


def _on_grid(noise: Noise, sigma: float, grid: float, like: Tensor) -> Tensor:
    """float64 (d,): noise of standard deviation σ in multiples of the grid.

    Raises
    ------
    ValueError
        It has another size.
    """
    if isinstance(noise, np.ndarray | Tensor):
        draw = _rounded(torch.as_tensor(noise, dtype=torch.float64).to(like.device) * sigma, grid)
    else:
        draw = torch.as_tensor(noise.on_grid(sigma, grid)).to(like.device)
    if draw.shape != like.shape:
        raise ValueError(f"noise {tuple(draw.shape)}: expected {tuple(like.shape)}")
    return draw


def _published(noisy: Tensor) -> Tensor:
    """float32 (d,); adding 0 turns -0.0 into 0.0, whose sign would be the aggregate's."""
    return noisy.add_(0.0).to(torch.float32)


def _rounded(values: Tensor, grid: float) -> Tensor:
    """To the nearest multiple of a power of two: exact but for the rounding meant."""
    return values.div_(grid).round_().mul_(grid)


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)

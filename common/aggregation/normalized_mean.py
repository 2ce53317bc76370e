"""The mean of normalised vectors: Fed-NGA's aggregation, which only listens to directions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.rows import combine, rough_squared_norms
from common.aggregation.rule import RoundContext
from common.aggregation.weights import WeightedRule

__all__ = ["NormalizedMean"]

_JUST_BELOW_ONE = 1.0 - 2.0**-20


class NormalizedMean(WeightedRule):
    """Σ α_i x_i / ‖x_i‖₂, times 1 - 2⁻²⁰, with public weights α of the whole roster (default: all equal).

    Fed-NGA (NeurIPS 2025, arXiv 2408.09539), Algorithm 1. The result is not renormalised: its norm is at most 1, and
    smaller when directions differ. A Byzantine mass Σ α below 1/2 is tolerated. Not (f, κ)-robust: distances between
    rows do not enter.

    Parameters
    ----------
    weights
        One weight or sample count per identity; or :meth:`with_weights`.

    Sensitivity
        2 · max α on the m_i, whatever their norms: no clipping is needed. A unit vector is replaced by another, and
        antipodal ones attain it, up to the factor 1 - 2⁻²⁰, which is there to cover what rounding adds: below 2⁻²⁰ of
        a norm, and next to nothing in the sum, which is in float64. Strict: 2 times the sum of the f + 1 largest
        weights. With server momentum inside the rule the same, with no factor 1 - β: a direction does not shrink.
    Complexity
        O(n d) time in two passes, O(d) memory.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    zero row                       contributes zero and keeps its weight; no ε is added to norms
    non-finite row                 the same
    1e30, 3e38, 1e-45 in a row     its direction: rows of such norms are done in float64, which holds squares
    absent row (zero)              contributes zero: weights are never renormalised
    n = 2f + 1, f = 0              nothing special; f is ignored
    all equal                      that direction, times 1 - 2⁻²⁰
    ties                           nothing to choose
    d = 1                          the weighted mean of signs
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "normalized_mean"
    needs_clipping = False

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:  # noqa: ARG002
        return 2.0 * self.largest_weights(num_clients, changed)

    def projects_output(self, *, num_clients: int, clip_norm: float, strict: bool = False) -> bool:  # noqa: ARG002
        return False

    def _capped(self, num_clients: int, clip_norm: float, *, changed: int) -> float:
        return self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)

    def factors(self, x: Tensor, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        squares = rough_squared_norms(x)
        direction = np.isfinite(squares) & (squares > 0.0)
        factors = np.zeros(len(weights))
        factors[direction] = weights[direction] * _JUST_BELOW_ONE / np.sqrt(squares[direction])
        return factors

    def aggregate_scaled(self, x: Tensor, scales: NDArray[np.float64], context: RoundContext | None) -> Tensor:
        """float64 (d,): the same as of x, since scales change no direction; but a row of scale 0 counts as zero."""
        return combine(x, self.factors(x, np.where(scales > 0.0, self.weights_of(x, context), 0.0)))

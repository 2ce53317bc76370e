"""The mean weighted by sample counts: FedAvg's aggregation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.rows import combine
from common.aggregation.rule import RoundContext
from common.aggregation.weights import WeightedRule
from common.errors import RuleError

__all__ = ["WeightedMean"]


class WeightedMean(WeightedRule):
    """Σ α_i x_i, with α_i = S_i / Σ_j S_j from public sample counts S. Not robust for any f > 0.

    McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data".

    Parameters
    ----------
    weights
        One weight or sample count per identity; or :meth:`with_weights`, or the round's context. The sensitivity is
        stated for the first two only.

    Sensitivity
        2C · max α: only the replaced summand moves. Attained by antipodal rows. Strict: 2C times the sum of the f + 1
        largest weights. It includes the error of the float64 sum, 2C n 2⁻⁵². An exact sum on the release's grid, as
        the plain mean has, it is not: products with α leave the grid.
    Complexity
        O(n d) time, O(d) memory.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    no weights at all              RuleError
    a weight of 0                  the row is not read
    non-finite row                 the zero vector, its weight kept
    zero or absent row             the same: weights are never renormalised
    1e30 in a row                  the mean follows it; float64 sums, so no overflow
    any f, n = 2f + 1, d = 1       nothing special; f is ignored
    all equal, ties                the common vector times Σ α
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "weighted_mean"
    equivariant = True

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        if self.weights is None:
            raise RuleError(f"{self.name} states no sensitivity without weights: give them to the rule (with_weights)")
        return 2.0 * clip_norm * (self.largest_weights(num_clients, changed) + num_clients * 2.0**-52)

    def factors(self, x: Tensor, weights: NDArray[np.float64]) -> NDArray[np.float64]:  # noqa: ARG002
        return weights

    def aggregate_scaled(self, x: Tensor, scales: NDArray[np.float64], context: RoundContext | None) -> Tensor:
        """float64 (d,): the weighted mean of scales_i x_i; a row of scale 0 counts as zero, whatever stands there."""
        return combine(x, scales * self.weights_of(x, context))

    def weights_of(self, x: Tensor, context: RoundContext | None) -> NDArray[np.float64]:
        if self.weights is None and (context is None or context.weights is None):
            raise RuleError(f"{self.name} needs weights: its own (with_weights), or a RoundContext with weights")
        return super().weights_of(x, context)

    def _largest_allowed(self, num_rows: int) -> NDArray[np.float64]:
        return np.full(num_rows, np.inf) if self.weights is None else super()._largest_allowed(num_rows)

"""Covariance-bound agnostic filter (CAF), the rule of CafCor, with a normaliser under which it ends."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.geometry import geometry_of
from common.aggregation.rule import RoundContext, Rule

__all__ = ["CovarianceFilter", "filtered_weights"]

_REMOVED = 1e-12  # a weight below is rounding: copies of the row that was removed


class CovarianceFilter(Rule):
    """Down-weight rows along the direction of largest variance; return the mean of smallest variance met on the way.

    Allouah et al. 2025, "Towards Trustworthy Federated Learning with Untrusted Participants", Algorithm 2. With
    weights c = 1: while Σ c > n - 2f, take the weighted mean μ and the largest eigenvalue λ and its eigenvector v of
    the weighted covariance, keep μ if λ is the smallest so far, and multiply each c_i by 1 - τ_i / max τ, with τ_i =
    ⟨v, x_i - μ⟩². Here the maximum is over rows that still have a weight, which the paper's proof needs: taken over
    all rows, a far row already removed stays the largest, so that nothing else ever is, and the loop hardly ends.
    With it every iteration removes a row, so there are at most 2f.

    Sensitivity
        2C, by projecting the output: nothing smaller is proved. It does not fall with n.
    Robustness
        ‖F - x̄_S‖² ≤ κ λ_max(Cov_S) with κ = 6f/(n - f) · (1 + f/(n - 2f))², which is at most κ times the trace: (f, κ)-
        robust (the same paper, Proposition 4.1).
    Complexity
        O(n² d) time for one float64 Gram matrix, whose eigenvectors those of the covariance follow from, never d × d;
        then O(n³) an iteration; O(n²) memory beside a block of columns.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0                          the mean
    n = 2f + 1                     as any n: until Σ c ≤ 1
    all equal                      that vector; the same when all that are left are equal
    ties                           rows are taken in an order by content, not by client
    non-finite row                 the zero vector
    1e6, 1e30 in a row             removed first; distances are about a central row
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "covariance_filter"
    equivariant = True

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def kappa(self, num_clients: int) -> float:
        self.require(num_clients)
        f, others = self.num_byzantine, num_clients - 2 * self.num_byzantine
        return 6.0 * f / (num_clients - f) * (1.0 + f / others) ** 2

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        geometry = geometry_of(x)
        weights, _ = filtered_weights(geometry.gram, self.num_byzantine)
        return geometry.combine(x, weights)


def filtered_weights(gram: NDArray[np.float64], f: int) -> tuple[NDArray[np.float64], int]:
    """Weights, adding up to 1, of the mean that is kept, and how many iterations it took.

    ``gram`` is float64 (n, n), of the rows about any point near the honest ones.
    """
    n = len(gram)
    left = np.ones(n)
    best, smallest, iterations = left / n, np.inf, 0
    while left.sum() > n - 2 * f:
        active = np.flatnonzero(left)
        share = left[active] / left.sum()
        inner = gram[np.ix_(active, active)]
        to_mean = inner @ share
        about_mean = inner - to_mean[:, None] - to_mean[None, :] + share @ to_mean
        roots = np.sqrt(share)
        last = len(active) - 1
        values, vectors = scipy.linalg.eigh(about_mean * roots[:, None] * roots[None, :], subset_by_index=[last, last])
        variance = float(values[0])
        if variance <= smallest:
            smallest, best = variance, np.zeros(n)
            best[active] = share
        spread = vectors[:, 0] ** 2 / share  # τ over the variance
        if variance <= 0.0 or not spread.max() > 0.0:
            break
        iterations += 1
        left[active] *= 1.0 - spread / spread.max()
        left[left < _REMOVED] = 0.0
    return best, iterations

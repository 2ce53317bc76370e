"""Nearest-neighbour mixing (NNM): each row becomes the mean of the rows nearest to it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from common.aggregation.before.preparation import Preparation
from common.aggregation.geometry import geometry_of
from common.aggregation.rows import mix
from common.aggregation.rule import RoundContext

__all__ = ["NearestNeighborMixing"]


class NearestNeighborMixing(Preparation):
    """x_i ← the mean of the n - f rows nearest x_i, itself included.

    Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity".

    Sensitivity
        One row may be among the nearest of all others, so nothing is proved for a rule behind it: 2C, by projecting
        the output.
    Robustness
        κ becomes 8f/(n - f) · (κ + 1).
    Complexity
        O(n² d) time, for one float64 Gram matrix and one product; a float32 (n, d) for the result.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0                          every row becomes the mean
    n = 2f + 1                     the f + 1 nearest
    ties                           the first in an order by content, not by client
    non-finite row                 the zero vector
    1e30 in a row                  far from the rest; squares fit float64
    all equal                      unchanged
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "nearest_neighbor_mixing"

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def kappa_after(self, kappa: float, num_clients: int) -> float:
        return 8.0 * self.num_byzantine / (num_clients - self.num_byzantine) * (kappa + 1.0)

    def apply(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        n = x.shape[0]
        kept = n - self.num_byzantine
        geometry = geometry_of(x)
        nearest = np.argsort(geometry.squared_distances, axis=1, kind="stable")[:, :kept]
        matrix = np.zeros((n, n))
        np.put_along_axis(matrix, nearest, 1.0 / kept, axis=1)
        in_place = np.empty_like(matrix)
        in_place[geometry.order] = matrix  # rows of the result stand where they stood; columns stay in canonical order
        finite = geometry.finite
        return mix(x, np.ascontiguousarray(in_place[:, finite]), geometry.order[finite])

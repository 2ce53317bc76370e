"""Maximum correntropy aggregation (MCA), a baseline of Fed-NGA."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.checks import count, positive
from common.aggregation.geometry import Geometry, centred_at, geometry_of
from common.aggregation.rule import RoundContext, Rule

__all__ = ["MaximumCorrentropy"]


class MaximumCorrentropy(Rule):
    """argmax_v Σ exp(-‖x_i - v‖² / (2 σ²)): a local maximum, by the fixed point v ← Σ k_i x_i / Σ k_i.

    Luan, Li, Liu & Chen 2024, "Robust Federated Learning: Maximum Correntropy Aggregation Against Byzantine Attacks".
    k_i is the exponential at v. Neither that paper's abstract nor Fed-NGA states σ or where to start. Here v starts at
    the row nearest a majority of rows, and σ is by default the median distance of the other rows from it, which makes
    the rule equivariant. Objective and iteration know nothing of f.

    Parameters
    ----------
    width
        σ, instead of the default.
    tolerance
        The iteration ends when a step is smaller than this share of σ.
    iterations
        At most so many.

    Sensitivity
        2C, by projecting the output: nothing smaller is proved. It does not fall with n.
    Complexity
        O(n² d) time for one float64 Gram matrix, then O(n²) an iteration; O(n²) memory beside a block of columns.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0, n = 2f + 1              nothing special; f is not used
    most rows equal (σ = 0)        that row
    all equal                      that vector
    ties                           the start is the first in an order by content, not by client
    non-finite row                 the zero vector
    1e30 in a row                  weight 0
    zero norm, d = 1               nothing special
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "mca"

    def __init__(
        self, *, num_byzantine: int, width: float | None = None, tolerance: float = 1e-5, iterations: int = 100
    ) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.width = None if width is None else positive(self.name, "width", width)
        self.tolerance = positive(self.name, "tolerance", tolerance)
        self.iterations = count(self.name, "iterations", iterations)
        self.equivariant = width is None

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        geometry = geometry_of(x)
        return geometry.combine(x, self._weights(geometry))

    def _weights(self, geometry: Geometry) -> NDArray[np.float64]:
        n, start = geometry.num_rows, geometry.centre
        weights = np.zeros(n)
        weights[start] = 1.0
        squares = geometry.squared_distances[start]
        width = self.width
        if width is None:
            others = np.delete(squares, start)
            width = float(np.sqrt(np.median(others))) if len(others) else 0.0
        if width == 0.0:
            return weights
        gram = centred_at(geometry.gram, start)
        for _ in range(self.iterations):
            kernel = np.exp(-0.5 * squares / width**2)
            moved = kernel / kernel.sum() - weights
            weights = weights + moved
            if moved @ gram @ moved <= (self.tolerance * width) ** 2:
                break
            shared = gram @ weights
            squares = np.maximum(np.diagonal(gram) - 2.0 * shared + weights @ shared, 0.0)
        return weights

"""The geometric median, to a tolerance, and its smoothed approximation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.aggregation.checks import count, positive
from common.aggregation.geometry import geometry_of
from common.aggregation.rows import combine, squared_norms
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.weiszfeld import median_weights
from common.errors import RuleError

__all__ = ["GeometricMedian"]

_SMOOTHED_ITERATIONS = 3


class GeometricMedian(Rule):
    """argmin_z Σ ‖x_i - z‖₂.

    Weiszfeld's iteration z ← Σ w_i x_i / Σ w_i, w_i = 1/‖x_i - z‖ (Weiszfeld 1937), with the correction of Vardi &
    Zhang 2000 where z is one of the rows. The minimiser is a convex combination of the rows, so everything but the
    last step happens among the n weights of that combination: see :mod:`common.aggregation.weiszfeld`.

    Parameters
    ----------
    tolerance
        The iteration ends when a step is smaller than this share of the median distance of the rows from z.
    smoothing
        ν. If given, the smoothed median instead (Pillutla, Kakade & Harchaoui 2022, "Robust Aggregation for Federated
        Learning"), as ByzFL has it: from z = 0, with w_i = 1/max(‖x_i - z‖, ν). It depends on where 0 is and on the
        scale, so it is not equivariant.
    iterations
        At most so many; by default 1000, and 3 if smoothed.

    Sensitivity
        2C, by projecting the output. It does not fall with n, and two antipodal clusters with one row to decide
        between them attain it.
    Robustness
        (f, κ)-robust with κ = 4 (1 + f/(n - 2f))² (Allouah et al. 2023, "Fixing by Mixing"); not the smoothed one.
    Complexity
        O(n² d) for one float64 Gram matrix, then O(n³) an iteration, of which ten usually suffice; O(n²) memory beside
        a block of columns. Smoothed: O(n d) an iteration, O(d) memory.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0, n = 2f + 1              nothing special; f is not used
    rows on a line, d = 1          the median; for even n the midpoint of the middle two
    ties, most rows equal          that row, exactly
    all equal                      that vector
    non-finite row                 the zero vector
    1e30 in a row                  a bounded pull towards it
    zero norm                      nothing special
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "geometric_median"

    def __init__(
        self,
        *,
        num_byzantine: int,
        tolerance: float = 1e-10,
        smoothing: float | None = None,
        iterations: int | None = None,
    ) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.tolerance = positive(self.name, "tolerance", tolerance)
        self.smoothing = None if smoothing is None else positive(self.name, "smoothing", smoothing)
        default = 1000 if smoothing is None else _SMOOTHED_ITERATIONS
        self.iterations = default if iterations is None else count(self.name, "iterations", iterations)
        if self.tolerance >= 1.0:
            raise RuleError(f"{self.name}: tolerance = {tolerance!r}: expected a share below 1")
        self.equivariant = smoothing is None

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def kappa(self, num_clients: int) -> float | None:
        self.require(num_clients)
        if self.smoothing is not None:
            return None
        return 4.0 * (1.0 + self.num_byzantine / (num_clients - 2 * self.num_byzantine)) ** 2

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        if self.smoothing is not None:
            return self._smoothed(x, self.smoothing)
        geometry = geometry_of(x)
        return geometry.combine(x, median_weights(geometry, self.tolerance, self.iterations))

    def _smoothed(self, x: Tensor, smoothing: float) -> Tensor:
        z: Tensor | None = None
        for _ in range(self.iterations):
            squares = squared_norms(x, z)
            bad = ~np.isfinite(squares)
            if bad.any():
                squares[bad] = 0.0 if z is None else float((z * z).sum())
            pulls = 1.0 / np.maximum(np.sqrt(squares), smoothing)
            z = combine(x, np.where(bad, 0.0, pulls / pulls.sum()))
        return torch.zeros(x.shape[1], dtype=torch.float64, device=x.device) if z is None else z

"""Adaptive robust clipping (ARC): the longest rows are cut to the length of the next longest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.aggregation.before.preparation import RowScaling, clip_scales

__all__ = ["AdaptiveClipping"]


class AdaptiveClipping(RowScaling):
    """Clip the k = ⌊2 f (n - f)/n⌋ longest rows to the norm of the (k + 1)-th longest.

    Allouah et al. 2024, "The Vital Role of Gradient Clipping in Byzantine-Resilient Distributed Learning" (arXiv
    2405.14432). k is computed in integers.

    Sensitivity
        One row can decide the length of k others, so nothing is proved for a rule behind it: 2C, by projecting the
        output. Refused where server momentum is inside the rule: there a norm about 0 says nothing of what clients
        sent.
    Robustness
        κ becomes κ + 2f/(n - 2f).
    Complexity
        O(n d) time; a float32 (n, d) for the result, if any row is clipped and the rule behind takes no scales.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0                          the rows as they are
    n = 2f + 1                     k = 2f(f + 1)/(2f + 1): at least one row stays
    ties                           rows of equal length are scaled equally
    non-finite row                 the zero vector
    1e30, 3e38 in a row            clipped: norms and products are in float64
    zero row, all equal, d = 1     nothing special
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "adaptive_clipping"

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def kappa_after(self, kappa: float, num_clients: int) -> float:
        return kappa + 2.0 * self.num_byzantine / (num_clients - 2 * self.num_byzantine)

    def scales(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        n, f = len(norms), self.num_byzantine
        clipped = 2 * f * (n - f) // n
        counted = np.where(np.isfinite(norms), norms, 0.0)
        return clip_scales(norms, float(np.sort(counted)[n - clipped - 1]))

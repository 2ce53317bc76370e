"""Clipping of every row to a fixed norm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.aggregation.before.preparation import FLOAT32_ROUNDING, RowScaling, clip_scales
from common.aggregation.checks import positive

__all__ = ["Clipping"]


class Clipping(RowScaling):
    """x_i ← x_i · min(1, c/‖x_i‖₂).

    Parameters
    ----------
    radius
        c.

    Sensitivity
        A row stays a row, in the ball of radius min(C, c), which is where the sensitivity of the rule behind it is
        taken (with 2⁻²² c for rounding to float32). Refused where server momentum is inside the rule: there a norm
        about 0 says nothing of what the client sent.
    Robustness
        A fixed radius is not (f, κ)-robust for any κ, whatever follows.
    Complexity
        O(n d) time; a float32 (n, d) for the result, if any row is clipped and the rule behind takes no scales.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    zero row                       zero
    non-finite row                 the zero vector
    1e30, 3e38 in a row            clipped: norms and products are in float64
    any f, n = 2f + 1, d = 1       nothing special; f is not used
    ties, all equal                nothing to choose
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "clipping"

    def __init__(self, *, num_byzantine: int, radius: float = 2.0) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.radius = positive(self.name, "radius", radius)

    def moved(self, num_clients: int, radius: float, bound: float) -> float:  # noqa: ARG002 - the same for every n
        if bound <= self.radius:  # nothing is ever clipped
            return radius
        return min(radius, self.radius) + self.radius * FLOAT32_ROUNDING

    def bound_after(self, bound: float) -> float:
        return min(bound, self.radius * (1.0 + FLOAT32_ROUNDING))

    def scales(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        return clip_scales(norms, self.radius)

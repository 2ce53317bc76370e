"""Clipping of every row to a fixed norm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.before.preparation import FLOAT32_ROUNDING, Preparation
from common.aggregation.checks import positive
from common.aggregation.rows import scale_rows, squared_norms
from common.aggregation.rule import RoundContext

__all__ = ["Clipping", "clip_scales"]


class Clipping(Preparation):
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
        O(n d) time; a float32 (n, d) for the result, if any row is clipped.

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
    equivariant = False
    keeps_identities = True
    allowed_inside = False

    def __init__(self, *, num_byzantine: int, radius: float = 2.0) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.radius = positive(self.name, "radius", radius)

    def moved(self, num_clients: int, radius: float, bound: float) -> float:  # noqa: ARG002 - the same for every n
        if bound <= self.radius:  # nothing is ever clipped
            return radius
        return min(radius, self.radius) + self.radius * FLOAT32_ROUNDING

    def bound_after(self, bound: float) -> float:
        return min(bound, self.radius * (1.0 + FLOAT32_ROUNDING))

    def apply(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return scale_rows(x, clip_scales(np.sqrt(squared_norms(x)), self.radius))


def clip_scales(norms: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """What to multiply each row by, so that its norm is at most ``radius``; 0 for a row that is not finite."""
    scales = np.where(np.isfinite(norms), 1.0, 0.0)
    longer = np.isfinite(norms) & (norms > radius)
    scales[longer] = radius / norms[longer]
    return scales

"""Min-sum: as far from all honest clients together as one of them is."""

from __future__ import annotations

import math

from adversary.attacks.spread import Spread, WithinSpread

__all__ = ["MinSum"]


class MinSum(WithinSpread):
    """The largest deviation whose distances to the honest momenta sum to no more than those of one of them.

    μ + γ p with the largest γ such that Σ_i ‖μ + γ p - g_i‖² ≤ max_i Σ_j ‖g_i - g_j‖². Shejwalkar & Houmansadr 2021,
    "Manipulating the Byzantine". About the mean the sum is Σ ‖g_i - μ‖² + h γ² ‖p‖², so γ has a closed form:
    γ = max_i ‖g_i - μ‖ / ‖p‖, and the vector is as far from the mean as the furthest honest one.

    Parameters
    ----------
    direction
        "unit": p = -μ, "sign": -sign(μ), "std": minus the standard deviations.

    Notes
    -----
    With one honest momentum, or all equal, there is no spread and the mean is sent. O(h² d) time; beside the result,
    float64 blocks of 2^16 columns. The bound holds up to rounding of the vector to float32. More cautious than min-max.
    """

    name = "min_sum"

    def largest(self, spread: Spread) -> float:
        # max_i Σ_j ‖g_i - g_j‖² = h max_i ‖g_i - μ‖² + Σ_j ‖g_j - μ‖², and the last term is on both sides.
        return math.sqrt(float(spread.from_mean.max()) / spread.squared_norm)

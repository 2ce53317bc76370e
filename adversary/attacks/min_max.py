"""Min-max: as far as honest clients are from each other."""

from __future__ import annotations

import numpy as np

from adversary.attacks.spread import Spread, WithinSpread

__all__ = ["MinMax"]


class MinMax(WithinSpread):
    """The largest deviation that is no further from any honest momentum than two of them are from each other.

    μ + γ p with the largest γ such that max_i ‖μ + γ p - g_i‖ ≤ max_{i,j} ‖g_i - g_j‖. Shejwalkar & Houmansadr 2021,
    "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated Learning" (there by
    halving steps; here γ is the smallest of the roots of h quadratics, one pass over the data and another to write).

    Parameters
    ----------
    direction
        "unit": p = -μ, "sign": -sign(μ), "std": minus the standard deviations.

    Notes
    -----
    With one honest momentum, or all equal, there is no spread and the mean is sent. O(h² d) time; beside the result,
    float64 blocks of 2^16 columns. The bound holds up to rounding of the vector to float32. Strong against rules that
    compare distances; the more clients' data differ, the more room it has.
    """

    name = "min_max"

    def largest(self, spread: Spread) -> float:
        # γ² ‖p‖² - 2 γ ⟨p, g_i - μ⟩ + ‖μ - g_i‖² ≤ D² for every i; each holds for γ = 0, so up to its larger root.
        room = np.maximum(float(spread.squared_distances.max()) - spread.from_mean, 0.0)
        along, squared_norm = spread.along, spread.squared_norm
        return float(((along + np.sqrt(along**2 + squared_norm * room)) / squared_norm).min())

"""What releases cost, and what a budget holds, in exact rationals.

T Gaussian releases of noise multipliers z_t compose to one with μ² = Σ 1/z_t² (Dong, Roth & Su 2022, Corollary 2 of
section 3). So costs add up, (ε, δ) becomes a limit B = μ*², and whether one more release fits is a comparison of
rationals: no rounding decides it.
"""

from __future__ import annotations

import math
from fractions import Fraction

from common.privacy.conversions import Calibration, mu_of

__all__ = ["cost_of", "limit_of", "mu_from"]

_GRID = 2200  # 1/z² of the largest float64 exceeds 2^-2048
_SHAVED = 1 - 4e-12  # far more than the error of evaluating μ*, and than σ = z S rounded to the nearest


def cost_of(noise_multiplier: float) -> Fraction | None:
    """1/z² as an exact rational, rounded up to a multiple of 2^-2200 so that sums stay small; None for z = 0 (∞)."""
    if noise_multiplier == 0:
        return None
    square = Fraction(noise_multiplier) ** 2
    return Fraction(-(-(square.denominator << _GRID) // square.numerator), 1 << _GRID)


def limit_of(eps: float, delta: float, conversion: Calibration) -> Fraction:
    """B = μ*²: the most that Σ 1/z² may reach within (``eps``, ``delta``), rounded down.

    Raises
    ------
    PrivacyError
        ``eps`` is negative or not a number, or ``delta`` not inside (0, 1).
    """
    return Fraction(mu_of(eps, delta, conversion) * _SHAVED) ** 2


def mu_from(spent: Fraction | None) -> float:
    """μ = √(Σ 1/z²); ∞ for None.

    Scaled, so that neither a huge nor a tiny rational leaves the range of float64.
    """
    if spent is None:
        return math.inf
    if spent == 0:
        return 0.0
    shift = (spent.numerator.bit_length() - spent.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(spent * Fraction(4) ** -shift), shift)
    except OverflowError:
        return math.inf

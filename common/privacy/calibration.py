"""How much noise for how much privacy: T Gaussian releases of one sensitivity, and nothing else.

Every function takes or gives the *noise multiplier* z = σ / S: the noise's standard deviation over the L2 sensitivity
that the rule states for the neighbouring relation of the claim (one client's data replaced). So the relation is in S;
it must not be counted a second time here. Releases with multipliers z_1, …, z_T, also adaptive ones, together are one
Gaussian release with μ² = Σ 1/z_t², and μ is all that :mod:`common.privacy.conversions` needs.

Edge cases: z = 0 gives ε = ∞, z = ∞ gives 0; ε = ∞ gives z = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from common.errors import PrivacyError
from common.privacy.conversions import Calibration, Conversion, epsilon_of, mu_of, mu_to_delta

__all__ = [
    "Calibration",
    "Conversion",
    "calibrate",
    "compose",
    "epsilon_exact",
    "epsilon_improved",
    "epsilon_of",
    "epsilon_renyi",
    "mu_of",
    "mu_to_delta",
    "multiplier_exact",
    "multiplier_improved",
    "multiplier_renyi",
    "sigma_of",
    "sufficient_multiplier",
]

ROUNDED_UP = 1e-9
"""Relative amount by which a calibrated multiplier exceeds the computed one."""


def compose(multipliers: Iterable[float]) -> float:
    """μ = √(Σ 1/z_t²) of several releases, each with its own multiplier.

    Raises
    ------
    PrivacyError
        A multiplier is negative or not a number.
    """
    return math.hypot(*(_mu(z, 1) for z in multipliers))


def epsilon_exact(z: float, rounds: int, delta: float) -> float:
    """ε of ``rounds`` releases with multiplier ``z``, by the tight formula of the Gaussian mechanism."""
    return epsilon_of(_mu(z, rounds), delta, "exact")


def epsilon_renyi(z: float, rounds: int, delta: float) -> float:
    """ε of ``rounds`` releases with multiplier ``z``, by Mironov's conversion at its best order."""
    return epsilon_of(_mu(z, rounds), delta, "renyi")


def epsilon_improved(z: float, rounds: int, delta: float) -> float:
    """ε of ``rounds`` releases with multiplier ``z``, by the improved Rényi conversion at its best order."""
    return epsilon_of(_mu(z, rounds), delta, "improved")


def multiplier_exact(eps: float, delta: float, rounds: int) -> float:
    """z with which ``rounds`` releases are (``eps``, ``delta``)-DP, by the tight formula; not rounded up."""
    return _multiplier(mu_of(eps, delta, "exact"), rounds)


def multiplier_renyi(eps: float, delta: float, rounds: int) -> float:
    """z = √(T/2) / (√(L + ε) − √L): by Mironov's conversion at its best order; not rounded up."""
    return _multiplier(mu_of(eps, delta, "renyi"), rounds)


def multiplier_improved(eps: float, delta: float, rounds: int) -> float:
    """z with which ``rounds`` releases are (``eps``, ``delta``)-DP, by the improved conversion; not rounded up."""
    return _multiplier(mu_of(eps, delta, "improved"), rounds)


def sufficient_multiplier(eps: float, delta: float, rounds: int) -> float:
    """z = 2 √(T L) / ε, L = log(1/δ): the closed form, where it is enough.

    With it ε' = ε (ε / (8 L) + 1/√2) by Mironov's conversion, which is at most ε exactly when ε ≤ (8 − 4√2) L.

    Raises
    ------
    PrivacyError
        ``eps`` is beyond (8 − 4√2) log(1/δ) ≈ 2.343 log(1/δ), where the closed form promises too much; or not
        positive.
    """
    _require(eps > 0, f"epsilon = {eps!r}: expected a positive number")
    _require(0 < delta < 1, f"delta = {delta!r}: expected a number inside (0, 1), below 1/clients")
    log_inverse = -math.log(delta)
    largest = (8 - 4 * math.sqrt(2)) * log_inverse
    _require(
        eps <= largest,
        f"epsilon = {eps:g} with delta = {delta:g}: the closed form holds up to {largest:.6g}, that is "
        "(8 - 4 sqrt 2) log(1/delta); use the exact or the renyi calibration",
    )
    return _multiplier(eps / math.sqrt(2 * log_inverse) / math.sqrt(2), rounds)


def calibrate(eps: float, delta: float, rounds: int, calibration: Calibration = "exact") -> float:
    """The noise multiplier of a run: rounded up by 1e-9, so that rounding never refuses the last planned round.

    Parameters
    ----------
    eps, delta
        The guarantee wanted for all ``rounds`` releases together.
    rounds
        T, at least 1.
    calibration
        The conversion the guarantee is stated by.

    Returns
    -------
    float
        z, with ε(z) ≤ ``eps``; positive and finite.

    Raises
    ------
    PrivacyError
        ``eps`` is not positive and finite, ``delta`` not inside (0, 1), ``rounds`` below 1, the calibration unknown,
        or no float64 is large enough.
    """
    _require(0 < eps < math.inf, f"epsilon = {eps!r}: expected a positive, finite number; leave it out for no privacy")
    _require(
        calibration in ("exact", "renyi"), f"calibration = {calibration!r}: expected 'exact' or 'renyi'; choose one"
    )
    z = _multiplier(mu_of(eps, delta, calibration), rounds) * (1 + ROUNDED_UP)
    _require(0 < z < math.inf, f"epsilon = {eps!r} needs a noise multiplier of {z!r}: ask for a less extreme epsilon")
    while epsilon_of(_mu(z, rounds), delta, calibration) > eps:
        z *= 1 + ROUNDED_UP
    return z


def sigma_of(noise_multiplier: float, sensitivity: float) -> float:
    """σ = z S, the smallest float64 that is not below the exact product."""
    sigma = noise_multiplier * sensitivity
    if math.isfinite(sigma) and Fraction(sigma) < Fraction(noise_multiplier) * Fraction(sensitivity):
        return math.nextafter(sigma, math.inf)
    return sigma


def _mu(z: float, rounds: int) -> float:
    _require(z >= 0, f"noise multiplier = {z!r}: expected a number, at least 0")
    _require(rounds >= 0, f"rounds = {rounds!r}: expected at least 0")
    if rounds == 0:
        return 0.0
    return math.sqrt(rounds) / z if z > 0 else math.inf


def _multiplier(mu: float, rounds: int) -> float:
    _require(rounds >= 1, f"rounds = {rounds!r}: expected at least 1")
    return math.sqrt(rounds) / mu if mu > 0 else math.inf


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)

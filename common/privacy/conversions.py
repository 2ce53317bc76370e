"""ε, δ and μ of one Gaussian release whose sensitivity is μ times its standard deviation.

Adaptive Gaussian releases compose to one (Dong, Roth & Su 2022, Corollary 2 of section 3), so this is all the
accounting there is. Three conversions, with ρ = μ²/2 and L = log(1/δ):

============  =================================================================================================
``exact``     the root ε of δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)     (Balle & Wang 2018, Theorem 8)
``renyi``     ρ + 2 √(ρ L), Mironov's conversion at its best order   (Mironov 2017, Proposition 3)
``improved``  the minimum over α > 1 of α ρ + log((α−1)/α) − (log δ + log α)/(α−1)
              (Canonne, Kamath & Steinke 2020, Proposition 12; Balle et al. 2020); to compare with dp-accounting
============  =================================================================================================

Always exact ≤ improved ≤ renyi. Where rounding could decide, ε is rounded up and μ down; against arithmetic of 400
digits the relative error of μ stays below 1e-14.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr

from common.errors import PrivacyError

__all__ = ["Calibration", "Conversion", "epsilon_of", "mu_of", "mu_to_delta"]

Calibration = Literal["exact", "renyi"]
Conversion = Literal["exact", "renyi", "improved"]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


def mu_to_delta(eps: float, mu: float) -> float:
    """The smallest δ for which one Gaussian release with S/σ = ``mu`` is (``eps``, δ)-DP.

    Raises
    ------
    PrivacyError
        ``eps`` or ``mu`` is negative or not a number.
    """
    _require(eps >= 0, f"epsilon = {eps!r}: expected a number, at least 0")
    _require(mu >= 0, f"mu = {mu!r}: expected a number, at least 0")
    return min(1.0, math.exp(_log_delta(eps, mu)))


def epsilon_of(mu: float, delta: float, conversion: Conversion) -> float:
    """The ε at ``delta`` of releases that compose to ``mu``, by the conversion named.

    Raises
    ------
    PrivacyError
        ``mu`` is negative or not a number, or ``delta`` not inside (0, 1).
    """
    _require(mu >= 0, f"mu = {mu!r}: expected a number, at least 0")
    _require_known(conversion)
    log_inverse = _log_inverse(delta)
    if mu == 0:
        return 0.0
    renyi = mu * (mu / 2 + math.sqrt(2 * log_inverse))
    if conversion == "renyi" or math.isinf(renyi):
        return renyi
    if conversion == "improved":
        return min(renyi, _improved(mu, log_inverse))
    if _log_delta(0.0, mu) <= -log_inverse:
        return 0.0
    return _bisect(lambda eps: _log_delta(eps, mu) > -log_inverse, 0.0, renyi)[1]


def mu_of(eps: float, delta: float, conversion: Conversion) -> float:
    """The largest μ whose ε at ``delta`` does not exceed ``eps``: the inverse of :func:`epsilon_of`.

    Raises
    ------
    PrivacyError
        ``eps`` is negative or not a number, or ``delta`` not inside (0, 1).
    """
    _require(eps >= 0, f"epsilon = {eps!r}: expected a number, at least 0")
    _require_known(conversion)
    log_inverse = _log_inverse(delta)
    if math.isinf(eps):
        return math.inf
    renyi = math.sqrt(2) * (eps / (math.sqrt(log_inverse + eps) + math.sqrt(log_inverse)))
    if conversion == "renyi":
        return renyi
    beyond = max(2 * renyi, delta)
    while _log_delta(eps, beyond) <= -log_inverse:
        beyond *= 2
    exact = _bisect(lambda mu: _log_delta(eps, mu) <= -log_inverse, renyi, beyond)[0]
    if conversion == "exact":
        return exact
    return _bisect(lambda mu: epsilon_of(mu, delta, "improved") <= eps, renyi, exact)[0]


def _log_delta(eps: float, mu: float) -> float:
    """log δ, computed without cancellation where δ is small.

    With t = ε/μ − μ/2 and Mills' ratio R(x) = Φ(−x)/φ(x), e^ε φ(t + μ) = φ(t), so that
    δ = Φ(−t) − φ(t) R(t + μ) = φ(t) (R(t) − R(t + μ)) = φ(t) ∫_t^{t+μ} (1 − x R(x)) dx.
    """
    if mu == 0 or math.isinf(eps):
        return -math.inf
    t = eps / mu - mu / 2
    if math.isinf(t):
        return math.copysign(math.inf, -t) if t > 0 else 0.0
    log_density = -t * t / 2 - _LOG_SQRT_2PI
    if mu < 0.5:
        x = t + mu / 2 * (1 + _NODES)
        gap = mu / 2 * float(_WEIGHTS @ (1 - x * _mills(x)))
    elif t > 0:
        gap = float(_mills(t)) - float(_mills(t + mu))
    else:
        return math.log(float(ndtr(-t)) - math.exp(log_density) * float(_mills(t + mu)))
    return log_density + math.log(gap) if gap > 0 else -math.inf


def _mills(x: float | npt.NDArray[np.float64]) -> float | npt.NDArray[np.float64]:
    """Φ(−x) / φ(x), for x that is not far below 0."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))  # type: ignore[no-any-return]


def _improved(mu: float, log_inverse: float) -> float:
    """The improved conversion at its best order α = 1 + u.

    Its derivative in u is ρ − (L − log α) / u², so that the best u is the only root of ρ u² + log(1 + u) = L.
    Any u gives a valid ε; the root gives the smallest.
    """
    if not 1e-150 < mu < 1e150:  # ρ would leave the range of float64
        return math.inf
    rho = mu * mu / 2

    def below_root(u: float) -> bool:
        return rho * u * u + math.log1p(u) < log_inverse

    longest = 1e300  # an order beyond this changes nothing, and stays clear of overflow
    low = min(math.sqrt(log_inverse) / mu, math.expm1(min(log_inverse / 2, 690.0)), longest)
    high = min(math.sqrt(2 * log_inverse) / mu, math.expm1(min(log_inverse, 690.0)), longest)
    for _ in range(64):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if below_root(middle) else (low, middle)
    u = high
    eps = (1 + u) * rho - math.log1p(1 / u) + (log_inverse - math.log1p(u)) / u
    return max(0.0, eps)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Neighbouring floats around the end of where ``holds``: it does at the first, not at the second."""
    for _ in range(1100):  # enough to reach the smallest float from the largest
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _require_known(conversion: str) -> None:
    _require(
        conversion in ("exact", "renyi", "improved"), f"conversion {conversion!r}: expected exact, renyi or improved"
    )


def _log_inverse(delta: float) -> float:
    _require(0 < delta < 1, f"delta = {delta!r}: expected a number inside (0, 1), below 1/clients")
    return -math.log(delta)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)

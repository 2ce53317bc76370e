"""ε, δ, T and z of one another: any three give the fourth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from common.errors import PrivacyError
from common.privacy.calibration import Calibration, calibrate, epsilon_of, mu_of, mu_to_delta

__all__ = ["MOST_ROUNDS", "Four", "mu_from", "rounds_within", "solve"]

MOST_ROUNDS = 10_000_000
"""The most rounds a configuration may ask for."""

_AGREE = 1e-6
"""By so much, relative, a value may differ from what follows from the three others."""


@dataclass(frozen=True)
class Four:
    """ε, δ, T and z; None where not known."""

    epsilon: float | None
    delta: float | None
    rounds: int | None
    noise_multiplier: float | None


def solve(given: Four, calibration: Calibration) -> Four:
    """Fill in the one that is missing, if three are there; else return what was given.

    ε is infinite where z is 0. z is rounded up, T down, and δ up.

    Raises
    ------
    PrivacyError
        All four are given and do not belong together, or nothing can be the missing one.
    """
    eps, delta, rounds, z = given.epsilon, given.delta, given.rounds, given.noise_multiplier
    if delta is None:
        if eps is None or rounds is None or z is None:
            return given
        return replace(given, delta=_delta(eps, mu_from(z, rounds), calibration))
    if rounds is not None and z is not None:
        costs = epsilon_of(mu_from(z, rounds), delta, calibration)
        if eps is not None and abs(costs - eps) > _AGREE * eps:
            raise PrivacyError(
                f"contradiction: {rounds} rounds with noise multiplier {z:.6g} cost epsilon = {costs:.6g} at delta = "
                f"{delta:g} ({calibration}), not {eps:g}; leave out epsilon, the rounds, or the noise"
            )
        return replace(given, epsilon=costs if eps is None else eps)
    if eps is not None and rounds is not None:
        return replace(given, noise_multiplier=calibrate(eps, delta, rounds, calibration))
    if eps is not None and z is not None:
        fit = rounds_within(eps, delta, z, calibration)
        if fit == 0:
            costs = epsilon_of(mu_from(z, 1), delta, calibration)
            raise PrivacyError(
                f"contradiction: one round with noise multiplier {z:.6g} costs epsilon = {costs:.6g} at delta = "
                f"{delta:g} ({calibration}), more than {eps:g}; more noise, or a larger epsilon"
            )
        return replace(given, rounds=fit)
    return given


def rounds_within(eps: float, delta: float, z: float, calibration: Calibration) -> int:
    """The most rounds with multiplier z that cost at most ε at δ, up to :data:`MOST_ROUNDS`."""
    reach = mu_of(eps, delta, calibration) * z
    if reach >= math.sqrt(MOST_ROUNDS) * (1 + 1e-9):
        return MOST_ROUNDS

    def fits(rounds: int) -> bool:
        return epsilon_of(mu_from(z, rounds), delta, calibration) <= eps

    rounds = math.floor(reach * reach)
    while rounds > 0 and not fits(rounds):
        rounds -= 1
    while rounds < MOST_ROUNDS and fits(rounds + 1):
        rounds += 1
    return rounds


def mu_from(z: float, rounds: int) -> float:
    """μ = √T / z."""
    return math.sqrt(rounds) / z if z > 0 else math.inf


def _delta(eps: float, mu: float, calibration: Calibration) -> float:
    """The smallest δ, rounded up, of releases that compose to μ."""
    if calibration == "exact":
        found = mu_to_delta(eps, mu)
    else:  # ε = ρ + 2 √(ρ L), solved for L = log(1/δ)
        rho = mu * mu / 2
        found = math.exp(-((eps - rho) ** 2) / (4 * rho)) if rho > 0 and eps > rho else float(rho > 0)
    for _ in range(60):
        if not 0 < found < 1:
            break
        if epsilon_of(mu, found, calibration) <= eps:
            return found
        found *= 1 + 1e-12
    raise PrivacyError(
        f"no delta inside (0, 1) makes releases with mu = {mu:.6g} ({calibration}) private at epsilon = {eps:g}: "
        f"it would be {found:g}; give another epsilon, or leave it out and give delta"
    )

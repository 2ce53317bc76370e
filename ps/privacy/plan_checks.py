"""What a plan refuses, in sentences that say what would do."""

from __future__ import annotations

import math
from dataclasses import asdict
from fractions import Fraction
from typing import Literal

from common.errors import PrivacyError
from common.schedules import Schedule, parse_schedule
from ps.privacy.solved import MOST_ROUNDS, Four

__all__ = [
    "check_federation",
    "check_ranges",
    "check_sufficient",
    "given_multiplier",
    "number_or_share",
    "one_of",
    "radius_of",
    "schedule_of",
]


def check_ranges(**given: float | None) -> None:
    """Refuse a number that is not in its range."""
    for name, value in given.items():
        if value is None:
            continue
        whole = name in ("rounds", "clients", "parameters")
        kind = "whole number" if whole else "finite number"
        _require(
            not isinstance(value, bool) and isinstance(value, int if whole else int | float) and math.isfinite(value),
            f"{name} = {value!r}: expected a {kind}",
        )
        if name == "delta":
            _require(0 < value < 1, f"delta = {value!r}: expected a number inside (0, 1), below 1/clients")
        elif name == "noise_multiplier":
            _require(value >= 0, f"noise_multiplier = {value!r}: expected at least 0")
        else:
            _require(value > 0, f"{name} = {value!r}: expected more than 0")
        if name == "rounds":
            _require(value <= MOST_ROUNDS, f"rounds = {value!r}: a run has at most {MOST_ROUNDS}")


def check_federation(clients: int, f: int, delta: float | None) -> None:
    """Refuse n, f and δ that no configuration may have."""
    _require(f < clients, f"byzantine = {f}: expected fewer than clients = {clients}")
    _require(
        delta is None or delta * clients < 1,
        f"delta = {delta!r} must be below 1/clients = {1 / clients:g}: a mechanism that gives one client away entirely "
        f"would pass otherwise",
    )


def check_sufficient(found: Four, parameters: int | None) -> None:
    """Refuse what gives neither a noise multiplier with its ε nor the clients needed."""
    known = {name: value for name, value in asdict(found).items() if value is not None}
    if len(known) == len(asdict(found)) or (parameters is not None and {"epsilon", "delta"} <= known.keys()):
        return
    raise PrivacyError(
        f"not enough to plan with: of epsilon, delta, rounds and noise_multiplier (or sigma) three are needed; given: "
        f"{', '.join(known) or 'none'}. Give epsilon, delta and rounds for the noise; delta, rounds and "
        f"noise_multiplier for the epsilon they cost; epsilon, delta and noise_multiplier for the rounds that fit; or "
        f"epsilon, delta and parameters for the clients needed"
    )


def given_multiplier(z: float | None, sigma: float | None, sensitivity: float | None) -> float | None:
    """z, where it or σ was given: never more than what σ really is."""
    if sigma is None:
        return z
    if sensitivity is None:
        raise PrivacyError(
            f"sigma = {sigma!r} says nothing without the sensitivity: give clients too (and byzantine, clip_norm), or "
            f"noise_multiplier instead"
        )
    follows = math.nextafter(sigma / sensitivity, 0.0)
    _require(
        z is None or abs(z - follows) <= 1e-6 * follows,
        f"contradiction: sigma = {sigma:g} with sensitivity {sensitivity:.6g} is a noise multiplier of {follows:.6g}, "
        f"not {z!r}; leave out one of them",
    )
    return follows


def number_or_share(byzantine: int | Fraction | None) -> int | Fraction:
    """f, or the share of n that it is; 0 if not given."""
    if byzantine is None:
        return 0
    if isinstance(byzantine, int) and not isinstance(byzantine, bool):
        _require(byzantine >= 0, f"byzantine = {byzantine}: expected at least 0")
        return byzantine
    _require(
        isinstance(byzantine, Fraction) and 0 <= byzantine < 1,
        f"byzantine = {byzantine!r}: expected a whole number of clients, or a Fraction inside [0, 1) as their share",
    )
    return byzantine or 0


def radius_of(clip_norm: float | Literal["none"] | None) -> float | None:
    """C, 1 if not given; None for no clipping."""
    if clip_norm is None or isinstance(clip_norm, str):
        _require(clip_norm in (None, "none"), f"clip_norm = {clip_norm!r}: expected a positive number, or 'none'")
        return 1.0 if clip_norm is None else None
    _require(0 < clip_norm < math.inf, f"clip_norm = {clip_norm!r}: expected a positive, finite number, or 'none'")
    return float(clip_norm)


def schedule_of(name: Literal["learning_rate", "server_momentum"], given: float | Schedule) -> Schedule:
    """η_t or β_t; β is inside [0, 1)."""
    try:
        schedule = parse_schedule(given)
    except ValueError as problem:
        raise PrivacyError(f"{name} = {given!r}: {problem}") from None
    if name == "learning_rate":
        _require(schedule.kind != "constant" or schedule(0) > 0, f"learning_rate = {given!r}: expected more than 0")
        return schedule
    _require(
        schedule.clamp or schedule.kind != "constant" or 0 <= schedule(0) < 1,
        f"server_momentum = {given!r}: expected a number in [0, 1)",
    )
    return schedule.clamped()


def one_of(name: str, given: str, *known: str) -> None:
    """Refuse a word that is not among those known."""
    _require(given in known, f"{name} = {given!r}: expected {' or '.join(map(repr, known))}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)

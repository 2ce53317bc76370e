"""A plan: what a private run costs and whether it can learn, as values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from common.privacy.calibration import Calibration, epsilon_exact, epsilon_renyi

__all__ = ["ByRound", "Plan"]

ByRound = tuple[int, float | None, float | None]


@dataclass(frozen=True)
class Plan:
    """What was given and what follows. None stands for what cannot be known from it, and for an infinite number.

    Attributes
    ----------
    epsilon, delta, rounds, noise_multiplier
        ε, δ, T and z, by ``calibration``.
    epsilon_exact, epsilon_renyi
        ε of T releases at z by either conversion.
    noise_multiplier_exact, noise_multiplier_renyi, noise_multiplier_sufficient
        z for ``epsilon`` by either calibration, and by the closed form 2 √(T log(1/δ)) / ε where that holds;
        ``sufficient_refused`` says why it does not.
    rounds_that_fit
        The most rounds at z within (ε, δ), up to 10⁷.
    rule, clients, byzantine, byzantine_share, clip_norm, premise, server_momentum, server_momentum_form, learning_rate,
    parameters
        The rule, n, f or its share of n, C, and so on to d; schedules as in a configuration.
    sensitivity
        S, in L2, as charged: with what rounding can add in dimension ``parameters``, where that is known.
        ``sensitivity_independent`` and ``sensitivity_strict`` are those of either premise.
    sigma
        z S: the noise's standard deviation per coordinate of a release.
    noise_norm, signal_norm
        In one round: σ √d, and the largest norm an aggregate can have.
    noise_displacement, signal_displacement
        Over all rounds: how far noise moves θ, and how far training can at most.
    signal_to_noise
        The second over the first. It says how far from hopeless a run is, not how well it will do.
    clients_needed
        The smallest n for which that ratio reaches ``signal_to_noise_wanted`` at this ε, with as many Byzantine
        clients, or as large a share of them, as given. Equal weights, where rows have weights.
    derived, assumed
        Which values follow from others, and which are the configuration's defaults.
    warnings
        What should be known before such a run.
    """

    calibration: Calibration
    epsilon: float | None
    delta: float | None
    rounds: int | None
    noise_multiplier: float | None
    epsilon_exact: float | None
    epsilon_renyi: float | None
    noise_multiplier_exact: float | None
    noise_multiplier_renyi: float | None
    noise_multiplier_sufficient: float | None
    sufficient_refused: str | None
    rounds_that_fit: int | None
    rule: str
    clients: int | None
    byzantine: int | None
    byzantine_share: str | None
    clip_norm: float | None
    premise: str
    server_momentum: Any
    server_momentum_form: str
    learning_rate: Any
    parameters: int | None
    sensitivity: float | None
    sensitivity_independent: float | None
    sensitivity_strict: float | None
    sigma: float | None
    noise_norm: float | None
    signal_norm: float | None
    noise_displacement: float | None
    signal_displacement: float | None
    signal_to_noise: float | None
    signal_to_noise_wanted: float
    clients_needed: int | None
    derived: tuple[str, ...]
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]

    def epsilon_by_round(self, most: int = 10_000) -> tuple[ByRound, ...]:
        """(rounds, ε exact, ε renyi) after each round, or after ``most`` of them evenly spaced; None where ε is ∞.

        The ε of a number of rounds fixed in advance. It is no guarantee for a run that stops at a round chosen by
        looking at its models.
        """
        T, z, delta = self.rounds, self.noise_multiplier, self.delta
        if T is None or z is None or delta is None:
            return ()
        number = min(T, max(most, 1))
        after = [-(-T * index // number) for index in range(1, number + 1)]
        return tuple((t, _finite(epsilon_exact(z, t, delta)), _finite(epsilon_renyi(z, t, delta))) for t in after)

    def as_json(self) -> dict[str, Any]:
        """Plain values, every number finite; the ε by round are 10,000 at most, evenly spaced if there are more."""
        names = ("rounds", "epsilon_exact", "epsilon_renyi")
        by_round = [dict(zip(names, row, strict=True)) for row in self.epsilon_by_round()]
        return {**asdict(self), "epsilon_by_round": by_round}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

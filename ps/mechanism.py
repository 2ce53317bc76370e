"""The release mechanism an experiment asks for: rule, budget, noise multiplier, premises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.config import Experiment
from common.discrete_noise import DiscreteNoise
from common.errors import ConfigError, PrivacyError
from common.noise import NoiseAhead, RoundNoise, SecureGaussian, SeededGaussian
from common.rule_in_use import Labels, rule_in_use
from ps.privacy.ledger import Budget
from ps.privacy.previous import NOTHING, Previous, previous_runs
from ps.release import Mechanism
from ps.uploaded_noise import UploadAhead

__all__ = [
    "budget_of",
    "device_of",
    "fixed_sensitivity",
    "mechanism_name",
    "mechanism_of",
    "noise_of",
    "opened",
]


def opened(experiment: Experiment, labels: Callable[[], Labels]) -> tuple[Previous, Budget | None, Mechanism]:
    """What a new run of an experiment begins with: what was spent before, what may be spent, and how it is released.

    Raises
    ------
    RuleError, PrivacyError
        See :func:`mechanism_of` and :func:`ps.privacy.previous.previous_runs`.
    """
    previous = previous_runs(experiment.privacy.previous)
    if previous.discrete and experiment.privacy.calibration != "renyi":
        raise PrivacyError(
            "privacy.previous names a run with discrete noise, which is zCDP and no Gaussian mechanism: set "
            'privacy.calibration = "renyi"'
        )
    budget = budget_of(experiment, previous)
    return previous, budget, mechanism_of(experiment, budget, labels)


def budget_of(experiment: Experiment, previous: Previous = NOTHING) -> Budget | None:
    """What an experiment may spend, given what was spent before; None without privacy.

    Raises
    ------
    PrivacyError
        The budget cannot be met.
    """
    privacy = experiment.privacy
    if privacy.epsilon is None:
        return None
    rounds = experiment.training.rounds
    return Budget(privacy.epsilon, privacy.delta, rounds, privacy.calibration, previous.carried)


def mechanism_of(experiment: Experiment, budget: Budget | None, labels: Callable[[], Labels]) -> Mechanism:
    """The release mechanism an experiment asks for.

    Parameters
    ----------
    budget
        Gives the noise multiplier; None for no noise.
    labels
        The training set's, for weights that are sample counts; called only for these.

    Raises
    ------
    RuleError, PrivacyError
        The rule cannot be used with these n and f, or states no sensitivity for what is asked.
    """
    federation, training, privacy = experiment.federation, experiment.training, experiment.privacy
    rule = rule_in_use(experiment, labels)
    return Mechanism(
        rule=rule,
        num_clients=federation.clients,
        num_byzantine=federation.byzantine,
        clip_norm=training.clip_norm,
        noise_multiplier=0.0 if budget is None else budget.noise_multiplier,
        strict=privacy.premise == "strict",
        inside=training.server_momentum_form == "inside",
        rescales=privacy.missing == "rescale",
    )


def mechanism_name(experiment: Experiment) -> str:
    """What the ledger calls the noise: ``none``, ``gaussian`` or ``discrete``."""
    return "none" if experiment.privacy.epsilon is None else experiment.privacy.noise


def noise_of(experiment: Experiment, num_parameters: int, device: torch.device | None = None) -> RoundNoise | None:
    """Where a run's noise comes from: secret, unless a seed makes it research; None without privacy.

    Parameters
    ----------
    device
        Where rounds are made: on CUDA, normals are uploaded as soon as they are drawn.

    Raises
    ------
    PrivacyError, ConfigError
        Exact noise was asked for, and cannot be drawn: see :class:`common.discrete_noise.DiscreteNoise`.
    """
    privacy = experiment.privacy
    if privacy.epsilon is None:
        return None
    if privacy.noise == "discrete":
        return DiscreteNoise(num_parameters)
    source = SecureGaussian() if privacy.noise_seed is None else SeededGaussian(privacy.noise_seed)
    return UploadAhead(source, device) if device is not None and device.type == "cuda" else NoiseAhead(source)


def device_of(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises
    ------
    ConfigError
        CUDA was asked for by name and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"training.device = {name!r}: this machine has no usable CUDA device; use auto or cpu")
    return torch.device(name)


def fixed_sensitivity(mechanism: Mechanism, num_parameters: int) -> float | None:
    """S of every round; None where it follows what was released before (server momentum inside the rule), or who
    answered (absent clients left out)."""
    if not mechanism.private:
        return 0.0
    return None if mechanism.inside or mechanism.rescales else mechanism.charged_sensitivity(num_parameters)

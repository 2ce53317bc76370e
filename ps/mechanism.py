"""The release mechanism an experiment asks for: rule, budget, noise multiplier, premises."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.aggregation import make_rule
from common.config import Experiment
from common.errors import ConfigError
from common.learning.partitions import deal_experiment
from common.learning.task import Task
from common.noise import NoiseSource, SecureGaussian, SeededGaussian
from ps.privacy.ledger import Budget
from ps.privacy.premises import premises_of
from ps.update import Mechanism

__all__ = ["device_of", "fixed_sensitivity", "mechanism_of", "noise_source", "premises_for"]


def mechanism_of(experiment: Experiment, task: Task) -> tuple[Budget | None, Mechanism]:
    """The budget and the release mechanism an experiment asks for.

    Raises
    ------
    RuleError, PrivacyError
        The rule cannot be used with these n and f, or the budget cannot be met.
    """
    federation, training, privacy = experiment.federation, experiment.training, experiment.privacy
    rule = make_rule(
        experiment.aggregation.rule,
        num_byzantine=federation.byzantine,
        folders=experiment.folders,
        **experiment.aggregation.parameters,
    )
    if rule.takes_weights or federation.weights != "equal":
        rule = rule.with_weights(_weights(experiment, task))
    budget = (
        None
        if privacy.epsilon is None
        else Budget(privacy.epsilon, privacy.delta, training.rounds, privacy.calibration)
    )
    mechanism = Mechanism(
        rule=rule,
        num_clients=federation.clients,
        num_byzantine=federation.byzantine,
        clip_norm=training.clip_norm,
        noise_multiplier=0.0 if budget is None else budget.noise_multiplier,
        strict=privacy.premise == "strict",
        inside=training.server_momentum_form == "inside",
    )
    return budget, mechanism


def noise_source(experiment: Experiment) -> NoiseSource:
    """Where a private run's noise comes from: secret, unless a seed makes it research."""
    seed = experiment.privacy.noise_seed
    return SecureGaussian() if seed is None else SeededGaussian(seed)


def premises_for(experiment: Experiment) -> tuple[str, ...]:
    """What the experiment's privacy claim rests on."""
    privacy = experiment.privacy
    return premises_of(strict=privacy.premise == "strict", round_timing=privacy.round_timing)


def _weights(experiment: Experiment, task: Task) -> Sequence[float]:
    """One public weight per identity: as configured, or the number of samples each was dealt."""
    if isinstance(experiment.federation.weights, tuple):
        return experiment.federation.weights
    if experiment.federation.weights == "equal":
        return [1.0] * experiment.federation.clients
    if experiment.data.partition == "local":
        raise ConfigError(
            'federation.weights = "samples" needs data that is dealt: with data.partition = "local" list the counts'
        )
    shares = deal_experiment(experiment, task.dataset.train.labels)
    return [float(len(shares[client_id])) for client_id in range(experiment.federation.clients)]


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
    """S of every round; None where it follows what was released before (server momentum inside the rule)."""
    if not mechanism.private:
        return 0.0
    return None if mechanism.inside else mechanism.charged_sensitivity(num_parameters)

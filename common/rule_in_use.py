"""The aggregation rule an experiment asks for, with its public weights. Everyone can build it: it is no secret."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.aggregation import Rule, make_rule
from common.config import Experiment
from common.errors import ConfigError
from common.learning.partitions import deal_experiment

__all__ = ["Labels", "rule_in_use"]

Labels = NDArray[np.int64]


def rule_in_use(experiment: Experiment, labels: Callable[[], Labels]) -> Rule:
    """A new copy of the rule.

    Parameters
    ----------
    labels
        The training set's, for weights that are sample counts; called only for these.

    Raises
    ------
    RuleError
        There is no such rule, or it cannot be used with these parameters or weights.
    ConfigError
        Sample counts are asked for, and the data is not dealt.
    """
    federation = experiment.federation
    rule = make_rule(
        experiment.aggregation.rule,
        num_byzantine=federation.byzantine,
        folders=experiment.folders,
        **experiment.aggregation.parameters,
    )
    if rule.takes_weights or federation.weights != "equal":
        rule = rule.with_weights(_weights(experiment, labels))
    return rule


def _weights(experiment: Experiment, labels: Callable[[], Labels]) -> Sequence[float]:
    """One public weight per identity: as configured, or the number of samples each was dealt."""
    if isinstance(experiment.federation.weights, tuple):
        return experiment.federation.weights
    if experiment.federation.weights == "equal":
        return [1.0] * experiment.federation.clients
    if experiment.data.partition == "local":
        raise ConfigError(
            'federation.weights = "samples" needs data that is dealt: with data.partition = "local" list the counts'
        )
    shares = deal_experiment(experiment, labels())
    return [float(len(shares[client_id])) for client_id in range(experiment.federation.clients)]

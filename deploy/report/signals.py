"""Signal against noise, round by round, as far as it is public.

How large an aggregate really was is not released, with or without its noise taken off again: what is shown is how
large it can have been at most (:mod:`ps.privacy.signal`), and the noise that the ledger says was added.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.config import Experiment
from common.errors import ByzULDPError
from deploy.report.model import Signal
from deploy.report.sampling import spread
from ps.privacy.ledger import Budget, Ledger

__all__ = ["signal_of"]

_POINTS = 40


def signal_of(
    experiment: Experiment | None, ledger: Ledger, num_parameters: int, *, public: bool
) -> tuple[Signal | None, str]:
    """Signal and noise of a run, or None and why there are none."""
    if experiment is None:
        return None, "the configuration cannot be read by this version"
    if Budget.of(ledger.genesis) is None:
        return None, "no noise was added: the run promised no privacy"
    if not ledger.entries:
        return None, "nothing was released yet"
    if public and experiment.privacy.missing == "rescale":
        return None, 'with privacy.missing = "rescale" the noise tells who answered, which is for the operator'
    from ps.mechanism import mechanism_of
    from ps.privacy.signal import effective_steps, largest_aggregate

    try:
        mechanism = mechanism_of(experiment, Budget.of(ledger.genesis), lambda: _labels(experiment))
        most = largest_aggregate(mechanism)
    except (ByzULDPError, ImportError) as problem:
        return None, f"the mechanism cannot be built again: {problem}"
    rate = experiment.training.schedule_of("learning_rate")
    momentum = experiment.training.schedule_of("server_momentum")
    adds_up = not mechanism.inside or mechanism.rule.needs_clipping
    if not adds_up:
        momentum = type(momentum)("constant", (0.0,))
    noise = math.sqrt(num_parameters) * np.array([entry.sigma for entry in ledger.entries])
    if mechanism.inside and adds_up:  # it is applied to (1 - β) m_i: both are shown for the m_i
        noise /= 1.0 - np.array([momentum(round_id) for round_id in range(len(noise))])
    until = [place + 1 for place in spread(len(noise), _POINTS)]
    signals, noises = [], []
    for count in until:
        steps = effective_steps(rate, momentum, count)
        # σ changes little between rounds where it does at all: its root mean square stands for it
        noises.append(math.sqrt(float(np.mean(noise[:count] ** 2))) * steps.root_square)
        signals.append(most * abs(steps.total))
    return (
        Signal(
            rounds=np.arange(len(noise)),
            noise=noise,
            most=most,
            until=until,
            moved_by_signal=signals,
            moved_by_noise=noises,
            clip_norm=experiment.training.clip_norm if mechanism.rule.needs_clipping else None,
        ),
        "",
    )


def _labels(experiment: Experiment) -> NDArray[np.int64]:
    from common.learning.task import build_task

    return build_task(experiment).dataset.train.labels

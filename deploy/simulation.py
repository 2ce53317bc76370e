"""The same algorithm in one process, without the network and without a run folder: for tests and benchmarks.

Calls the very functions that the networked processes call, in the same order, on the same random streams. So with the
noise off a simulation and a networked run give the same θ, which a test holds them to. `byzuldp simulate` is
:mod:`deploy.simulate.run`: it keeps a ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.config import Experiment
from common.errors import PrivacyError
from common.learning.task import Task, build_task, single_threaded
from deploy.simulate.clients import SimulatedClients
from ps.mechanism import device_of, noise_of, opened
from ps.update import ServerState, advance, initial_state, release_round

__all__ = ["SimulatedRound", "simulate"]


@dataclass(frozen=True)
class SimulatedRound:
    """θ_{t+1} after round t, float32 (d,)."""

    round_id: int
    theta: torch.Tensor
    task: Task


def simulate(experiment: Experiment, *, task: Task | None = None, exact: bool = False) -> Iterator[SimulatedRound]:
    """Run an experiment in this process, one round per item. There is no ledger, so no noise that would claim one.

    Parameters
    ----------
    exact
        One identity after the other, by the clients' own code.

    Raises
    ------
    PrivacyError
        The noise is secret: what is released under it must be in a ledger.
    ByzULDPError
        A leaf that says what the experiment asks for and cannot have.
    """
    if experiment.privacy.epsilon is not None and experiment.privacy.noise_seed is None:
        raise PrivacyError(
            "a private run needs a ledger: use deploy.simulate.run.run_simulation (`byzuldp simulate`), or set "
            "privacy.noise_seed for research"
        )
    single_threaded()
    task = task or build_task(experiment)
    _, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    device = device_of(experiment.training.device)
    n, d = experiment.federation.clients, task.num_parameters
    mechanism.rule.prepare(n, d, device)
    clients = SimulatedClients(experiment, task, mechanism, device, exact=exact)
    noise_of_run = noise_of(experiment, d)
    learning_rate, server_momentum = (
        experiment.training.schedule_of(quantity) for quantity in ("learning_rate", "server_momentum")
    )
    state: ServerState = initial_state(task.model.parameters_flat().clone().to(device))
    for round_id in range(experiment.training.rounds):
        clients.compute(round_id, state.theta)
        clients.collect(round_id)
        noise = None if noise_of_run is None else noise_of_run.of_round(round_id, d)
        released = release_round(
            mechanism,
            state,
            clients.rows(),
            range(n),
            noise,
            server_momentum=server_momentum(round_id),
            seed=experiment.training.seed,
        )
        state = advance(state, released.vector, learning_rate(round_id), released.server_momentum)
        yield SimulatedRound(round_id, state.theta, task)

"""The same algorithm in one process, without the network.

Calls the very functions that the networked processes call, in the same order, on the same random streams. So with the
noise off a simulation and a networked run give the same θ, which a test holds them to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from adversary.attacks import Sight
from adversary.main import attack_of, own_momenta
from client.crew import build_crew
from common.config import Experiment
from common.learning.task import Task, build_task, single_threaded
from ps.mechanism import device_of, noise_of, opened
from ps.privacy.released import Unreleased
from ps.update import ServerState, advance, initial_state, release_round

__all__ = ["SimulatedRound", "simulate"]


@dataclass(frozen=True)
class SimulatedRound:
    """θ_{t+1} after round t, float32 (d,)."""

    round_id: int
    theta: torch.Tensor
    task: Task


def simulate(experiment: Experiment, *, task: Task | None = None) -> Iterator[SimulatedRound]:
    """Run an experiment in this process, one round per item.

    Raises
    ------
    ByzULDPError
        A leaf that says what the experiment asks for and cannot have.
    """
    single_threaded()
    task = task or build_task(experiment)
    _, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    device = device_of(experiment.training.device)
    n, d = experiment.federation.clients, task.num_parameters
    mechanism.rule.prepare(n, d, device)
    honest = build_crew(experiment, task, experiment.honest_ids)
    attack = attack_of(experiment) if experiment.num_adversaries else None
    poisoned = None if attack is None else attack.poison(task.dataset)
    byzantine = build_crew(experiment, task, experiment.adversary_ids, dataset=poisoned)
    noise_of_run = noise_of(experiment, d)
    learning_rate, server_momentum = (
        experiment.training.schedule_of(quantity) for quantity in ("learning_rate", "server_momentum")
    )
    state: ServerState = initial_state(task.model.parameters_flat().clone().to(device))
    rows = torch.zeros((n, d), dtype=torch.float32)

    def receive(client_id: int, momentum: torch.Tensor) -> None:
        rows[client_id] = momentum
        mechanism.condition(rows[client_id])

    for round_id in range(experiment.training.rounds):
        task.model.set_parameters(state.theta.cpu())
        for client_id, worker in honest.items():
            receive(client_id, torch.from_numpy(worker.step(round_id)))
        if attack is not None:
            own = own_momenta(byzantine, round_id)
            known = {"none": own[:0], "colluding": own, "omniscient": rows[: len(honest)].clone()}
            sight = Sight(round_id, known[experiment.attack.knowledge], own, state.theta.cpu().clone())
            sent = attack(sight)
            for client_id, row in zip(byzantine, sent, strict=True):
                receive(client_id, row)
        noise = None if noise_of_run is None else noise_of_run.of_round(round_id, d)
        released = release_round(
            mechanism,
            state,
            Unreleased(rows.to(device)),
            range(n),
            noise,
            server_momentum=server_momentum(round_id),
            seed=experiment.training.seed,
        )
        state = advance(state, released.vector, learning_rate(round_id), released.server_momentum)
        yield SimulatedRound(round_id, state.theta, task)

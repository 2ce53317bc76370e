"""Everybody but the server: what the round's matrix holds when a round closes in which all identities answered."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from adversary.attacks import Sight
from adversary.main import attack_of
from client.memory import Held
from common.aggregation.conditioned_rows import condition_rows
from common.config import Experiment
from common.errors import ConfigError
from common.learning.batched import batched_gradients
from common.learning.task import Task
from deploy.simulate.crews import AllAtOnce, Crew, OneByOne
from ps.privacy.released import Unreleased
from ps.release import Mechanism

__all__ = ["SimulatedClients", "refuse_network_only"]

log = logging.getLogger("byzuldp.simulate")


def refuse_network_only(experiment: Experiment) -> None:
    """Refuse what has no meaning in one process.

    Raises
    ------
    ConfigError
        The experiment names misbehaviours, which abuse a protocol that is not spoken here.
    """
    if experiment.misbehaviour.names:
        raise ConfigError(
            f"misbehaviour.name = {', '.join(experiment.misbehaviour.names)}: a misbehaviour abuses the protocol, and "
            "in a simulation there is none: use `byzuldp run`, or set misbehaviour.name=none (an attack remains)"
        )


class SimulatedClients:
    """All clients and adversaries; also the inbox of a :class:`ps.round_maker.RoundMaker`.

    A round is two steps, :meth:`compute` and :meth:`collect`. The first may be taken while the model it is about is
    being made durable: its results stay in here.

    Parameters
    ----------
    task
        With ``exact``, its model is used in turn by everybody.
    device
        Where gradients, momenta and the matrix are. On the CPU the rows are those of the network, whose clients are on
        CPUs; the attack is computed there in any case.
    exact
        The clients' own code, one identity after the other, on the CPU.
    """

    def __init__(
        self, experiment: Experiment, task: Task, mechanism: Mechanism, device: torch.device, *, exact: bool = False
    ) -> None:
        refuse_network_only(experiment)
        self.device, self.num_parameters = device, task.num_parameters
        self._experiment, self._mechanism = experiment, mechanism
        self._rows = torch.zeros((experiment.federation.clients, task.num_parameters), device=device)
        self._attack = attack_of(experiment) if experiment.num_adversaries else None
        poisoned = task.dataset if self._attack is None else self._attack.poison(task.dataset)
        self._crew: Crew
        gradients = None if exact else batched_gradients(task.model, task.dataset.input_shape, device)
        if gradients is None:
            self._crew = OneByOne(experiment, task, poisoned)
        else:
            self._crew = AllAtOnce(experiment, task, poisoned, gradients, self._rows)
        self._theta = task.model.parameters_flat()

    @property
    def one_by_one(self) -> bool:
        """Whether every identity has a pass of its own."""
        return isinstance(self._crew, OneByOne)

    def compute(self, round_id: int, theta: Tensor) -> None:
        """Gradients at θ_t, float32 (d,)."""
        self._theta = theta
        self._crew.compute(round_id, theta)

    def collect(self, round_id: int) -> None:
        """Momenta, attack, conditioning: afterwards :meth:`rows` are the round's."""
        self._crew.momenta(round_id, self._rows)
        honest, own = self._rows[: len(self._experiment.honest_ids)], self._rows[len(self._experiment.honest_ids) :]
        if self._attack is None:
            self._condition(self._rows)
            return
        self._condition(honest)
        on_cpu = own.cpu()
        known = {"none": on_cpu[:0], "colluding": on_cpu, "omniscient": honest}[self._experiment.attack.knowledge]
        # Copies: what an attack is given is its own, as over the network.
        sight = Sight(round_id, known.to("cpu", copy=True), on_cpu.clone(), self._theta.to("cpu", copy=True))
        own.copy_(self._attack(sight))
        self._condition(own)

    def rows(self) -> Unreleased[Tensor]:
        """The matrix (n, d), until the next round is computed."""
        return Unreleased(self._rows)

    def held(self) -> Held | None:
        """The latest momenta; see :class:`deploy.simulate.crews.Crew`."""
        return self._crew.held()

    def restore(self, held: Held) -> None:
        """Go on from those."""
        self._crew.restore(held)

    def _condition(self, rows: Tensor) -> None:
        if self.device.type == "cpu":
            for row in rows:
                self._mechanism.condition(row)
        else:
            mechanism = self._mechanism
            condition_rows(rows, mechanism.clip_norm if mechanism.private else None, mechanism.grid)

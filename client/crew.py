"""The logical clients that one process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from client.memory import Held
from client.worker import Worker
from common.config import Experiment
from common.learning.datasets import Dataset
from common.learning.partitions import deal_experiment
from common.learning.task import Task

__all__ = ["build_crew", "momenta_of", "restore"]


def build_crew(
    experiment: Experiment, task: Task, ids: Iterable[int], *, dataset: Dataset | None = None
) -> dict[int, Worker]:
    """A worker with its own share of the data for each identity; they take turns with the task's model.

    Parameters
    ----------
    dataset
        What they train on; default the task's. Who holds which samples is decided by the task's in any case.

    Raises
    ------
    DataError
        The data cannot be dealt as asked.
    """
    shares = deal_experiment(experiment, task.dataset.train.labels)
    trained_on = task.dataset if dataset is None else dataset
    return {
        client_id: Worker(
            client_id, task.model, trained_on, shares[client_id], experiment.training, l2=experiment.model.l2
        )
        for client_id in ids
    }


def momenta_of(crew: Mapping[int, Worker]) -> dict[int, Held]:
    """The momentum of each identity that has one."""
    held = {client_id: worker.held for client_id, worker in crew.items()}
    return {client_id: momentum for client_id, momentum in held.items() if momentum.round_id >= 0}


def restore(crew: Mapping[int, Worker], momenta: Mapping[int, Held]) -> None:
    """Let identities go on from momenta of an earlier life; those without one stay at zero.

    Raises
    ------
    KeyError
        There is a momentum of somebody else.
    """
    for client_id, held in momenta.items():
        crew[client_id].restore(held)

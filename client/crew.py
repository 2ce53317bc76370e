"""The logical clients that one process holds."""

from __future__ import annotations

from collections.abc import Iterable

from client.worker import Worker
from common.config import Experiment
from common.learning.partitions import deal_experiment
from common.learning.task import Task

__all__ = ["build_crew"]


def build_crew(experiment: Experiment, task: Task, ids: Iterable[int]) -> dict[int, Worker]:
    """A worker with its own share of the data for each identity; they take turns with the task's model.

    Raises
    ------
    DataError
        The data cannot be dealt as asked.
    """
    shares = deal_experiment(experiment, task.dataset.train.labels)
    return {
        client_id: Worker(
            client_id, task.model, task.dataset, shares[client_id], experiment.training, l2=experiment.model.l2
        )
        for client_id in ids
    }

"""The momenta of all identities of a run, computed in this process: one after the other, or all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from client.crew import build_crew
from client.memory import Held
from client.worker import batch_of, next_momentum
from common.config import Experiment
from common.learning.batched import BatchedGradients
from common.learning.datasets import Dataset, Split, to_tensor
from common.learning.partitions import deal_experiment
from common.learning.resident import ResidentSplit
from common.learning.task import Task

__all__ = ["AllAtOnce", "Crew", "OneByOne"]


class Crew(Protocol):
    """The momenta of all identities, in the order of their ids."""

    def compute(self, round_id: int, theta: Tensor) -> None:
        """What of a round may be done before the model it stands on is durable."""

    def momenta(self, round_id: int, out: Tensor) -> None:
        """The momenta of the round that was computed, float32 (n, d), into ``out``. Now they are the latest."""

    def held(self) -> Held | None:
        """The latest momenta, (n, d) flattened on the CPU, and their round; None before the first round."""

    def restore(self, held: Held) -> None:
        """Go on from those."""


class OneByOne:
    """The clients' own code, an identity at a time, on the CPU: what every other way is held to."""

    def __init__(self, experiment: Experiment, task: Task, poisoned: Dataset) -> None:
        self._model = task.model
        self._workers = build_crew(experiment, task, experiment.honest_ids)
        self._workers |= build_crew(experiment, task, experiment.adversary_ids, dataset=poisoned)

    def compute(self, round_id: int, theta: Tensor) -> None:  # noqa: ARG002
        self._model.set_parameters(theta.cpu())

    def momenta(self, round_id: int, out: Tensor) -> None:
        for row, worker in zip(out, self._workers.values(), strict=True):
            row.copy_(torch.from_numpy(worker.step(round_id)))

    def held(self) -> Held | None:
        held = [worker.held for worker in self._workers.values()]
        if held[0].round_id < 0:
            return None
        return Held(held[0].round_id, np.concatenate([momentum for _, momentum in held]))

    def restore(self, held: Held) -> None:
        rows = held.momentum.reshape(len(self._workers), -1)
        for row, worker in zip(rows, self._workers.values(), strict=True):
            worker.restore(Held(held.round_id, row))


class AllAtOnce:
    """One forward and one backward pass for everybody; see :mod:`common.learning.batched`.

    The batches of the next round, which do not depend on the model, are drawn while a round is computed.

    Parameters
    ----------
    poisoned
        What the adversaries' identities train on.
    gradients
        Of the task's model, on the device where the momenta are to be.
    scratch
        float32 (n, d) on that device: gradients are made in it, and it is left to the caller afterwards.
    """

    def __init__(
        self, experiment: Experiment, task: Task, poisoned: Dataset, gradients: BatchedGradients, scratch: Tensor
    ) -> None:
        self._training, self._l2 = experiment.training, experiment.model.l2
        self._alpha = experiment.training.schedule_of("client_momentum")
        self._gradients, self._device = gradients, gradients.device
        self._shares = deal_experiment(experiment, task.dataset.train.labels)
        self._parts = [(ids, self._source(dataset)) for ids, dataset in _by_data(experiment, task.dataset, poisoned)]
        self._scratch, self._momenta = scratch, torch.zeros_like(scratch)
        self._round = -1
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[_Batches]] | None = None

    def compute(self, round_id: int, theta: Tensor) -> None:
        if round_id == self._round:  # restored: a round that is run again has the same momenta again
            return
        if self._ahead is not None and self._ahead[0] == round_id:
            x, y, sizes = self._ahead[1].result()
        else:
            x, y, sizes = self._draw(round_id)
        self._ahead = (round_id + 1, self._drawing.submit(self._draw, round_id + 1))
        self._gradients.model.set_parameters(theta)
        self._gradients(x, y, sizes, self._scratch, self._l2)

    def momenta(self, round_id: int, out: Tensor) -> None:
        if round_id != self._round:
            alpha, clip_norm = self._alpha(round_id), self._training.clip_norm
            if self._device.type == "cpu":  # row by row, so that every bit is that of a client's own arithmetic
                for momentum, gradient in zip(self._momenta, self._scratch, strict=True):
                    next_momentum(momentum, gradient, clip_norm=clip_norm, alpha=alpha, out=momentum)
            else:
                _next_momenta(self._momenta, self._scratch, clip_norm=clip_norm, alpha=alpha)
            self._round = round_id
        out.copy_(self._momenta)

    def held(self) -> Held | None:
        if self._round < 0:
            return None
        return Held(self._round, self._momenta.reshape(-1).cpu().numpy())

    def restore(self, held: Held) -> None:
        self._round = held.round_id
        self._momenta.copy_(torch.from_numpy(held.momentum.copy()).view_as(self._momenta))

    def _draw(self, round_id: int) -> _Batches:
        xs, ys, sizes = [], [], []
        for ids, (split, dataset) in self._parts:
            batches = [
                batch_of(self._shares[client_id], self._training, client_id=client_id, round_id=round_id)
                for client_id in ids
            ]
            indices = np.concatenate(batches)
            x, y = split.take(indices) if isinstance(split, ResidentSplit) else to_tensor(split, indices, dataset)
            xs.append(x)
            ys.append(y)
            sizes += [len(batch) for batch in batches]
        return (xs[0], ys[0], sizes) if len(xs) == 1 else (torch.cat(xs), torch.cat(ys), sizes)

    def _source(self, dataset: Dataset) -> tuple[Split | ResidentSplit, Dataset]:
        train = dataset.train
        return (train if self._device.type == "cpu" else ResidentSplit(train, dataset, self._device)), dataset


_Batches = tuple[Tensor, Tensor, list[int]]


def _by_data(experiment: Experiment, honest: Dataset, poisoned: Dataset) -> Sequence[tuple[Sequence[int], Dataset]]:
    """Who trains on what, in the order of ids."""
    if poisoned is honest:
        return [(range(experiment.federation.clients), honest)]
    parts: Mapping[Sequence[int], Dataset] = {experiment.honest_ids: honest, experiment.adversary_ids: poisoned}
    return [(ids, dataset) for ids, dataset in parts.items() if len(ids)]


def _next_momenta(momenta: Tensor, gradients: Tensor, *, clip_norm: float | None, alpha: float) -> None:
    """:func:`client.worker.next_momentum` for all rows (n, d), without waiting for the device."""
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    finite = torch.isfinite(norms)
    gradients.masked_fill_(~finite[:, None], 0.0)
    if clip_norm is not None:
        scale = torch.where(finite & (norms > clip_norm), clip_norm / norms, 1.0)
        gradients.mul_(scale.to(torch.float32)[:, None])
    momenta.mul_(alpha).add_(gradients, alpha=1 - alpha)

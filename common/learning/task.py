"""The learning task of an experiment: data set, model and flat parameters, built alike in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config import Experiment
from common.learning.datasets import Dataset, load_dataset
from common.learning.gradient import FlatModel
from common.learning.models import build_model, check_trainable

__all__ = ["Task", "build_task"]


@dataclass(frozen=True)
class Task:
    """What is learned: the data, and a model at θ_0."""

    dataset: Dataset
    model: FlatModel

    @property
    def schema_hash(self) -> bytes:
        return self.model.schema_hash()

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters


def build_task(experiment: Experiment) -> Task:
    """Data and model as the experiment names them; the initial parameters follow from the seed.

    Raises
    ------
    DataError, ModelError, ConfigError
        See :func:`~common.learning.datasets.load_dataset` and :func:`~common.learning.models.build_model`.
    """
    dataset = load_dataset(experiment.data.dataset, experiment.data.root, experiment.folders)
    module = build_model(
        experiment.model, dataset.input_shape, dataset.num_classes, experiment.training.seed, experiment.folders
    )
    frozen = experiment.model.frozen_buffers
    check_trainable(module, dataset.input_shape, private=experiment.privacy.epsilon is not None, frozen_buffers=frozen)
    return Task(dataset, FlatModel(module, frozen_buffers=frozen))


def single_threaded() -> None:
    """One intra-operation thread: on small tensors more of them stall, and results would depend on their number."""
    torch.set_num_threads(1)

"""The data sets as arrays: what a client samples its batches from, and the parameter server its test images.

Loading maps the prepared arrays (:mod:`common.learning.prepared`), which takes milliseconds and shares their pages
between all processes of a machine; neither torchvision nor torch is imported for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError
from common.learning.prepared import DEFAULT_ROOT, Damaged, open_prepared, prepare_dataset, prepared_folder
from common.plugins import is_plugin, load_plugin

if TYPE_CHECKING:
    import torch

__all__ = ["Dataset", "Split", "affine", "load_dataset", "prepare_dataset", "to_tensor"]

log = logging.getLogger("byzuldp.data")


@dataclass(frozen=True)
class Split:
    """Samples and their classes.

    Attributes
    ----------
    images
        uint8 (N, H, W) or (N, H, W, C); or float32 with the channels first, (N, C, H, W), (N, H, W) or (N, features).
    labels
        int64 (N,).
    """

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype not in (np.uint8, np.float32) or self.images.ndim not in (2, 3, 4):
            raise DataError(
                f"images are {self.images.dtype} {self.images.shape}; expected uint8 (N, H, W) or (N, H, W, C), or "
                "float32 (N, C, H, W) or (N, features)"
            )
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(f"labels are {self.labels.dtype} {self.labels.shape}; expected int64 ({len(self.images)},)")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W); plain features are (features, 1, 1)."""
        shape = self.images.shape[1:]
        if len(shape) == 1:
            return shape[0], 1, 1
        if len(shape) == 2:
            return 1, shape[0], shape[1]
        return (shape[2], shape[0], shape[1]) if self.images.dtype == np.uint8 else (shape[0], shape[1], shape[2])


@dataclass(frozen=True)
class Dataset:
    """A classification data set.

    ``mean`` and ``std`` normalise each channel, for uint8 images after scaling to [0, 1]. They are public constants:
    under differential privacy they must not be computed from the clients' data. Empty ones leave the values alone.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.train.input_shape != self.test.input_shape or self.train.images.dtype != self.test.images.dtype:
            raise DataError(
                f"{self.name}: training samples are {self.train.images.dtype} {self.train.input_shape}, "
                f"test samples {self.test.images.dtype} {self.test.input_shape}; they must agree"
            )
        for part, split in (("training", self.train), ("test", self.test)):
            if not len(split):
                raise DataError(f"{self.name}: no {part} samples")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"{self.name}: {part} labels lie in [{low}, {high}], expected [0, {self.num_classes - 1}]"
                )
        if len(self.mean) not in (0, self.channels) or len(self.std) != len(self.mean):
            raise DataError(f"{self.name}: mean {self.mean} and std {self.std}: expected {self.channels} values each")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or not all(value > 0 for value in self.std):
            raise DataError(f"{self.name}: mean {self.mean} and std {self.std} must be finite, std positive")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.train.input_shape

    @property
    def channels(self) -> int:
        return self.input_shape[0]


def load_dataset(name: str, root: Path | None = None, folders: Sequence[Path] = ()) -> Dataset:
    """Open a data set, preparing it first where that has not been done.

    Parameters
    ----------
    name
        ``mnist``, ``fashion_mnist``, ``cifar10``, a torchvision class (``CIFAR100``, ``EMNIST/letters``),
        ``image_folder``, or ``module:name``, a callable that takes ``root`` and returns a :class:`Dataset`.
    root
        The data folder; None is ``./data``.
    folders
        Where the module of ``module:name`` is looked for, beside the working directory.

    Raises
    ------
    DataError
        The data is missing, damaged or unsuitable; the message says what to do.
    ConfigError
        The module of ``module:name`` cannot be loaded.
    """
    root = DEFAULT_ROOT if root is None else Path(root)
    if is_plugin(name):
        found_by_name = load_plugin(name, folders)
        if not callable(found_by_name):
            raise DataError(f"{name} is a {type(found_by_name).__name__}, expected a function of the folder")
        try:
            dataset = found_by_name(root)
        except Exception as problem:  # a user's code
            raise DataError(f"{name}({str(root)!r}) failed: {type(problem).__name__}: {problem}") from problem
        if not isinstance(dataset, Dataset):
            raise DataError(
                f"{name}({str(root)!r}) returned {type(dataset).__name__}, expected a Dataset of "
                "common.learning.datasets; docs/extending.md has an example"
            )
        return dataset
    folder = prepared_folder(name, root)
    try:
        found = open_prepared(folder)
    except (FileNotFoundError, NotADirectoryError, Damaged) as problem:
        if isinstance(problem, Damaged):
            log.warning("%s; preparing it again", problem)
        try:
            found = open_prepared(prepare_dataset(name, root, log.info))
        except Damaged as still:
            raise DataError(f"{still}; remove {folder} and run `byzuldp data {name}`") from None
    arrays = found.arrays
    return Dataset(
        name=name,
        train=Split(arrays["train-images"], arrays["train-labels"]),
        test=Split(arrays["test-images"], arrays["test-labels"]),
        num_classes=found.num_classes,
        mean=found.mean,
        std=found.std,
    )


def to_tensor(split: Split, indices: np.ndarray | slice, dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Some samples, ready for a model.

    Parameters
    ----------
    split
        A part of the data set.
    indices
        int64 (b,), or a slice.
    dataset
        Whose normalisation applies.

    Returns
    -------
    images : torch.Tensor
        float32 (b, C, H, W), contiguous, normalised.
    labels : torch.Tensor
        int64 (b,).
    """
    import torch

    # An index array copies; a slice would be a view, perhaps of a read-only map, and torch wants memory it may write.
    taken = split.images[indices].copy() if isinstance(indices, slice) else np.ascontiguousarray(split.images[indices])
    images = torch.from_numpy(taken)
    from_bytes = taken.dtype == np.uint8
    if from_bytes and taken.ndim == 4:
        images = images.permute(0, 3, 1, 2)
    images = images.reshape(len(taken), *split.input_shape)
    if dataset.mean or from_bytes:
        images = torch.addcmul(*affine(dataset.mean, dataset.std, from_bytes), images.to(torch.float32))
    return images.contiguous(), torch.from_numpy(np.array(split.labels[indices], dtype=np.int64))


@lru_cache
def affine(mean: tuple[float, ...], std: tuple[float, ...], from_bytes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift and scale (1, C, 1, 1) of x ↦ (x / 255 - mean) / std, multiplied out; bytes are divided, floats not."""
    import torch

    largest = 255.0 if from_bytes else 1.0
    mean, std = mean or (0.0,), std or (1.0,)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(1, -1, 1, 1)
    scale = torch.tensor([1 / (s * largest) for s in std]).view(1, -1, 1, 1)
    return shift, scale

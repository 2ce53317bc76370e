"""Decoding a data set into plain arrays, by torchvision, once per machine.

Only :mod:`common.learning.prepared` calls this; the processes of a run open the arrays it wrote, and never import
torchvision.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError, nearest

__all__ = ["DATASETS", "TORCHVISION_NAMES", "Decoded", "decode"]

TORCHVISION_NAMES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}

DATASETS = {
    "mnist": "Handwritten digits, 28 x 28 grey, 10 classes; fetched by itself.",
    "fashion_mnist": "Clothes, 28 x 28 grey, 10 classes; from a Debian package or torchvision's mirrors.",
    "cifar10": "Photographs, 32 x 32 colour, 10 classes; from a folder in torchvision's layout.",
    "image_folder": "Your own images: a folder with train/CLASS and test/CLASS.",
    "EMNIST/letters": "Or any torchvision class of training and test images, with its split after a slash.",
}
"""What ``data.dataset`` can name, each in a line; a user's own is ``module:name``."""

# Published values. What is not listed gets 1/2, since statistics of private data would be a release of their own.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Decoded:
    """A data set in memory: images uint8 (N, H, W) or (N, H, W, C), labels int64 (N,) in [0, num_classes)."""

    train: Arrays
    test: Arrays
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def decode(name: str, root: Path) -> Decoded:
    """Read a data set with torchvision; nothing is downloaded.

    Parameters
    ----------
    name
        ``mnist``, ``fashion_mnist``, ``cifar10``, ``image_folder``, or the name of a torchvision class with a training
        and a test part, optionally with its split (``EMNIST/letters``).
    root
        torchvision's root; for ``image_folder`` the folder with ``train`` and ``test`` or ``val``.

    Raises
    ------
    DataError
        Unknown name, files missing or damaged, images of different sizes, labels that are not classes.
    """
    train, test = _image_folders(root) if name == "image_folder" else _torchvision(name, root)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(f"{name}: training images are {train[0].shape[1:]}, test images {test[0].shape[1:]}")
    # Some sets count from 1 or leave labels out: the classes are numbered densely, in the order of their labels.
    classes = np.unique(np.concatenate([train[1], test[1]]))
    train = train[0], np.searchsorted(classes, train[1]).astype(np.int64)
    test = test[0], np.searchsorted(classes, test[1]).astype(np.int64)
    channels = train[0].shape[3] if train[0].ndim == 4 else 1
    mean, std = NORMALISATION.get(name, ((0.5,) * channels, (0.5,) * channels))
    return Decoded(train, test, len(classes), mean, std)


def _torchvision(name: str, root: Path) -> tuple[Arrays, Arrays]:
    from torchvision import datasets

    class_name, _, variant = name.partition("/")
    class_name = TORCHVISION_NAMES.get(class_name, class_name)
    if class_name not in datasets.__all__ or not inspect.isclass(getattr(datasets, class_name)):
        known = [*TORCHVISION_NAMES, "image_folder", *datasets.__all__]
        raise DataError(
            f"data.dataset = {name!r}: {nearest(name, known)} "
            "Expected one of ours, the name of a torchvision class, or your own as module:name"
        )
    kind = getattr(datasets, class_name)
    accepted = {key for base in kind.__mro__[:-1] for key in inspect.signature(base.__init__).parameters}
    if not accepted & {"train", "split"}:
        raise DataError(f"torchvision's {class_name} has no training and test part; load it in a module:name of yours")
    train = _open(kind, accepted, root, variant, ("train",))
    test = _open(kind, accepted, root, variant, ("test", "val", "valid"))
    return _arrays(train, name), _arrays(test, name)


def _open(kind: Any, accepted: set[str], root: Path, variant: str, parts: Sequence[str]) -> Any:
    fixed: dict[str, Any] = {"download": False} if "download" in accepted else {}
    if "train" in accepted:
        fixed["train"] = parts[0] == "train"
        if kind.__name__ == "EMNIST":
            fixed["split"] = variant or "balanced"
        parts = parts[:1]
    problem: Exception | None = None
    for part in parts:
        try:
            return kind(root, **fixed) if "train" in fixed else kind(root, split=part, **fixed)
        except (RuntimeError, OSError, ValueError, ImportError) as caught:
            problem = problem or caught
    raise DataError(
        f"torchvision cannot read {kind.__name__}'s {parts[0]} part from {root}: {problem}. Put its files there in "
        "torchvision's layout (on a machine with network access torchvision fetches them), or set data.root"
    )


def _arrays(part: Any, name: str) -> Arrays:
    """All items of a torchvision data set; the images must agree in size."""
    bulk = getattr(part, "data", None)
    if str(getattr(bulk, "dtype", "")) == "torch.uint8" and getattr(bulk, "ndim", 0) == 3:
        return bulk.numpy(), np.asarray(part.targets, dtype=np.int64)  # type: ignore[union-attr]
    if not len(part):
        raise DataError(f"{name}: no images")
    images: np.ndarray | None = None
    labels = np.empty(len(part), dtype=np.int64)
    for index in range(len(part)):
        image, label = part[index]
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or not isinstance(label, int | np.integer):
            raise DataError(
                f"{name}: item {index} is {type(image).__name__} {pixels.dtype} {pixels.shape} with the target "
                f"{label!r}; expected an 8-bit image and a class. Load the set in a module:name of your own"
            )
        if images is None:
            images = np.empty((len(part), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                f"{name}: image {index} has shape {pixels.shape}, the first one {images.shape[1:]}; a model needs one "
                "size: resize them, or load the set in a module:name of your own"
            )
        images[index], labels[index] = pixels, label
    assert images is not None  # noqa: S101 - len(part) > 0
    return images, labels


def _image_folders(root: Path) -> tuple[Arrays, Arrays]:
    """``train/<class>/…`` and ``test`` or ``val`` alike, or TinyImageNet's ``val`` with its annotations."""
    from torchvision.datasets import ImageFolder

    try:
        train = ImageFolder(str(root / "train"))
    except (OSError, RuntimeError) as problem:
        raise DataError(f"image_folder: {root / 'train'}: {problem}; expected <data.root>/train/<class>/…") from None
    index_of: dict[str, int] = train.class_to_idx
    samples: list[tuple[str, int]] | None = None
    for folder in (root / "test", root / "val"):
        if folder.is_dir() and set(index_of) >= (names := {item.name for item in folder.iterdir() if item.is_dir()}):
            samples = [
                (str(file), index_of[name])
                for name in sorted(names)
                for file in sorted((folder / name).rglob("*"))
                if file.suffix.lower() in IMAGE_SUFFIXES
            ]
        elif (annotations := folder / "val_annotations.txt").is_file():
            rows = [line.split("\t") for line in annotations.read_text(encoding="utf-8").splitlines() if line]
            if unknown := {row[1] for row in rows} - index_of.keys():
                raise DataError(f"{annotations}: classes without a folder in {root / 'train'}: {sorted(unknown)[:5]}")
            samples = [(str(folder / "images" / row[0]), index_of[row[1]]) for row in rows]
        if samples:
            break
    if not samples:
        raise DataError(
            f"image_folder: expected {root}/test or {root}/val with the class folders of {root}/train "
            f"({', '.join(sorted(index_of)[:5])}, …), or val/val_annotations.txt"
        )
    return _arrays(train, "image_folder"), _arrays(_Files(samples, train.loader), "image_folder")


@dataclass(frozen=True)
class _Files:
    samples: list[tuple[str, int]]
    loader: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.loader(path), label

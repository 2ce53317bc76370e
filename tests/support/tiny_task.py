"""Small learning tasks, named in experiments as ``tiny_task:blobs``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.learning.datasets import Dataset, Split

LONG_FEATURES = 999
WIDE_FEATURES = 49_999
BROAD_FEATURES, BROADEST_FEATURES = 149_999, 1_249_999


def blobs(_root: Path) -> Dataset:
    """Two overlapping clouds of four features; with ``logistic`` d = 10."""
    return _two_classes(features=4, samples=400)


def long_blobs(_root: Path) -> Dataset:
    """The same in so many features that ``logistic`` has d = 2,000: several of the smallest chunks."""
    return _two_classes(features=LONG_FEATURES, samples=40)


def wide_blobs(_root: Path) -> Dataset:
    """The same in so many features that ``logistic`` has d = 100,000."""
    return _two_classes(features=WIDE_FEATURES, samples=20)


def broad_blobs(_root: Path) -> Dataset:
    """The same with d = 300,000."""
    return _two_classes(features=BROAD_FEATURES, samples=8)


def broadest_blobs(_root: Path) -> Dataset:
    """The same with d = 2,500,000: a model of 10 MB."""
    return _two_classes(features=BROADEST_FEATURES, samples=8)


def _two_classes(features: int, samples: int) -> Dataset:
    random = np.random.default_rng(5)

    def split(count: int) -> Split:
        labels = np.arange(count, dtype=np.int64) % 2
        centres = np.where(labels == 0, -0.7, 0.7)[:, None]
        return Split((centres + random.standard_normal((count, features))).astype(np.float32), labels)

    return Dataset("blobs", split(samples), split(samples // 2), num_classes=2)

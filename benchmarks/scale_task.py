"""The scale benchmark's "learning task": d numbers and blank data, so that nothing but the exchange costs anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.learning.datasets import Dataset, Split

MODEL = "deploy.audit.task:numbers"
"""One parameter for each feature; the model of the privacy audit."""

SIZES = {"small": 1_000, "paper": 26_010, "million": 1_000_000}
"""Name of a data set in this module to d."""


def small(_root: Path) -> Dataset:
    """For tests."""
    return _blank(SIZES["small"])


def paper(_root: Path) -> Dataset:
    """d of the ByzULDP paper's CNN on MNIST."""
    return _blank(SIZES["paper"])


def million(_root: Path) -> Dataset:
    """Rows of 4 MB, in four chunks."""
    return _blank(SIZES["million"])


def _blank(features: int) -> Dataset:
    split = Split(np.zeros((2, features), dtype=np.float32), np.arange(2, dtype=np.int64))
    return Dataset("blank", split, split, num_classes=2)

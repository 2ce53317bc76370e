"""The audit's "learning task": a model that is nothing but d numbers, and data that nobody trains on.

The audit sends momenta of its own making, so what matters of the task is d alone. Both are named in the experiment
like a user's own (``module:name``); evaluating the model costs two inner products.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.learning.datasets import Dataset, Split

__all__ = ["PAPER_SIZE", "SMALL_SIZE", "numbers", "paper_size", "small_size"]

PAPER_SIZE = 26_010
"""d of the ByzULDP paper's CNN on MNIST."""

SMALL_SIZE = 4_096


def paper_size(_root: Path) -> Dataset:
    """Blank data of 26,010 features."""
    return _blank(PAPER_SIZE)


def small_size(_root: Path) -> Dataset:
    """Blank data of 4,096 features."""
    return _blank(SMALL_SIZE)


def numbers(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A model with one parameter for each input, all 0 at the start."""
    return _Numbers(input_shape[0] * input_shape[1] * input_shape[2], num_classes)


class _Numbers(nn.Module):
    def __init__(self, d: int, num_classes: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(d))
        self._num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.numbers)[:, None].expand(-1, self._num_classes)


def _blank(features: int) -> Dataset:
    split = Split(np.zeros((2, features), dtype=np.float32), np.arange(2, dtype=np.int64))
    return Dataset("blank", split, split, num_classes=2)

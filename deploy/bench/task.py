"""The benchmark's "learning task": d numbers, and data that nobody looks at.

Both are named in the experiment like a user's own (``module:name``), with d in the model's name, so that every host
builds the same task from the experiment alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.learning.datasets import Dataset, Split

__all__ = ["DATASET", "dataset", "model_name"]

DATASET = "deploy.bench.task:dataset"
MOST_CLIENTS = 10_000
_MODEL = re.compile(r"numbers_([1-9]\d*)")


def model_name(d: int) -> str:
    """``model.name`` of d parameters."""
    return f"deploy.bench.task:numbers_{d}"


def dataset(_root: Path) -> Dataset:
    """One blank sample for each client that there may be."""

    def blank(count: int) -> Split:
        return Split(np.zeros((count, 1), dtype=np.float32), np.arange(count, dtype=np.int64) % 2)

    return Dataset("blank", blank(MOST_CLIENTS), blank(2), num_classes=2)


def __getattr__(name: str) -> Callable[[tuple[int, int, int], int], nn.Module]:
    match = _MODEL.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    d = int(match.group(1))
    return lambda _input_shape, num_classes: _Numbers(d, num_classes)


class _Numbers(nn.Module):
    def __init__(self, d: int, num_classes: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(d))
        self._num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1)[:, :1] + self.numbers[:1]).expand(-1, self._num_classes)

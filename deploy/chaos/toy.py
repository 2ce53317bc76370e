"""A learning task that needs no file and no time, for ``byzuldp chaos --quick``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.learning.datasets import Dataset, Split

__all__ = ["clouds"]

FEATURES, SAMPLES, SEED = 1024, 2000, 20


def clouds(_root: Path) -> Dataset:
    """Two overlapping clouds of points; ``logistic`` reaches about 95% of the test set with d = 2050."""
    random = np.random.default_rng(SEED)

    def split(count: int) -> Split:
        labels = np.arange(count, dtype=np.int64) % 2
        centres = np.where(labels == 0, -0.055, 0.055).astype(np.float32)[:, None]
        return Split(centres + random.standard_normal((count, FEATURES), dtype=np.float32), labels)

    return Dataset("clouds", split(SAMPLES), split(SAMPLES // 2), num_classes=2)

"""Long runs made short: which rounds stand for all, and what stands for a block of rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deploy.report.model import Floats

__all__ = ["POINTS", "blocks", "spread", "telling"]

POINTS = 240
"""Of a curve: more cannot be told apart at a page's width."""


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the places 0 … count − 1, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)}) if most > 1 else [count - 1]


def telling(latency_s: Floats, most: int, slowest: int = 10) -> list[int]:
    """Places of rounds worth a look: the slowest, the first and the last, and an even spread of the others."""
    count = len(latency_s)
    if count <= most:
        return list(range(count))
    slow = np.argsort(-latency_s, kind="stable")[: min(slowest, most // 3)]
    return sorted({int(place) for place in slow} | set(spread(count, most - len(slow))))


def blocks(
    rounds: NDArray[np.int64], values: Floats, reduce: Callable[[Floats], float], most: int = POINTS
) -> tuple[Floats, Floats]:
    """A curve of at most ``most`` points, each of equally many rounds: (middle of the block, ``reduce`` of it).

    NaN are left out; a block of nothing else is NaN.
    """
    size = max(1, -(-len(rounds) // most))
    middles, reduced = [], []
    for begin in range(0, len(rounds), size):
        part = values[begin : begin + size]
        part = part[~np.isnan(part)]
        middles.append(float(rounds[begin : begin + size].mean()))
        reduced.append(reduce(part) if part.size else float("nan"))
    return np.array(middles), np.array(reduced)

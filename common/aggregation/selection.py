"""Krum's scores, and what averaging a chosen subset of rows costs in privacy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.aggregation.geometry import Geometry
from common.aggregation.rows import Indices

__all__ = ["NEIGHBOURS", "krum_order", "krum_scores", "num_neighbours", "subset_mean_sensitivity"]

NEIGHBOURS = ("n-f-2", "n-f-1")


def num_neighbours(rule: str, n: int, f: int) -> int:
    """How many other rows a row is scored by: ``n-f-2`` is Blanchard's, ``n-f-1`` is ByzFL's."""
    return n - f - (2 if rule == "n-f-2" else 1)


def krum_scores(squared_distances: NDArray[np.float64], neighbours: int) -> NDArray[np.float64]:
    """(n,): per row, the sum of its squared distances to its nearest others."""
    # The smallest entry of a row is its distance to itself, 0; then come its nearest others.
    nearest = np.sort(squared_distances, axis=1)[:, 1 : 1 + neighbours]
    return np.asarray(nearest.sum(axis=1))


def krum_order(geometry: Geometry, neighbours: int) -> Indices:
    """Rows from the lowest score up; of equal scores the earlier row in canonical order comes first."""
    return np.argsort(krum_scores(geometry.squared_distances, neighbours), kind="stable")


def subset_mean_sensitivity(num_clients: int, chosen: int, clip_norm: float, changed: int) -> float:
    """A bound for any rule that averages ``chosen`` = m of n rows, however it chooses, all rows in the ball.

    If t of the ``changed`` rows are chosen before and after, these move the sum by at most 2C each, and at most
    min(n - m, m - t) of the others are exchanged, by at most 2C each: 2C · min(m, n - m + changed) / m. The rest is
    twice the error of a float64 sum.
    """
    moved = min(chosen, num_clients - chosen + changed)
    return 2.0 * clip_norm * (moved / chosen + num_clients * 2.0**-52)

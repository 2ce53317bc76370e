"""Bulyan: Krum's choice, row after row, then the mean around the median of the chosen."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.geometry import geometry_of
from common.aggregation.rows import Indices
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.sorting import mean_around_median

__all__ = ["Bulyan"]


class Bulyan(Rule):
    """Pick θ = n - 2f rows by Krum among those left, then average the θ - 2f values nearest their median.

    El Mhamdi, Guerraoui & Rouault 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium". Among the k
    rows left a score counts the nearest k - f - 2 others, as the paper's Krum does, and never fewer than one.

    Sensitivity
        2C, by projecting the output: nothing smaller is proved. It does not fall with n.
    Complexity
        O(n² d + n³ + n d log n) time; O(n²) memory beside a block of columns, and a float32 copy of the rows picked.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 4f + 3                     RuleError, hence for n = 2f + 1
    f = 0                          the mean
    ties                           rows: by content, not by client; values: the smaller
    non-finite row                 the zero vector
    1e30 in a row                  far from the rest; squares fit float64
    all equal                      that vector
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "bulyan"
    equivariant = True

    @property
    def minimum_clients(self) -> int:
        return 4 * self.num_byzantine + 3

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        geometry = geometry_of(x)
        picked = _picked(geometry.squared_distances, self.num_byzantine)
        rows = x[torch.from_numpy(geometry.order[picked]).to(x.device)]
        rows[torch.from_numpy(~geometry.finite[picked]).to(x.device)] = 0.0
        return mean_around_median(rows, 2 * self.num_byzantine)


def _picked(squared_distances: NDArray[np.float64], f: int) -> Indices:
    n = len(squared_distances)
    if f == 0:
        return np.arange(n)
    others = np.argsort(squared_distances, axis=1, kind="stable")
    nearest_first = np.take_along_axis(squared_distances, others, axis=1)
    itself = others == np.arange(n)[:, None]
    left = np.ones(n, dtype=np.bool_)
    picked = []
    for remaining in range(n, 2 * f, -1):
        counted = left[others] & ~itself
        counted &= np.cumsum(counted, axis=1) <= max(1, remaining - f - 2)
        scores = np.where(counted, nearest_first, 0.0).sum(axis=1)
        scores[~left] = np.inf
        best = int(np.argmin(scores))
        picked.append(best)
        left[best] = False
    return np.asarray(picked)

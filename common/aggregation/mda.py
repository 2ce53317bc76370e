"""Minimum diameter averaging (MDA), exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.geometry import geometry_of
from common.aggregation.rows import Indices
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.selection import subset_mean_sensitivity
from common.errors import RuleError

__all__ = ["MinimumDiameterAveraging"]

_LARGEST_F = 20


class MinimumDiameterAveraging(Rule):
    """The mean of the n - f rows of smallest diameter (largest distance between two of them).

    Rousseeuw 1985, "Multivariate Estimation with High Breakdown Point"; El Mhamdi et al. 2020, "Genuinely Distributed
    Byzantine Machine Learning". A set of n - f rows has a diameter of at most t exactly when the other f cover every
    pair farther apart than t. So the search is for a vertex cover of size f, by branching on the row with most such
    pairs: exponential in f alone, at most about 1.47^f steps, whatever n is. f is limited to 20.

    Sensitivity
        2C (f + 1)/(n - f), when all rows lie in the ball, absent ones as zero rows: whatever is chosen, at most f rows
        are exchanged, and one moves. Strict: 2C min(1, (2f + 1)/(n - f)).
    Complexity
        O(n² d + 1.47^f n log n) time, the Gram matrix in float64 about a central row; O(n²) memory beside a block of
        columns.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1, f > 20             RuleError
    f = 0                          the mean
    n = 2f + 1                     the mean of the f + 1 closest together
    ties (sets share a pair)       the first set in an order by content, not by client
    non-finite row                 the zero vector
    1e30 in a row                  far from the rest; squares fit float64
    all equal                      that vector
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "mda"
    project_output = False
    equivariant = True

    def __init__(self, *, num_byzantine: int) -> None:
        super().__init__(num_byzantine=num_byzantine)
        if num_byzantine > _LARGEST_F:
            raise RuleError(
                f"mda with num_byzantine = {num_byzantine}: its exact search is exponential in f, at most "
                f"{_LARGEST_F}; use multi_krum or covariance_filter"
            )

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        self.require(num_clients)
        return subset_mean_sensitivity(num_clients, num_clients - self.num_byzantine, clip_norm, changed)

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        geometry = geometry_of(x)
        return geometry.mean_of(x, smallest_diameter(geometry.squared_distances, x.shape[0] - self.num_byzantine))


def smallest_diameter(squared_distances: NDArray[np.float64], size: int) -> Indices:
    """The lexicographically first of the sets of ``size`` rows of smallest diameter."""
    n = len(squared_distances)
    values = np.unique(squared_distances)
    low, high = 0, len(values) - 1
    everything = (1 << n) - 1
    while low < high:
        middle = (low + high) // 2
        if _coverable(_far_apart(squared_distances, float(values[middle])), everything, n - size):
            high = middle
        else:
            low = middle + 1
    far = _far_apart(squared_distances, float(values[low]))
    left, spare, chosen = everything, n - size, []
    for row in range(n):
        if not left >> row & 1:
            continue
        enemies = far[row] & left
        excluded = enemies.bit_count()
        if excluded <= spare and _coverable(far, left & ~enemies & ~(1 << row), spare - excluded):
            chosen.append(row)
            left, spare = left & ~enemies, spare - excluded
        else:
            left, spare = left & ~(1 << row), spare - 1
    return np.asarray(chosen[:size])


def _far_apart(squared_distances: NDArray[np.float64], threshold: float) -> list[int]:
    """Per row, the rows farther away than the threshold, as bits."""
    packed = np.packbits(squared_distances > threshold, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _coverable(far: list[int], left: int, spare: int) -> bool:
    """Whether ``spare`` of the rows ``left`` touch every pair of them that is far apart."""
    while True:
        degrees = {row: (far[row] & left).bit_count() for row in _bits(left)}
        left = sum(1 << row for row, degree in degrees.items() if degree)
        if not left:
            return True
        row = max(degrees, key=degrees.__getitem__)
        most = degrees[row]
        if sum(degrees.values()) > 2 * spare * most:  # `spare` rows touch at most spare · most pairs
            return False
        if most <= 2:
            return _paths_and_cycles(far, left) <= spare
        if most > spare:  # without this row, all its partners would be needed
            left, spare = left & ~(1 << row), spare - 1
            continue
        if _coverable(far, left & ~(1 << row), spare - 1):
            return True
        left, spare = left & ~far[row] & ~(1 << row), spare - most


def _paths_and_cycles(far: list[int], left: int) -> int:
    """The smallest cover where no row has more than two partners: half of a path, half of a cycle rounded up."""
    needed = 0
    while left:
        component, frontier = 0, left & -left
        while frontier:
            component |= frontier
            reached = 0
            for row in _bits(frontier):
                reached |= far[row] & left
            frontier = reached & ~component
        rows = component.bit_count()
        pairs = sum((far[row] & left).bit_count() for row in _bits(component)) // 2
        needed += rows // 2 if pairs < rows else (rows + 1) // 2
        left &= ~component
    return needed


def _bits(mask: int) -> list[int]:
    rows = []
    while mask:
        rows.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return rows

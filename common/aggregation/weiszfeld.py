"""The geometric median among the weights of a combination of rows, from their Gram matrix alone.

A point Σ w_k y_k of weights w has the distance sqrt(G_ii - 2 (G w)_i + wᵀ G w) from row i. With rows taken about a
central one, an outlier of 1e30 takes no digits from the others: its weight is as small as it is large. Objectives are
compared as sums of small differences of distances for the same reason.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.aggregation.geometry import Geometry, centred_at

__all__ = ["median_weights"]

Array = NDArray[np.float64]

_COLLINEAR = 1e-14  # the share of a squared length that may stick out of a line
_RIDGE = 1e-13


def median_weights(geometry: Geometry, tolerance: float, iterations: int) -> Array:
    """float64 (n,): weights, in canonical order, adding up to 1, whose combination is the geometric median.

    Parameters
    ----------
    geometry
        The rows.
    tolerance
        Of a step, relative to the median distance of the rows.
    iterations
        At most so many.

    Notes
    -----
    It starts at the row with the smallest objective. If the condition of Vardi & Zhang holds there it is the answer;
    otherwise their step leaves it downhill, and as every further step goes downhill too, no other row can be met.
    Each step is Newton's where that is the better one, else Weiszfeld's.
    """
    on_line = _middle_of_line(geometry.gram)
    if on_line is not None:
        return on_line
    start = _best_row(geometry)
    gram = centred_at(geometry.gram, start)
    from_start = np.sqrt(geometry.squared_distances[start])
    apart = from_start > 0.0
    pulls = np.zeros(geometry.num_rows)
    pulls[apart] = 1.0 / from_start[apart]
    pull = math.sqrt(max(float(pulls @ gram @ pulls), 0.0))
    copies = int((~apart).sum())
    weights = np.zeros(geometry.num_rows)
    if pull <= copies:
        weights[start] = 1.0
        return weights
    weights = (1.0 - copies / pull) * pulls / pulls.sum()  # the rest is on the start, which is the origin here
    for _ in range(iterations):
        better, distances = _step(gram, weights, from_start)
        moved = better - weights
        weights = better
        if moved @ gram @ moved <= (tolerance * float(np.median(distances))) ** 2:
            break
    weights[start] += 1.0 - weights.sum()
    return weights


def _step(gram: Array, weights: Array, from_start: Array) -> tuple[Array, Array]:
    """The next weights, and the distances of the rows from the present point."""
    shared = gram @ weights
    square = weights @ shared
    squares = np.diagonal(gram) - 2.0 * shared + square
    distances = np.sqrt(np.maximum(squares, 1e-30 * float(np.median(np.abs(squares))) + 1e-300))
    pulls = 1.0 / distances
    total = pulls.sum()
    weiszfeld = pulls / total
    # Newton's step: the Hessian is `total` times the identity minus a matrix of rank n, inverted among the weights.
    about = gram - shared[:, None] - shared[None, :] + square
    roots = pulls**1.5
    small = about * roots[:, None] * roots[None, :]
    small_system = total * (1.0 + _RIDGE) * np.eye(len(pulls)) - small
    try:
        solved = np.linalg.solve(small_system, roots * (about @ pulls)) * roots
    except np.linalg.LinAlgError:
        return weiszfeld, distances
    newton = weiszfeld - (solved.sum() * weights - solved) / total
    if _objective(gram, newton, from_start) < _objective(gram, weiszfeld, from_start):
        return newton, distances
    return weiszfeld, distances


def _objective(gram: Array, weights: Array, from_start: Array) -> float:
    """Σ (‖y_i - z‖ - ‖y_i‖), without ever subtracting two large numbers."""
    shared = gram @ weights
    less = weights @ shared - 2.0 * shared
    distances = np.sqrt(np.maximum(np.diagonal(gram) + less, 0.0))
    value = float((less / np.maximum(distances + from_start, 1e-300)).sum())
    return value if np.isfinite(value) else np.inf


def _best_row(geometry: Geometry) -> int:
    """The row from which the distances to the others add up to least; the first, in canonical order, of equals."""
    gram, distances = geometry.gram, np.sqrt(geometry.squared_distances)
    from_centre = distances[geometry.centre]
    apart = np.maximum(distances + from_centre[:, None], 1e-300)
    less = (np.diagonal(gram)[None, :] - 2.0 * gram) / apart  # [i, k]: how much nearer the centre is to i than k is
    return int(np.argmin(less.sum(axis=0)))


def _middle_of_line(gram: Array) -> Array | None:
    """The median's weights if all rows lie on a line, where the minimiser need not be unique."""
    lengths = np.diagonal(gram)
    far = int(np.argmax(lengths))
    weights = np.zeros(len(gram))
    if lengths[far] == 0.0:
        weights[0] = 1.0
        return weights
    places = gram[far] / np.sqrt(lengths[far])
    if (lengths - places**2 > _COLLINEAR * lengths).any():
        return None
    order = np.argsort(places, kind="stable")
    n = len(order)
    weights[order[(n - 1) // 2]] += 0.5
    weights[order[n // 2]] += 0.5
    return weights

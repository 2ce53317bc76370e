"""How rows lie to each other: one n × n Gram matrix in float64, from which every distance follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.rows import Indices, blocks, canonical_order, combine, on_cpu, products_of

__all__ = ["Geometry", "centred_at", "geometry_of"]

Matrix = NDArray[np.float64]

_CANCELLED = 1e-8  # below this share of ‖x_i‖² + ‖x_j‖², a squared distance has lost half its digits to subtraction


@dataclass(frozen=True)
class Geometry:
    """Rows 0 … n-1 in canonical order, about one of them.

    Parameters
    ----------
    order
        (n,): where row k of this geometry stands in x.
    groups
        (n,): rows of the same group are the same vector.
    finite
        (n,): False for a row with a non-finite entry, which counts as the zero vector.
    gram
        float64 (n, n): ⟨x_k - x_centre, x_l - x_centre⟩.
    centre
        The row to whose nearest majority the distance is smallest. That majority holds an honest row, so outliers,
        however large, lie far from it and take no digits from the others.

    Notes
    -----
    O(n² d) time and, beside a block of columns, O(n²) memory. A second pass, about the centre itself, is made only
    when distinct rows lie so close together, for their size, that subtraction would cost half the digits: a large
    common mean.
    """

    order: Indices
    groups: Indices
    finite: NDArray[np.bool_]
    gram: Matrix
    centre: int

    @property
    def num_rows(self) -> int:
        return len(self.order)

    @cached_property
    def squared_distances(self) -> Matrix:
        """float64 (n, n), symmetric; exactly 0 for the same vector."""
        return _squared_distances(self.gram, self.groups)

    def combine(self, x: Tensor, weights: Matrix) -> Tensor:
        """float64 (d,): Σ w_k x_k; the weights in canonical order, those of non-finite rows without effect."""
        by_row = np.zeros(self.num_rows)
        by_row[self.order] = np.where(self.finite, weights, 0.0)
        return combine(x, by_row, self.order)

    def mean_of(self, x: Tensor, chosen: Indices) -> Tensor:
        """float64 (d,): the mean of the rows chosen."""
        weights = np.zeros(self.num_rows)
        weights[chosen] = 1.0 / len(chosen)
        return self.combine(x, weights)


def geometry_of(x: Tensor) -> Geometry:
    """The geometry of float32 (n, d)."""
    order, groups = canonical_order(x)
    products = _products(x, order, np.ones(len(order), dtype=np.bool_), None)
    finite = np.isfinite(np.diagonal(products))
    products[~finite, :] = 0.0
    products[:, ~finite] = 0.0
    # A non-finite row is zero from here on, hence the same vector as another such.
    groups = np.where(finite, groups, -1)
    distances = _squared_distances(products, groups)
    majority = len(order) // 2
    centre = int(np.argmin(np.partition(distances, majority, axis=1)[:, majority]))
    sizes = np.diagonal(products)
    distinct = groups[:, None] != groups[None, :]
    if bool((distinct & (distances < _CANCELLED * (sizes[:, None] + sizes[None, :]))).any()) and finite[centre]:
        gram = _products(x, order, finite, x[int(order[centre])].to(torch.float64))
    else:
        gram = centred_at(products, centre)
    return Geometry(order, groups, finite, gram, centre)


def centred_at(gram: Matrix, row: int) -> Matrix:
    """The Gram matrix about another of its rows."""
    # In this order the result is symmetric to the last bit, as the argument is.
    return np.asarray(gram - (gram[:, row, None] + gram[None, row, :]) + gram[row, row])


def _products(x: Tensor, order: Indices, finite: NDArray[np.bool_], origin: Tensor | None) -> Matrix:
    """⟨x_k - origin, x_l - origin⟩, rows in ``order``; a row that is not ``finite`` is zero."""
    n = len(order)
    zeroed = np.flatnonzero(~finite)
    total = np.zeros((n, n))
    if on_cpu(x):
        values, zero = x.numpy(), None if origin is None else origin.numpy()
        with np.errstate(invalid="ignore"):
            for columns in blocks(x):
                part = values[order, columns].astype(np.float64)
                part[zeroed] = 0.0
                if zero is not None:
                    part -= zero[columns]
                total += products_of(part)
        return _symmetric(total)
    rows = torch.from_numpy(order).to(x.device)
    device_total = torch.zeros((n, n), dtype=torch.float64, device=x.device)
    for columns in blocks(x):
        block = x[:, columns].index_select(0, rows).to(torch.float64)
        block[torch.from_numpy(zeroed).to(x.device)] = 0.0
        if origin is not None:
            block -= origin[columns]
        device_total += block @ block.T
    return _symmetric(device_total.cpu().numpy())


def _symmetric(matrix: Matrix) -> Matrix:
    """The lower half, mirrored: a product of a matrix with its transpose need not be symmetric to the last bit."""
    return np.asarray(np.tril(matrix) + np.tril(matrix, -1).T)


def _squared_distances(gram: Matrix, groups: Indices) -> Matrix:
    sizes = np.diagonal(gram)
    distances = np.maximum((sizes[:, None] + sizes[None, :]) - 2.0 * gram, 0.0)
    distances[groups[:, None] == groups[None, :]] = 0.0
    return np.asarray(distances)

"""Passes over (n, d) rows in float64, a block of columns at a time: norms, combinations, a canonical order.

No float64 copy of the whole is made. On the CPU a block is sized for the cache and goes through numpy, whose single
thread beats two of torch's on blocks this small; elsewhere it is large and goes through torch.

A row with a non-finite entry counts as the zero vector, as it does at the parameter server. float64 holds every sum
of squares of float32 entries, so nothing overflows on the way, not even 3e38.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cmp_to_key
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.kernels.passes import passes_for

__all__ = [
    "blocks",
    "canonical_order",
    "combine",
    "mix",
    "mix_in_float64",
    "on_cpu",
    "product",
    "products_of",
    "rough_squared_norms",
    "scale_rows",
    "squared_norms",
]

Vector = NDArray[np.float64]
Indices = NDArray[np.intp]

_CPU_ELEMENTS = 1 << 16  # of a block: half a MiB in float64
_DEVICE_ELEMENTS = 1 << 24
_FEWEST_COLUMNS = 256
_ONE_THREAD = 1 << 18  # multiplications: a smaller product OpenBLAS computes on one thread
_NARROWEST = 16  # columns of a piece: below, many rows make the product large enough for threads to pay
_SMALLEST_SCALE = 1e-30
_SEGMENT = 24
_SAFE_SQUARE = 2.0**-60  # above, squares that float32 cannot hold add nothing that counts
_FIRST_COLUMNS = 16  # these nearly always tell two rows apart


def on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def blocks(x: Tensor, rows: int | None = None) -> Iterator[slice]:
    """Column ranges that cover (n, d), so that ``rows`` rows (default n) of one fit the cache."""
    elements = _CPU_ELEMENTS if on_cpu(x) else _DEVICE_ELEMENTS
    columns = max(_FEWEST_COLUMNS, elements // max(1, x.shape[0] if rows is None else rows))
    for start in range(0, x.shape[1], columns):
        yield slice(start, min(start + columns, x.shape[1]))


def squared_norms(x: Tensor, origin: Tensor | None = None) -> Vector:
    """float64 (n,): ‖x_i - origin‖², not finite exactly when the row is not. ``origin`` is float64 (d,), default 0."""
    total = np.zeros(x.shape[0])
    if not on_cpu(x):
        device_total = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        for columns in blocks(x):
            block = x[:, columns].to(torch.float64)
            if origin is not None:
                block -= origin[columns]
            device_total += (block * block).sum(dim=1)
        total[:] = device_total.cpu().numpy()
        return total
    if origin is None and (compiled := passes_for(x)) is not None:
        return compiled.squared_norms(x)
    values, zero = x.numpy(), None if origin is None else origin.numpy()
    with np.errstate(invalid="ignore"):  # inf - inf
        for columns in blocks(x):
            part = values[:, columns].astype(np.float64)
            if zero is not None:
                part -= zero[columns]
            total += np.vecdot(part, part)
    return total


def rough_squared_norms(x: Tensor) -> Vector:
    """As :func:`squared_norms` about 0, up to a relative error of 1.5 · 2⁻²⁰, and faster on the CPU.

    So many squares are added up in float32, in whatever order the machine likes, that their roundings, 24 of 2⁻²⁴ at
    most, stay below 2⁻²⁰ of a norm. Rows so small or large that float32 squares could have left their range are done
    again in float64.
    """
    n, d = x.shape
    whole = d // _SEGMENT * _SEGMENT
    if not on_cpu(x) or not whole or x.stride(1) != 1 or passes_for(x) is not None:
        return squared_norms(x)
    segments = x.numpy()[:, :whole].reshape(n, whole // _SEGMENT, _SEGMENT)  # a view
    total = squared_norms(x[:, whole:])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        sums: NDArray[np.float32] = np.einsum("ijk,ijk->ij", segments, segments)
        total += sums.sum(axis=1, dtype=np.float64)
    doubtful = np.flatnonzero(~((total > _SAFE_SQUARE) & np.isfinite(total)))
    if len(doubtful):
        total[doubtful] = squared_norms(x[torch.from_numpy(doubtful)])
    return total


def combine(x: Tensor, weights: Vector, order: Indices | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Σ w_i x_i, (d,), added up in float64 in ``order`` (default: as they stand). Rows of weight 0 are not read.

    ``dtype`` is float64, or float32, to which the sums are then rounded once.
    """
    used = np.flatnonzero(weights) if order is None else order[weights[order] != 0.0]
    if (compiled := passes_for(x)) is not None:
        result, sound = compiled.combine(x, weights[used], used, dtype)
    else:
        result = mix_in_float64(x, weights[None, used], used)[0]
        sound = bool(np.isfinite(result.numpy()).all() if on_cpu(x) else torch.isfinite(result).all())
        result = result.to(dtype)
    if sound:
        return result
    finite = np.isfinite(squared_norms(x))
    if finite[used].all():
        return result
    return combine(x, np.where(finite, weights, 0.0), order, dtype)


def mix(x: Tensor, matrix: Vector, used: Indices) -> Tensor:
    """float32 (m, d): matrix (m, k) times the rows ``used`` of x, all finite; computed in float64."""
    result = torch.empty((matrix.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    _mix_into(result, x, matrix, used)
    return result


def mix_in_float64(x: Tensor, matrix: Vector, used: Indices) -> Tensor:
    """float64 (m, d): as :func:`mix`, not rounded."""
    result = torch.empty((matrix.shape[0], x.shape[1]), dtype=torch.float64, device=x.device)
    _mix_into(result, x, matrix, used)
    return result


def _mix_into(result: Tensor, x: Tensor, matrix: Vector, used: Indices) -> None:
    everything = len(used) == x.shape[0] and bool((np.diff(used) == 1).all())
    if not on_cpu(x):
        factors, rows = torch.from_numpy(matrix).to(x.device), torch.from_numpy(used).to(x.device)
        for columns in blocks(x, len(used)):
            block = x[:, columns] if everything else x[:, columns].index_select(0, rows)
            result[:, columns] = factors @ block.to(torch.float64)
        result += 0.0
        return
    values, out = x.numpy(), result.numpy()
    with np.errstate(invalid="ignore"):  # inf - inf, NaN: the caller looks at the result
        for columns in blocks(x, len(used)):
            part = values[:, columns] if everything else values[used, columns]
            out[:, columns] = product(matrix, part.astype(np.float64))
    out += 0.0  # -0.0 becomes 0.0: the sign of a zero says nothing


def product(matrix: Vector, part: Vector) -> Vector:
    """matrix (m, k) times part (k, c), in pieces too small for BLAS to spread over threads.

    Threads that meet after every block wait for each other longer than they compute, as soon as another process has
    one of the cores.
    """
    (m, k), c = matrix.shape, part.shape[1]
    width = _ONE_THREAD // max(1, m * k)
    if m == 1:
        return np.asarray(matrix[0] @ part)[None]
    if width < _NARROWEST or width >= c:
        return np.asarray(matrix @ part)
    whole = c // width * width
    pieces = part[:, :whole].reshape(k, -1, width).transpose(1, 0, 2)
    result = np.empty((m, c))
    np.matmul(matrix, pieces, out=result[:, :whole].reshape(m, -1, width).transpose(1, 0, 2))
    result[:, whole:] = matrix @ part[:, whole:]
    return result


def products_of(part: Vector) -> Vector:
    """part (n, c) times its transpose; as :func:`product`, in small pieces."""
    n, c = part.shape
    width = _ONE_THREAD // (n * n)
    if width < _NARROWEST or width >= c:
        return np.asarray(part @ part.T)
    whole = c // width * width
    pieces = part[:, :whole].reshape(n, -1, width).transpose(1, 0, 2)
    rest = part[:, whole:]
    # A copy, for a product of an array with itself goes to another routine, which does use threads.
    return np.asarray(np.matmul(pieces, pieces.copy().transpose(0, 2, 1)).sum(axis=0) + rest @ rest.copy().T)


def scale_rows(x: Tensor, scales: Vector, out: Tensor | None = None) -> Tensor:
    """float32 (n, d): each row times its scale in [0, 1]; 0 gives the zero row, whatever stood there.

    Without a scale other than 1 the rows are returned as they are, not copied. The norm of a row may come out too
    large by a share of 2⁻²³, for rounding the scale and the products. Else the result is in ``out``, if given:
    contiguous, of the shape and device of ``x``, sharing no memory with it.
    """
    if bool((scales == 1.0).all()):
        return x
    if (compiled := passes_for(x)) is not None:
        return compiled.scale_rows(x, scales, out)
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device) if out is None else out
    for row, scale in enumerate(scales.tolist()):
        if scale == 0.0:
            result[row].zero_()
        elif scale < _SMALLEST_SCALE:  # float32 would lose digits of it
            result[row] = x[row].to(torch.float64) * scale
        else:
            torch.mul(x[row], scale, out=result[row])
    return result


def canonical_order(x: Tensor) -> tuple[Indices, Indices]:
    """An order of the rows that depends on what they hold, not on where they stand.

    Whatever is added up, or chosen among equals, in this order does not depend on the order of the clients, down to
    the last bit. It is the lexicographic order of values, which shifting and scaling all rows leave as it is.

    Returns
    -------
    order
        (n,): indices of rows.
    groups
        (n,), non-decreasing: ``groups[k] == groups[l]`` exactly when the rows ``order[k]``, ``order[l]`` are the same
        in every bit.
    """
    bits = x.view(torch.int32)
    head = _ascending(bits[:, :_FIRST_COLUMNS].cpu().numpy())
    if head.shape[1] == 0:
        return np.arange(x.shape[0]), np.zeros(x.shape[0], dtype=np.intp)
    order = np.lexsort(head.T[::-1])
    new_head = (np.diff(head[order], axis=0) != 0).any(axis=1)
    boundaries = [0, *(np.flatnonzero(new_head) + 1).tolist(), len(order)]
    groups, group = np.zeros(len(order), dtype=np.intp), -1

    def compare(i: int, j: int) -> int:
        return _compare(bits[i], bits[j])

    by_bits = cmp_to_key(compare)
    for start, stop in pairwise(boundaries):
        run: list[int] = sorted(order[start:stop].tolist(), key=by_bits)
        order[start:stop] = run
        for place, row in enumerate(run, start):
            if place == start or _compare(bits[run[place - start - 1]], bits[row]) != 0:
                group += 1
            groups[place] = group
    return order, groups


def _compare(one: Tensor, other: Tensor) -> int:
    if torch.equal(one, other):
        return 0
    first = int((one != other).to(torch.uint8).argmax())
    left, right = _ascending(np.array([int(one[first]), int(other[first])], dtype=np.int32))
    return -1 if left < right else 1


def _ascending(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Bits of float32 numbers as integers in the order of the numbers: of negative ones the magnitude is flipped."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))

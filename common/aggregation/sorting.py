"""Rules that average, in each coordinate, the values nearest the median."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.aggregation.rows import on_cpu

__all__ = ["mean_around_median"]

_COLUMNS = 2048  # of a block on the CPU: a transposed block stays in the cache
_ELEMENTS = 1 << 24  # of a block elsewhere


def mean_around_median(x: Tensor, dropped: int) -> Tensor:
    """float64 (d,): per coordinate, the mean of all but the ``dropped`` values farthest from the median.

    Parameters
    ----------
    x
        float32 (n, d); NaN counts as +inf.
    dropped
        Fewer than n. Of two values equally far from the median the smaller is kept.

    Notes
    -----
    The values nearest the median are a window of the sorted ones, of k = n - dropped. It starts at the smallest and
    moves up as long as y_(s+k), which comes in, is nearer the median m than y_(s), which goes out: y_(s) + y_(s+k) <
    2m. Whatever goes out is replaced in place, so nothing is ever subtracted from a sum, which would lose everything
    against a value of 1e30.
    """
    n, d = x.shape
    result = torch.empty(d, dtype=torch.float64, device=x.device)
    if on_cpu(x):
        values, out = x.numpy(), result.numpy()
        with np.errstate(invalid="ignore"):  # inf - inf
            for start in range(0, d, _COLUMNS):
                block = values[:, start : start + _COLUMNS].T.copy()
                block.sort(axis=1)  # numpy sorts short contiguous runs with vector instructions; NaN comes last
                ordered = block.T.astype(np.float64)
                if np.isnan(ordered[-1]).any():
                    ordered[np.isnan(ordered)] = np.inf
                out[start : start + _COLUMNS] = _windowed(ordered, dropped, np.where)
        return result
    columns = max(1, _ELEMENTS // n)
    for start in range(0, d, columns):
        part = x[:, start : start + columns].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        result[start : start + columns] = _windowed(part.sort(dim=0).values.to(torch.float64), dropped, torch.where)
    return result


def _windowed(ordered: Any, dropped: int, where: Callable[..., Any]) -> Any:
    """The mean of the window, of float64 (n, c) sorted along n, an array or a tensor; overwrites it."""
    n = len(ordered)
    kept = n - dropped
    twice_median = ordered[(n - 1) // 2] + ordered[n // 2]
    for low in range(dropped):
        # Row low mod k holds what is kept of rows low, low - k, …; a row is read as `low` before it is written.
        slot, incoming = ordered[low % kept], ordered[low + kept]
        slot[:] = where(ordered[low] + incoming < twice_median, incoming, slot)
    return ordered[:kept].sum(0) / kept + 0.0

"""All rows of a round made safe at once, where they are: :func:`common.aggregation.step.condition_row` for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from common.aggregation.step import grid_of, largest_square

__all__ = ["condition_rows"]

_JUST_BELOW_ONE = 1.0 - 2.0**-30


def condition_rows(rows: Tensor, clip_norm: float | None = None, grid: float | None = None) -> Tensor:
    """Project each row onto the ball of radius C, and truncate it toward zero to multiples of g, in place.

    Parameters
    ----------
    rows
        float32 (n, d), on any device; they stay there.
    clip_norm
        C; None leaves finite rows as they are.
    grid
        g; default :func:`common.aggregation.step.grid_of` of C.

    Returns
    -------
    Tensor
        bool (n,): False where an entry was NaN or ±inf; that row is all zeros then.

    Formal guarantees
    -----------------
    Those of ``condition_row``: afterwards ‖row‖ ≤ C as real numbers, decided by sums of squares of integers, which are
    exact in float64 in any order. Only the norm that a row is scaled by is added up in another order, so a coordinate
    may come out one grid step apart from what ``condition_row`` makes of it.
    """
    wide = rows.to(torch.float64)
    squares = wide.square().sum(dim=1)
    finite = torch.isfinite(squares)
    wide.masked_fill_(~finite[:, None], 0.0)
    if clip_norm is None:
        rows.masked_fill_(~finite[:, None], 0.0)
        return finite
    grid = grid_of(clip_norm) if grid is None else grid
    norms = squares.sqrt()
    scale = torch.where(finite & (norms > clip_norm), clip_norm / norms, 1.0)
    steps = wide.mul_((scale / grid)[:, None]).trunc_()
    # As there: a scale rounded up could leave a norm a few 2⁻⁵³ too large; a step off every coordinate mends that.
    while bool((beyond := steps.square().sum(dim=1) > largest_square(clip_norm, grid)).any()):
        steps = torch.where(beyond[:, None], steps.mul(_JUST_BELOW_ONE).trunc_(), steps)
    rows.copy_(steps.mul_(grid))
    return finite

"""The steps of Algorithm 1 around the rule: conditioning a row, server momentum, the model step. Pure functions."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from torch import Tensor

from common.aggregation.conditioning import NumpyPasses, compiled_passes
from common.errors import ConfigError

__all__ = ["condition_row", "grid_of", "largest_square", "model_step", "prepare_conditioning", "server_momentum"]

_LARGE = 1 << 20  # elements of all rows, from which a compiler is worth it
_JUST_BELOW_ONE = 1.0 - 2.0**-30

_passes = NumpyPasses()


def grid_of(clip_norm: float) -> float:
    """g: the largest power of two that is at most C · 2⁻²⁰.

    A multiple of g inside the ball of radius C is then k g with |k| ≤ C/g < 2^21: exact in float32, and sums of up to
    2^32 of them are exact in float64.

    Raises
    ------
    ConfigError
        C is not between 1e-30 and 1e30, where float32 has room for it and for its grid.

    Examples
    --------
    >>> grid_of(1.0) == 2.0**-20, grid_of(3.0) == 2.0**-19
    (True, True)
    """
    if not 1e-30 <= clip_norm <= 1e30:
        raise ConfigError(f"clip_norm = {clip_norm!r}: expected a number between 1e-30 and 1e30")
    return math.ldexp(1.0, math.frexp(clip_norm)[1] - 21)


def prepare_conditioning(n: int, d: int) -> None:
    """Compile now, if that is worth it, what makes :func:`condition_row` quicker for n rows of d, and no different."""
    global _passes
    if n * d >= _LARGE:
        _passes = compiled_passes() or _passes


def condition_row(row: Tensor, clip_norm: float | None = None, grid: float | None = None) -> bool:
    """Make a received momentum safe to aggregate, in place.

    The row is projected onto the ball of radius C, and then each coordinate is truncated *toward zero* to a multiple
    of g, so that no norm grows. What decides is exact: the squares of the integers row/g add up without rounding.

    Parameters
    ----------
    row
        float32 (d,), modified. On another device than the CPU it is conditioned on the CPU and copied back, so that
        every row of every run goes through the same arithmetic.
    clip_norm
        C; None leaves a finite row as it is.
    grid
        g; default :func:`grid_of` of C.

    Returns
    -------
    bool
        False if an entry was NaN or ±inf; the row is then all zeros.

    Formal guarantees
    -----------------
    Afterwards ‖row‖ ≤ C as real numbers, and so does the norm computed in float64. A row that is conditioned already
    does not change. Bit for bit independent of alignment and of threads.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    zero row                       zero
    ‖row‖ ≤ C                      only truncated
    entries of 1e30, or 3e38       projected: the norm is taken in float64, where it is finite
    entries smaller than g         zero
    =============================  =======================================================
    """
    if row.device.type != "cpu":
        host = row.detach().cpu()
        finite = condition_row(host, clip_norm, grid)
        row.detach().copy_(host)
        return finite
    values = row.detach().numpy()
    squares = _passes.squares(values)
    if not math.isfinite(squares):
        values.fill(0.0)
        return False
    if clip_norm is None:
        return True
    grid = grid_of(clip_norm) if grid is None else grid
    norm = math.sqrt(squares)
    scale = 1.0 if norm <= clip_norm else clip_norm / norm
    # A scale rounded up could leave the norm a few 2⁻⁵³ too large, if truncation happened to take nothing away.
    # A second pass with a scale just below one takes a grid step off every coordinate.
    while _truncate(values, scale, grid) > largest_square(clip_norm, grid):
        scale = _JUST_BELOW_ONE
    return True


def server_momentum(previous: Tensor, released: Tensor, beta: float) -> Tensor:
    """R = β R + (1 - β) Y, float32 (d,): an average of what was released, so it costs no privacy."""
    return previous.mul(beta).add_(released, alpha=1.0 - beta)


def model_step(theta: Tensor, momentum: Tensor, learning_rate: float) -> Tensor:
    """θ - η R, float32 (d,)."""
    return theta.sub(momentum, alpha=learning_rate)


def _truncate(values: np.ndarray, scale: float, grid: float) -> float:
    """values · scale, toward zero to multiples of the grid, in place; returns Σ (value/grid)², exactly."""
    return _passes.truncate(values, scale / grid, grid)


@lru_cache(maxsize=16)
def largest_square(clip_norm: float, grid: float) -> int:
    """The largest integer that is at most (C/g)²."""
    ratio = Fraction(clip_norm) / Fraction(grid)
    if math.frexp(grid)[0] != 0.5 or not 2**10 <= ratio <= 2**24:
        raise ConfigError(f"grid = {grid!r}: expected a power of two near clip_norm · 2⁻²⁰ = {clip_norm * 2**-20!r}")
    return math.floor(ratio**2)

"""The two passes over a row that :func:`common.aggregation.step.condition_row` makes, compiled.

They give the same bits as numpy's, sums included: a run must not depend on whether there is a compiler. So they add in
numpy's order (pairwise, eight sums side by side in runs of 128), and are used only where that is found to be so.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common.aggregation.kernels.library import Unavailable, load_library

__all__ = ["BLOCK", "CompiledPasses", "NumpyPasses", "compiled_passes"]

log = logging.getLogger("byzuldp.kernels")

BLOCK = 1 << 15  # elements: their float64 copy stays in the cache

_SOURCE = r"""
#include <cmath>
#include <cstddef>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef float f4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));

static inline d4 widened(const float* p) {
  f4 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, d4);
}

static inline d4 truncated(d4 w) {
#if defined(__AVX__)
  return (d4)_mm256_round_pd((__m256d)w, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
  return d4{std::trunc(w[0]), std::trunc(w[1]), std::trunc(w[2]), std::trunc(w[3])};
#endif
}

struct Square {
  inline double one(ptrdiff_t j) const { return (double)v[j] * (double)v[j]; }
  inline d4 four(ptrdiff_t j) const { const d4 w = widened(v + j); return w * w; }
  const float* v;
};

// Writes the row's multiple of the grid, and gives the square of which multiple it is.
struct Truncate {
  inline double one(ptrdiff_t j) const {
    const double s = std::trunc((double)v[j] * factor);
    v[j] = (float)(s * grid);
    return s * s;
  }
  inline d4 four(ptrdiff_t j) const {
    const d4 s = truncated(widened(v + j) * d4{factor, factor, factor, factor});
    const f4 to = __builtin_convertvector(s * d4{grid, grid, grid, grid}, f4);
    std::memcpy(v + j, &to, sizeof to);
    return s * s;
  }
  float* v;
  double factor, grid;
};

// As numpy adds contiguous numbers.
template <class Term>
static double pairwise(const Term& term, ptrdiff_t start, ptrdiff_t n) {
  if (n < 8) {
    double total = 0.0;
    for (ptrdiff_t j = 0; j < n; j++) total += term.one(start + j);
    return total;
  }
  if (n <= 128) {
    d4 a = term.four(start), b = term.four(start + 4);
    ptrdiff_t j = 8;
    for (; j < n - n % 8; j += 8) {
      a += term.four(start + j);
      b += term.four(start + j + 4);
    }
    double total = ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]));
    for (; j < n; j++) total += term.one(start + j);
    return total;
  }
  ptrdiff_t half = n / 2;
  half -= half % 8;
  const double left = pairwise(term, start, half);
  return left + pairwise(term, start + half, n - half);
}

template <class Term>
static double blocks(const Term& term, ptrdiff_t d, ptrdiff_t block) {
  double total = 0.0;
  for (ptrdiff_t start = 0; start < d; start += block)
    total += pairwise(term, start, d - start < block ? d - start : block);
  return total;
}

extern "C" double byzuldp_squares(const float* v, ptrdiff_t d, ptrdiff_t block) {
  return blocks(Square{v}, d, block);
}

extern "C" double byzuldp_truncate(float* v, ptrdiff_t d, ptrdiff_t block, double factor, double grid) {
  return blocks(Truncate{v, factor, grid}, d, block);
}
"""


class NumpyPasses:
    """What the compiled passes are measured by, and stands in for them."""

    def squares(self, values: NDArray[np.float32]) -> float:
        """Σ v² in float64, in an order that depends on nothing but d; not finite exactly when an entry is not."""
        total = 0.0
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK].astype(np.float64)
            block *= block
            total += float(block.sum())
        return total

    def truncate(self, values: NDArray[np.float32], factor: float, grid: float) -> float:
        """values · factor toward zero to integers, these times the grid in place; returns the sum of their squares."""
        total = 0.0
        for start in range(0, values.size, BLOCK):
            part = values[start : start + BLOCK]
            steps = part.astype(np.float64)
            steps *= factor
            np.trunc(steps, out=steps)
            np.multiply(steps, grid, out=part, casting="same_kind")
            steps *= steps
            total += float(steps.sum())
        return total


class CompiledPasses(NumpyPasses):
    """The same, in a fraction of the time; releases the interpreter."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, number = ctypes.c_ssize_t, ctypes.c_double
        self._squares, self._truncate = library.byzuldp_squares, library.byzuldp_truncate
        self._squares.restype = self._truncate.restype = number
        self._squares.argtypes = [ctypes.c_void_p, size, size]
        self._truncate.argtypes = [ctypes.c_void_p, size, size, number, number]

    def squares(self, values: NDArray[np.float32]) -> float:
        if not values.flags.c_contiguous:
            return super().squares(values)
        found: float = self._squares(values.ctypes.data, values.size, BLOCK)
        return found

    def truncate(self, values: NDArray[np.float32], factor: float, grid: float) -> float:
        if not values.flags.c_contiguous:
            return super().truncate(values, factor, grid)
        found: float = self._truncate(values.ctypes.data, values.size, BLOCK, factor, grid)
        return found


@lru_cache(maxsize=1)
def compiled_passes() -> CompiledPasses | None:
    """The compiled passes, compiled now if need be; None where they cannot be had, or give other bits."""
    if os.environ.get("BYZULDP_KERNEL") == "plain":
        return None
    try:
        made = CompiledPasses(load_library(_SOURCE, optimisation="-O3"))
    except Unavailable as reason:
        log.warning("rows are conditioned without compiled code: %s", reason)
        return None
    if not _same_bits(made):
        log.warning("compiled code for conditioning rows is not used: it does not add as numpy does")
        return None
    return made


def _same_bits(made: CompiledPasses) -> bool:
    """On every length up to a few runs of the sum, and around a block."""
    random, plain = np.random.default_rng(0), NumpyPasses()
    row = (random.standard_normal(2 * BLOCK + 300) * np.exp(8 * random.standard_normal(2 * BLOCK + 300))).astype("f4")
    for d in (*range(300), 1000, 4097, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 131, len(row)):
        ours, theirs = row[:d].copy(), row[:d].copy()
        same = made.squares(ours) == plain.squares(theirs)
        same = same and made.truncate(ours, 12345.67, 2.0**-20) == plain.truncate(theirs, 12345.67, 2.0**-20)
        if not same or not np.array_equal(ours.view(np.int32), theirs.view(np.int32)):
            return False
    return True

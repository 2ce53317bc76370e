"""Compiled passes over large (n, d) matrices on the CPU: norms, combinations, scaling.

numpy makes several trips through memory for what needs one, and memory is what bounds all three. Small inputs are not
worth a compiler, and without one the callers' own numpy code does the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.kernels.library import Unavailable, load_library

__all__ = ["Passes", "passes_for", "prepare_passes"]

log = logging.getLogger("byzuldp.kernels")

LARGE = 1 << 20  # elements
_A_THREADS_ELEMENTS = 2_000_000

_SOURCE = r"""
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef float f4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));

constexpr ptrdiff_t SEGMENT = 1 << 16;  // columns of one row that a thread takes at a time
constexpr ptrdiff_t SHARE = 1 << 13;    // columns of all rows that a thread takes at a time
constexpr ptrdiff_t BLOCK = 1 << 11;    // columns whose sums stay in the first-level cache
constexpr ptrdiff_t AHEAD = 512;        // how far to prefetch along one row: reading needs it to keep up with memory
constexpr ptrdiff_t AHEAD_OF_4 = 128;   // the same, four rows at a time

static inline d4 widened(const float* p) {
  f4 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, d4);
}

static inline d4 all(double w) { return d4{w, w, w, w}; }

// work(0) … work(units - 1), each by whichever thread is free. A missing thread is no error: the others do its share.
template <class Work>
static void shared_out(ptrdiff_t units, ptrdiff_t num_threads, Work work) {
  std::atomic<ptrdiff_t> next(0);
  auto take = [&] {
    for (ptrdiff_t unit; (unit = next.fetch_add(1)) < units;) work(unit);
  };
  std::vector<std::thread> threads;
  try {
    for (ptrdiff_t k = 1; k < num_threads && k < units; k++) threads.emplace_back(take);
  } catch (...) {
  }
  take();
  for (auto& thread : threads) thread.join();
}

static inline ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static double sum_of_squares(const float* row, ptrdiff_t d) {
  d4 a = {}, b = {}, c = {}, e = {};
  ptrdiff_t j = 0;
  for (; j + 16 <= d; j += 16) {
    __builtin_prefetch(row + j + AHEAD);
    d4 v = widened(row + j), w = widened(row + j + 4), y = widened(row + j + 8), z = widened(row + j + 12);
    a += v * v; b += w * w; c += y * y; e += z * z;
  }
  d4 s = (a + b) + (c + e);
  double total = (s[0] + s[1]) + (s[2] + s[3]);
  for (; j < d; j++) total += (double)row[j] * row[j];
  return total;
}

extern "C" ptrdiff_t byzuldp_segments(ptrdiff_t d) { return (d + SEGMENT - 1) / SEGMENT; }

// out[i * segments + s] = sum of squares of segment s of row i, in an order that depends on d alone.
extern "C" void byzuldp_squares(const float* x, ptrdiff_t n, ptrdiff_t stride, ptrdiff_t d, double* out,
                                ptrdiff_t num_threads) {
  const ptrdiff_t segments = byzuldp_segments(d);
  shared_out(n * segments, num_threads, [=](ptrdiff_t unit) {
    const ptrdiff_t i = unit / segments, start = unit % segments * SEGMENT;
    out[unit] = sum_of_squares(x + i * stride + start, smaller(SEGMENT, d - start));
  });
}

// Adds the R rows from `used` on, one after the other, to the sums of `width` columns from `start` on.
template <int R>
static void add_rows(const float* x, ptrdiff_t stride, ptrdiff_t start, ptrdiff_t width, const int64_t* used,
                     const double* weights, double* sums) {
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x + used[r] * stride + start;
  ptrdiff_t j = 0;
  for (; j + 16 <= width; j += 16) {
    d4 s[4];
    std::memcpy(s, sums + j, sizeof s);
    for (int r = 0; r < R; r++) {
      __builtin_prefetch(rows[r] + j + AHEAD_OF_4);
      for (int q = 0; q < 4; q++) s[q] += all(weights[r]) * widened(rows[r] + j + 4 * q);
    }
    std::memcpy(sums + j, s, sizeof s);
  }
  for (; j < width; j++)
    for (int r = 0; r < R; r++) sums[j] += weights[r] * rows[r][j];
}

// out[c] = sum over k, in their order, of weights[k] * x[used[k], c]; never -0.0, since it starts at 0. Returns whether
// all are finite.
template <class Out>
static int combine(const float* x, ptrdiff_t stride, ptrdiff_t d, const int64_t* used, const double* weights,
                   ptrdiff_t k, Out* out, ptrdiff_t num_threads) {
  std::atomic<int> finite(1);
  shared_out((d + SHARE - 1) / SHARE, num_threads, [&](ptrdiff_t unit) {
    const ptrdiff_t last = smaller(d, (unit + 1) * SHARE);
    alignas(64) double sums[BLOCK];
    for (ptrdiff_t start = unit * SHARE; start < last; start += BLOCK) {
      const ptrdiff_t width = smaller(BLOCK, last - start);
      std::memset(sums, 0, sizeof sums);
      ptrdiff_t i = 0;
      for (; i + 4 <= k; i += 4) add_rows<4>(x, stride, start, width, used + i, weights + i, sums);
      for (; i < k; i++) add_rows<1>(x, stride, start, width, used + i, weights + i, sums);
      d4 bad = {};
      for (ptrdiff_t j = 0; j < BLOCK; j += 4) {  // zeros stand beyond `width`
        d4 s;
        std::memcpy(&s, sums + j, sizeof s);
        bad += s - s;  // NaN, of an infinity or NaN
      }
      if (!((bad[0] + bad[1]) + (bad[2] + bad[3]) == 0.0)) finite = 0;
      for (ptrdiff_t j = 0; j < width; j++) out[start + j] = (Out)sums[j];
    }
  });
  return finite;
}

extern "C" int byzuldp_combine_double(const float* x, ptrdiff_t stride, ptrdiff_t d, const int64_t* used,
                                      const double* weights, ptrdiff_t k, double* out, ptrdiff_t num_threads) {
  return combine(x, stride, d, used, weights, k, out, num_threads);
}

extern "C" int byzuldp_combine_float(const float* x, ptrdiff_t stride, ptrdiff_t d, const int64_t* used,
                                     const double* weights, ptrdiff_t k, float* out, ptrdiff_t num_threads) {
  return combine(x, stride, d, used, weights, k, out, num_threads);
}

static inline f4 scaled(const float* p, double s) { return __builtin_convertvector(all(s) * widened(p), f4); }

// to[j] = s * from[j], rounded once. `past` writes past the caches, which would not hold the result anyway.
static void scale(const float* from, float* to, ptrdiff_t width, double s, bool past) {
  ptrdiff_t j = 0;
#if defined(__AVX__)
  if (past) {
    for (; j < width && (uintptr_t)(to + j) % 32 != 0; j++) to[j] = (float)(s * from[j]);
    for (; j + 16 <= width; j += 16) {
      __builtin_prefetch(from + j + AHEAD);
      for (int q = 0; q < 16; q += 8) {
        const __m128 low = (__m128)scaled(from + j + q, s), high = (__m128)scaled(from + j + q + 4, s);
        _mm256_stream_ps(to + j + q, _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1));
      }
    }
    _mm_sfence();
  }
#endif
  for (; j + 4 <= width; j += 4) {
    const f4 v = scaled(from + j, s);
    std::memcpy(to + j, &v, sizeof v);
  }
  for (; j < width; j++) to[j] = (float)(s * from[j]);
}

// out[i] = scales[i] * x[i], rounded once; a scale of 0 gives zeros whatever stood there.
extern "C" void byzuldp_scale_rows(const float* x, ptrdiff_t n, ptrdiff_t stride, ptrdiff_t d, const double* scales,
                                   float* out, ptrdiff_t num_threads) {
  const ptrdiff_t segments = byzuldp_segments(d);
  const bool past = n * d >= (1 << 22);
  shared_out(n * segments, num_threads, [=](ptrdiff_t unit) {
    const ptrdiff_t i = unit / segments, start = unit % segments * SEGMENT, width = smaller(SEGMENT, d - start);
    if (scales[i] == 0.0) {
      std::memset(out + i * d + start, 0, width * sizeof(float));
    } else {
      scale(x + i * stride + start, out + i * d + start, width, scales[i], past);
    }
  });
}
"""


class Passes:
    """The compiled passes; each takes float32 (n, d) on the CPU whose rows are contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.byzuldp_segments.restype = ctypes.c_ssize_t
        self._library = library

    def squared_norms(self, x: Tensor) -> NDArray[np.float64]:
        """float64 (n,): Σ x_ij²."""
        n, d = x.shape
        parts = np.empty((n, self._library.byzuldp_segments(*_sizes(d))))
        self._library.byzuldp_squares(
            ctypes.c_void_p(x.data_ptr()), *_sizes(n, x.stride(0), d), _address(parts), _threads(n * d)
        )
        return np.asarray(parts.sum(axis=1))

    def combine(
        self,
        x: Tensor,
        weights: NDArray[np.float64],
        used: NDArray[np.intp],
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, bool]:
        """Σ weights_k x_{used_k}, (d,), added up in float64 in the order given; and whether it is finite.

        ``dtype`` is float64, or float32, to which the sums are then rounded once.
        """
        rows, factors = np.ascontiguousarray(used, dtype=np.int64), np.ascontiguousarray(weights, dtype=np.float64)
        d = x.shape[1]
        out = torch.empty(d, dtype=dtype)
        combine = (
            self._library.byzuldp_combine_float if dtype == torch.float32 else self._library.byzuldp_combine_double
        )
        finite = combine(
            ctypes.c_void_p(x.data_ptr()),
            *_sizes(x.stride(0), d),
            _address(rows),
            _address(factors),
            *_sizes(len(rows)),
            ctypes.c_void_p(out.data_ptr()),
            _threads(len(rows) * d),
        )
        return out, bool(finite)

    def scale_rows(self, x: Tensor, scales: NDArray[np.float64], out: Tensor | None = None) -> Tensor:
        """float32 (n, d): row i times scales_i, rounded once; zeros for a scale of 0.

        ``out`` is contiguous, and shares no memory with ``x``; by default it is new.
        """
        n, d = x.shape
        factors = np.ascontiguousarray(scales, dtype=np.float64)
        if out is None:  # numpy asks for huge pages, torch does not: filling small ones takes longer than scaling
            out = torch.from_numpy(np.empty((n, d), dtype=np.float32))
        self._library.byzuldp_scale_rows(
            ctypes.c_void_p(x.data_ptr()),
            *_sizes(n, x.stride(0), d),
            _address(factors),
            ctypes.c_void_p(out.data_ptr()),
            _threads(n * d),
        )
        return out


def passes_for(x: Tensor) -> Passes | None:
    """The compiled passes if they are worth it for ``x`` and can be had; compiles them on the first call."""
    if x.device.type != "cpu" or x.numel() < LARGE or x.stride(1) != 1:
        return None
    return _passes()


def prepare_passes(n: int, d: int, device: torch.device | str) -> None:
    """Compile now what a first call with (n, d) would compile."""
    if torch.device(device).type == "cpu" and n * d >= LARGE:
        _passes()


@lru_cache(maxsize=1)
def _passes() -> Passes | None:
    if os.environ.get("BYZULDP_KERNEL") == "plain":
        return None
    try:
        made = Passes(load_library(_SOURCE, optimisation="-O3"))
    except Unavailable as reason:
        log.warning("passes over rows are not compiled: %s", reason)
        return None
    return made if _is_right(made) else None


def _is_right(made: Passes) -> bool:
    """A compiler may be wrong: compare with numpy once."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 1043)).astype(np.float32))
    rows, weights, used = x.numpy().astype(np.float64), np.array([0.5, -2.0, 0.25]), np.array([3, 0, 4])
    combined, finite = made.combine(x, weights, used)
    rounded, _ = made.combine(x, weights, used, torch.float32)
    return (
        finite
        and np.allclose(made.squared_norms(x), (rows**2).sum(axis=1), rtol=1e-12)
        and np.allclose(combined.numpy(), weights @ rows[used], rtol=1e-12, atol=1e-12)
        and torch.equal(rounded, combined.to(torch.float32))
        and np.array_equal(made.scale_rows(x, np.arange(5.0)).numpy(), (np.arange(5.0)[:, None] * rows).astype("f4"))
    )


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _sizes(*numbers: int) -> tuple[ctypes.c_ssize_t, ...]:
    return tuple(ctypes.c_ssize_t(number) for number in numbers)


def _threads(elements: int) -> ctypes.c_ssize_t:
    return ctypes.c_ssize_t(max(1, min(torch.get_num_threads(), elements // _A_THREADS_ELEMENTS)))

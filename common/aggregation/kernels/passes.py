"""Compiled passes over large (n, d) matrices on the CPU: norms, combinations, scaling.

numpy makes several trips through memory for what needs one. Small inputs are not worth a compiler, and without one the
callers' own numpy code does the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache

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
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

typedef float f4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));

static inline d4 widened(const float* p) {
  f4 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, d4);
}

template <class Work>
static void shared_out(ptrdiff_t items, ptrdiff_t num_threads, Work work) {
  std::vector<std::thread> threads;
  ptrdiff_t share = (items + num_threads - 1) / num_threads;
  ptrdiff_t start = share;
  try {
    for (; start < items; start += share) {
      ptrdiff_t end = start + share < items ? start + share : items;
      threads.emplace_back(work, start, end);
    }
  } catch (...) {  // no thread to be had: do the rest here
    work(start, items);
  }
  work((ptrdiff_t)0, share < items ? share : items);
  for (auto& thread : threads) thread.join();
}

// out[i] = sum of squares of row i: sixteen partial sums in an order that depends on d alone.
extern "C" void byzuldp_squared_norms(const float* x, ptrdiff_t n, ptrdiff_t stride, ptrdiff_t d, double* out,
                                      ptrdiff_t num_threads) {
  shared_out(n, num_threads, [=](ptrdiff_t first, ptrdiff_t last) {
    for (ptrdiff_t i = first; i < last; i++) {
      const float* row = x + i * stride;
      d4 a = {}, b = {}, c = {}, e = {};
      ptrdiff_t j = 0;
      for (; j + 16 <= d; j += 16) {
        d4 v = widened(row + j), w = widened(row + j + 4), y = widened(row + j + 8), z = widened(row + j + 12);
        a += v * v; b += w * w; c += y * y; e += z * z;
      }
      d4 s = (a + b) + (c + e);
      double total = (s[0] + s[1]) + (s[2] + s[3]);
      for (; j < d; j++) total += (double)row[j] * row[j];
      out[i] = total;
    }
  });
}

// out[c] = sum over k, in their order, of weights[k] * x[used[k], c].
extern "C" void byzuldp_combine(const float* x, ptrdiff_t stride, ptrdiff_t d, const int64_t* used,
                                const double* weights, ptrdiff_t k, double* out, ptrdiff_t num_threads) {
  shared_out(d, num_threads, [=](ptrdiff_t first, ptrdiff_t last) {
    const ptrdiff_t BLOCK = 1024;
    alignas(64) double sums[BLOCK];
    for (ptrdiff_t start = first; start < last; start += BLOCK) {
      ptrdiff_t width = last - start < BLOCK ? last - start : BLOCK;
      std::memset(sums, 0, sizeof sums);
      ptrdiff_t i = 0;
      for (; i + 4 <= k; i += 4) {  // four rows a trip, still added one after the other
        const float *p = x + used[i] * stride + start, *q = x + used[i + 1] * stride + start;
        const float *r = x + used[i + 2] * stride + start, *t = x + used[i + 3] * stride + start;
        const double wp = weights[i], wq = weights[i + 1], wr = weights[i + 2], wt = weights[i + 3];
        ptrdiff_t j = 0;
        for (; j + 4 <= width; j += 4) {
          d4 s;
          std::memcpy(&s, sums + j, sizeof s);
          s += wp * widened(p + j);
          s += wq * widened(q + j);
          s += wr * widened(r + j);
          s += wt * widened(t + j);
          std::memcpy(sums + j, &s, sizeof s);
        }
        for (; j < width; j++) sums[j] = (((sums[j] + wp * p[j]) + wq * q[j]) + wr * r[j]) + wt * t[j];
      }
      for (; i < k; i++) {
        const float* row = x + used[i] * stride + start;
        const double w = weights[i];
        for (ptrdiff_t j = 0; j < width; j++) sums[j] += w * row[j];
      }
      std::memcpy(out + start, sums, width * sizeof(double));
    }
  });
}

// out[i] = scales[i] * x[i], rounded once; a scale of 0 gives zeros whatever stood there.
extern "C" void byzuldp_scale_rows(const float* x, ptrdiff_t n, ptrdiff_t stride, ptrdiff_t d, const double* scales,
                                   float* out, ptrdiff_t num_threads) {
  shared_out(d, num_threads, [=](ptrdiff_t first, ptrdiff_t last) {
    for (ptrdiff_t i = 0; i < n; i++) {
      const float* from = x + i * stride;
      float* to = out + i * d;
      const double s = scales[i];
      if (s == 0.0) {
        std::memset(to + first, 0, (last - first) * sizeof(float));
      } else {
        for (ptrdiff_t j = first; j < last; j++) to[j] = (float)(s * from[j]);
      }
    }
  });
}
"""


class Passes:
    """The compiled passes; each takes float32 (n, d) on the CPU whose rows are contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def squared_norms(self, x: Tensor) -> NDArray[np.float64]:
        """float64 (n,): Σ x_ij²."""
        n, d = x.shape
        out = np.empty(n)
        self._library.byzuldp_squared_norms(
            ctypes.c_void_p(x.data_ptr()), *_sizes(n, x.stride(0), d), ctypes.c_void_p(out.ctypes.data), _threads(n * d)
        )
        return out

    def combine(self, x: Tensor, weights: NDArray[np.float64], used: NDArray[np.intp]) -> Tensor:
        """float64 (d,): Σ weights_k x_{used_k}, added up in the order given."""
        rows, factors = np.ascontiguousarray(used, dtype=np.int64), np.ascontiguousarray(weights, dtype=np.float64)
        out = torch.empty(x.shape[1], dtype=torch.float64)
        self._library.byzuldp_combine(
            ctypes.c_void_p(x.data_ptr()),
            *_sizes(x.stride(0), x.shape[1]),
            ctypes.c_void_p(rows.ctypes.data),
            ctypes.c_void_p(factors.ctypes.data),
            *_sizes(len(rows)),
            ctypes.c_void_p(out.data_ptr()),
            _threads(len(rows) * x.shape[1]),
        )
        return out

    def scale_rows(self, x: Tensor, scales: NDArray[np.float64]) -> Tensor:
        """float32 (n, d): row i times scales_i, rounded once; zeros for a scale of 0."""
        n, d = x.shape
        factors = np.ascontiguousarray(scales, dtype=np.float64)
        out = torch.empty((n, d), dtype=torch.float32)
        self._library.byzuldp_scale_rows(
            ctypes.c_void_p(x.data_ptr()),
            *_sizes(n, x.stride(0), d),
            ctypes.c_void_p(factors.ctypes.data),
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
    return (
        np.allclose(made.squared_norms(x), (rows**2).sum(axis=1), rtol=1e-12)
        and np.allclose(made.combine(x, weights, used).numpy(), weights @ rows[used], rtol=1e-12, atol=1e-12)
        and np.array_equal(made.scale_rows(x, np.arange(5.0)).numpy(), (np.arange(5.0)[:, None] * rows).astype("f4"))
    )


def _sizes(*numbers: int) -> tuple[ctypes.c_ssize_t, ...]:
    return tuple(ctypes.c_ssize_t(number) for number in numbers)


def _threads(elements: int) -> ctypes.c_ssize_t:
    return ctypes.c_ssize_t(max(1, min(torch.get_num_threads(), elements // _A_THREADS_ELEMENTS)))

"""Compiled kernels of the trimmed mean on the CPU, and what of them is ready."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.aggregation.kernels.cpp import straight_line_source, table_source
from common.aggregation.kernels.library import Unavailable, load_library
from common.aggregation.kernels.network import Network, network
from common.aggregation.kernels.plain import sorted_sum

__all__ = ["LARGEST_N", "Kernel", "fits_straight_line", "straight_line_kernel", "table_kernel"]

LARGEST_N = 2048  # above, a network takes seconds to build and a sort is as fast
_LONGEST_CODE = 1000  # comparators; above, the compiler takes many seconds and the gain is small
_WORK_OF_A_THREAD = 1.2e7  # comparators and rows, times columns: about 2 ms
_CHECKED_COLUMNS = 150  # two blocks of the table and a rest


class Kernel:
    """A compiled trimmed mean for one n and f.

    Calling it is thread-safe and releases the interpreter. It uses up to ``torch.get_num_threads()`` threads, one for
    small inputs: on a busy machine a second one may wait for its core longer than the whole work takes.
    """

    def __init__(self, library: ctypes.CDLL, net: Network) -> None:
        self._function: Callable[..., int] = library.byzuldp_trimmed
        self._network = net
        pairs = [(c.low, c.high) for c in net.comparators]
        self._comparators = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        self._kept = np.array(net.kept, dtype=np.int32)

    def __call__(self, x: Tensor, *, mean: bool) -> Tensor:
        """float32 (n, d) on the CPU to (d,): the float64 kept sum, or the float32 mean of what is kept."""
        n, d = x.shape
        if n != self._network.num_wires:
            raise ValueError(f"{n} rows: this kernel is for {self._network.num_wires}")
        if d > 1 and x.stride(1) != 1:
            x = x.contiguous()
        result = torch.empty(d, dtype=torch.float32 if mean else torch.float64)
        work = (len(self._comparators) + 2 * n) * d
        threads = max(1, min(torch.get_num_threads(), int(work / _WORK_OF_A_THREAD)))
        failed = self._function(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_ssize_t(n),
            ctypes.c_ssize_t(x.stride(0)),
            ctypes.c_ssize_t(d),
            ctypes.c_void_p(None if mean else result.data_ptr()),
            ctypes.c_void_p(result.data_ptr() if mean else None),
            ctypes.c_void_p(self._comparators.ctypes.data),
            ctypes.c_ssize_t(len(self._comparators)),
            ctypes.c_void_p(self._kept.ctypes.data),
            ctypes.c_ssize_t(len(self._kept)),
            ctypes.c_ssize_t(threads),
        )
        if failed:
            raise MemoryError(f"no memory for a block of {n} rows")
        return result


@lru_cache(maxsize=64)
def table_kernel(n: int, f: int) -> Kernel:
    """The kernel that reads its comparators from a table: one library for every n.

    Raises
    ------
    Unavailable
        It cannot be compiled or loaded here, or gives wrong results.
    """
    return _checked(Kernel(_table_library(), network(n, f)), n, f)


def fits_straight_line(n: int, f: int) -> bool:
    """Whether :func:`straight_line_kernel` is worth its compilation."""
    return len(network(n, f).comparators) <= _LONGEST_CODE


@lru_cache(maxsize=64)
def straight_line_kernel(n: int, f: int) -> Kernel:
    """The kernel whose comparators are its code.

    Raises
    ------
    Unavailable
        The network is too long, or the kernel cannot be compiled or loaded here, or gives wrong results.
    """
    net = network(n, f)
    if not fits_straight_line(n, f):
        raise Unavailable(f"{len(net.comparators)} comparators are too many for straight-line code")
    # More optimisation than -O1 reorders what the network has in good order, and so spills more registers.
    return _checked(Kernel(load_library(straight_line_source(net), optimisation="-O1"), net), n, f)


@lru_cache(maxsize=1)
def _table_library() -> ctypes.CDLL:
    return load_library(table_source(), optimisation="-O2")


def _checked(kernel: Kernel, n: int, f: int) -> Kernel:
    """A compiler may be wrong, and a kernel is trusted with every round: compare it with the sort once."""
    x = np.random.default_rng(n).integers(-(2**20), 2**20, (n, _CHECKED_COLUMNS)).astype(np.float32)
    x[0, ::5], x[n // 2, ::7], x[n - 1, ::11] = np.nan, np.inf, -np.inf
    wanted = sorted_sum(x, f)
    if not np.array_equal(kernel(torch.from_numpy(x), mean=False).numpy(), wanted, equal_nan=True):
        raise Unavailable(f"the compiled kernel for n = {n}, f = {f} gives wrong sums")
    return kernel

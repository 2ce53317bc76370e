"""The trimmed mean as a Triton kernel: each thread takes its columns' values into registers once."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from common.aggregation.kernels.library import Unavailable
from common.aggregation.kernels.network import Network, network

__all__ = ["TritonKernel", "fits_registers", "triton_kernel", "triton_source"]

_LARGEST_N = 128  # a thread has 255 registers, and a column's values are to stay in them
_LARGEST_NETWORK = 1200


def triton_source(net: Network) -> str:
    """The module's text: one function ``kernel``, which writes float64 sums, or float32 means if ``MEAN``."""
    lines = []
    for wire in range(net.num_wires):
        lines.append(f"v{wire} = tl.load(at, mask=inside, other=0.0)")
        lines.append(f"v{wire} = tl.where(v{wire} == v{wire}, v{wire}, float('inf'))")
        if wire + 1 < net.num_wires:
            lines.append("at += row_stride")
    for c in net.comparators:
        low, high = f"tl.minimum(v{c.low}, v{c.high})", f"tl.maximum(v{c.low}, v{c.high})"
        if c.needs_low and c.needs_high:
            lines.append(f"v{c.low}, v{c.high} = {low}, {high}")
        else:
            lines.append(f"v{c.low} = {low}" if c.needs_low else f"v{c.high} = {high}")
    # Starting at 0.0 also turns a sum of -0.0 into 0.0.
    lines.append("total = tl.zeros([COLUMNS], dtype=tl.float64)")
    lines += [f"total += v{wire}.to(tl.float64)" for wire in net.kept]
    body = "\n    ".join(lines)
    return f"""\
import triton
import triton.language as tl


@triton.jit
def kernel(rows, result, d, row_stride, COLUMNS: tl.constexpr, MEAN: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < d
    at = rows + column
    {body}
    if MEAN:
        tl.store(result + column, (total / {float(len(net.kept))!r}).to(tl.float32), mask=inside)
    else:
        tl.store(result + column, total, mask=inside)
"""


class TritonKernel:
    """The kernel for one n and f, on any device Triton compiles for (or on the CPU under Triton's interpreter).

    Raises
    ------
    Unavailable
        Triton is not installed.
    """

    def __init__(self, net: Network) -> None:
        try:
            import triton
        except ImportError as error:
            raise Unavailable(f"no Triton here: {error}") from error
        self._blocks: Callable[[int, int], int] = triton.cdiv
        self._network = net
        self._kernel = _function(triton_source(net), f"<byzuldp trimmed mean {net.num_wires} {net.trimmed}>")
        # Columns per thread: as many as the registers hold, so that loads are wide.
        self._columns = 128 * (4 if net.num_wires <= 24 else 2 if net.num_wires <= 48 else 1)

    def __call__(self, x: Tensor, *, mean: bool) -> Tensor:
        """float32 (n, d) to (d,): the float64 kept sum, or the float32 mean of what is kept."""
        n, d = x.shape
        if n != self._network.num_wires:
            raise ValueError(f"{n} rows: this kernel is for {self._network.num_wires}")
        if d > 1 and x.stride(1) != 1:
            x = x.contiguous()
        result = torch.empty(d, dtype=torch.float32 if mean else torch.float64, device=x.device)
        if d:
            grid = (self._blocks(d, self._columns),)
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                self._kernel[grid](x, result, d, x.stride(0), COLUMNS=self._columns, MEAN=mean, num_warps=4)
        return result


def fits_registers(n: int, f: int) -> bool:
    """Whether a thread can hold a column of n values; a sort is better where it cannot."""
    return n <= _LARGEST_N and len(network(n, f).comparators) <= _LARGEST_NETWORK


@lru_cache(maxsize=64)
def triton_kernel(n: int, f: int, d: int, device: torch.device | str) -> TritonKernel:
    """The kernel for n rows and d columns on a CUDA device, compiled.

    Raises
    ------
    Unavailable
        Triton cannot compile it here.
    """
    kernel = TritonKernel(network(n, f))
    try:
        rows = torch.zeros((n, d), device=device)
        for mean in (True, False):
            kernel(rows, mean=mean)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever a compiler, a driver or a missing tool raises: the answer is to sort
        raise Unavailable(f"Triton failed: {type(error).__name__}: {str(error)[-500:]}") from error
    return kernel


def _function(source: str, name: str) -> Any:
    """The function ``kernel`` of that source. Triton reads a function's text, so it is filed where Python looks."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "common.aggregation.kernels.generated"}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102 - our own text, made of integers
    return namespace["kernel"]

"""Which kernel of the trimmed mean runs: the fastest that is ready, and never a compiler within a round."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.aggregation.kernels.compiled import LARGEST_N, fits_straight_line, straight_line_kernel, table_kernel
from common.aggregation.kernels.gpu import fits_registers, triton_kernel
from common.aggregation.kernels.library import Unavailable
from common.aggregation.kernels.plain import sorted_sum, sorted_sum_on_device
from common.errors import RuleError

__all__ = ["VARIABLE", "Dispatcher"]

log = logging.getLogger("byzuldp.kernels")

VARIABLE = "BYZULDP_KERNEL"
_PATHS = ("auto", "plain", "table", "straight_line")
_QUICK_N = 64  # up to here a network is built within a few milliseconds
_LARGE = 1 << 20  # elements from which straight-line code is worth seconds of compilation

Key = tuple[str, int, int]


class _Kernel(Protocol):
    def __call__(self, x: Tensor, *, mean: bool) -> Tensor: ...


class Dispatcher:
    """Trimmed means by the fastest kernel that is ready.

    Until :meth:`prepare` is called, a call compiles what it needs: once per machine for the table, which serves any n.
    Afterwards no call waits for a compiler: an n that was not prepared is compiled in the background, and served by
    the table, or sorted, until then. All kernels add up the same values in float64; in float32 their means
    differ, if at all, by one rounding, and for multiples of one power of two (see
    :class:`~common.aggregation.rule.SumRule`) not in a bit.

    The environment variable ``BYZULDP_KERNEL`` forces a path: ``plain``, ``table`` or ``straight_line``; what is
    forced and cannot be had is an error.
    """

    def __init__(self) -> None:
        self._best: dict[Key, _Kernel | None] = {}  # None: sorting is all there is
        self._settled: set[Key] = set()  # nothing faster will come
        self._underway: set[Key] = set()
        self._prepared = False
        self._failures: set[str] = set()
        self._compiling = threading.Lock()

    def __call__(self, x: Tensor, f: int, *, mean: bool) -> Tensor:
        """The trimmed mean, or the sum before its division.

        Parameters
        ----------
        x
            float32 (n, d) with n > 2f.
        f
            How many values are dropped at each end.
        mean
            float32 (d,) if true, else the float64 sum of what is kept.

        Raises
        ------
        RuleError
            ``BYZULDP_KERNEL`` names no path, or one that cannot be had here.
        """
        kernel = self._kernel(x, f)
        if kernel is not None:
            return kernel(x, mean=mean)
        on_cpu = x.device.type == "cpu"
        total = torch.from_numpy(sorted_sum(x.numpy(), f)) if on_cpu else sorted_sum_on_device(x, f)
        return total.div_(x.shape[0] - 2 * f).to(torch.float32) if mean else total

    def prepare(self, n: int, f: int, d: int, device: torch.device | str) -> None:
        """Compile now what calls with n rows and d columns on this device will use.

        From then on a call with another n does not wait for a compiler.
        """
        kind = torch.device(device).type
        if _forced() == "auto" and n <= LARGEST_N:
            self._settle((kind, n, f), d, device)
        self._prepared = True

    def _kernel(self, x: Tensor, f: int) -> _Kernel | None:
        (n, d), kind, forced = x.shape, x.device.type, _forced()
        if forced != "auto":
            return _forced_kernel(forced, kind, n, f)
        if n > LARGEST_N:
            return None
        key = (kind, n, f)
        if key not in self._best:
            if self._prepared and (kind != "cpu" or n > _QUICK_N):
                self._settle_in_background(key, d, x.device)
                return None
            if kind != "cpu":
                self._settle(key, d, x.device)
            else:
                self._best[key] = self._attempt(lambda: table_kernel(n, f))
        if key not in self._settled and n * d >= _LARGE:
            self._settle_in_background(key, d, x.device)
        return self._best[key]

    def _settle(self, key: Key, d: int, device: torch.device | str) -> None:
        """Compile the best there is for the key."""
        kind, n, f = key
        with self._compiling:
            if key in self._settled:
                return
            if kind == "cpu":
                best = self._attempt(lambda: table_kernel(n, f))
                self._best.setdefault(key, best)
                fits = best is not None and fits_straight_line(n, f)
                if fits and n * d < _LARGE:
                    return
                if fits:
                    best = self._attempt(lambda: straight_line_kernel(n, f)) or best
            else:
                fits = kind == "cuda" and fits_registers(n, f)
                best = self._attempt(lambda: triton_kernel(n, f, d, device)) if fits else None
            self._best[key] = best
            self._settled.add(key)

    def _settle_in_background(self, key: Key, d: int, device: torch.device) -> None:
        if key in self._underway:
            return
        self._underway.add(key)

        def work() -> None:
            if sys.platform == "linux":  # there a thread has a niceness of its own, and a compiler inherits it
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self._settle(key, d, device)
            self._underway.discard(key)

        threading.Thread(target=work, name="byzuldp-kernels", daemon=True).start()

    def _attempt(self, make: Callable[[], _Kernel]) -> _Kernel | None:
        try:
            return make()
        except Unavailable as reason:
            if str(reason) not in self._failures:
                self._failures.add(str(reason))
                log.warning("the trimmed mean will be slower than it could be: %s", reason)
            return None


def _forced() -> str:
    path = os.environ.get(VARIABLE) or "auto"
    if path not in _PATHS:
        raise RuleError(f"{VARIABLE} = {path!r}: expected {', '.join(_PATHS)}")
    return path


def _forced_kernel(path: str, kind: str, n: int, f: int) -> _Kernel | None:
    if path == "plain" or kind != "cpu":
        return None
    try:
        return table_kernel(n, f) if path == "table" else straight_line_kernel(n, f)
    except Unavailable as reason:
        raise RuleError(f"{VARIABLE} = {path}: {reason}") from reason

"""Memory for scaled rows that outlives a round, so that a round does not wait for fresh pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from common.aggregation.kernels.passes import LARGE

__all__ = ["Scratch"]


class Scratch:
    """At most one buffer on the CPU, as large as the largest matrix it was asked for; none for small matrices.

    Threads may share it: while one uses the buffer, another gets a new one.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @contextmanager
    def like(self, x: Tensor) -> Iterator[Tensor | None]:
        """Contiguous float32 of the shape of ``x``, of unknown content, until the block ends; None if not worth it."""
        if x.device.type != "cpu" or x.numel() < LARGE:
            yield None
            return
        try:
            buffer = self._kept.pop()
        except IndexError:
            buffer = torch.empty(0)
        if buffer.numel() < x.numel():
            buffer = torch.from_numpy(np.empty(x.numel(), dtype=np.float32))  # numpy asks for huge pages
        try:
            yield buffer[: x.numel()].view(x.shape)
        finally:
            self._kept[:] = [buffer]

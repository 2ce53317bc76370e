"""Momenta that arrive a byte at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from adversary.misbehaviour.breach import Beside, attempt
from adversary.misbehaviour.misbehaviour import Ground
from adversary.misbehaviour.storm import positive
from client.push import Push, Reply
from common.rpc.frames import encode_frame, tensor_bytes

__all__ = ["SlowLoris"]

FRAMES_PER_S = 10
"""Where the pace allows more bytes than this a second, there are more bytes in a frame."""


class SlowLoris(Beside):
    """Sends each momentum a byte a second, so that it is always about to arrive.

    Parameters
    ----------
    bytes_per_s
        Of the momentum itself; whole frames go out, of one byte or more.
    """

    name = "slow_loris"

    def __init__(self, ground: Ground, *, bytes_per_s: float = 1.0) -> None:
        super().__init__(ground)
        self._bytes_per_s = positive(self.name, "bytes_per_s", bytes_per_s)

    async def deliver(self, push: Push) -> Reply | None:
        self.begin(push, self._slowly(push))
        return None

    async def _slowly(self, push: Push) -> None:
        await attempt(push, self._frames(push))

    async def _frames(self, push: Push) -> AsyncIterator[bytes]:
        data, size = tensor_bytes(push.momentum), max(1, int(self._bytes_per_s / FRAMES_PER_S))
        yield encode_frame(header=push.header())
        for start in range(0, len(data), size):
            await asyncio.sleep(size / self._bytes_per_s)
            yield encode_frame(offset=start, payload=data[start : start + size])

"""The process dies in the middle of a momentum."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

from adversary.attacks.parameters import count
from adversary.misbehaviour.breach import attempt, pieces
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from client.push import Push, Reply, deliver
from common.rpc.frames import encode_frame, tensor_bytes

__all__ = ["Crash"]

ON_ITS_WAY_S = 0.2
"""For what was written to have left this process."""


class Crash(Misbehaviour):
    """Kills its own process, by SIGKILL, half-way through a momentum; all identities in it go down.

    Parameters
    ----------
    at_round
        In which round, or in the first one after it that it answers. A process that is started again later lives.
    """

    name = "crash"

    def __init__(self, ground: Ground, *, at_round: int = 3) -> None:
        super().__init__(ground)
        self._at_round = count(self.name, "at_round", at_round, least=0)
        self._first: int | None = None

    async def deliver(self, push: Push) -> Reply | None:
        self._first = push.round_id if self._first is None else self._first
        if self._first <= self._at_round <= push.round_id:
            return await attempt(push, _half(push))
        return await deliver(push)


async def _half(push: Push) -> AsyncIterator[bytes]:
    data = tensor_bytes(push.momentum)
    yield encode_frame(header=push.header())
    for offset, piece in pieces(push, data):
        if offset >= len(data) // 2:
            await asyncio.sleep(ON_ITS_WAY_S)
            os.kill(os.getpid(), signal.SIGKILL)
        yield encode_frame(offset=offset, payload=piece)

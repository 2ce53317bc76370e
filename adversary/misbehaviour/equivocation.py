"""Two momenta for one round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from adversary.attacks.parameters import choice
from adversary.misbehaviour.breach import attempt, pieces, trailer
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from client.push import Push, Reply, deliver
from common.rpc.frames import encode_frame, tensor_bytes

__all__ = ["Equivocation"]

HEAD_START_S = 0.05


class Equivocation(Misbehaviour):
    """Sends two momenta for each round: the attack's, and its negative.

    Parameters
    ----------
    order
        "attack_first", "attack_last", or "at_once": the other one is sent while the attack's is on its way.
    """

    name = "equivocation"

    def __init__(self, ground: Ground, *, order: str = "attack_first") -> None:
        super().__init__(ground)
        self._order = choice(self.name, "order", order, ("attack_first", "attack_last", "at_once"))

    async def deliver(self, push: Push) -> Reply | None:
        other = replace(push, momentum=-push.momentum)
        if self._order == "at_once":
            return await _around(push, other)
        first, second = (push, other) if self._order == "attack_first" else (other, push)
        reply = await deliver(first)
        await attempt(second, second.frames())
        return reply


async def _around(push: Push, other: Push) -> Reply | None:
    """The other one in whole, while the push has begun and is not at its end."""
    begun, tried = asyncio.Event(), asyncio.Event()

    async def halting() -> AsyncIterator[bytes]:
        data = tensor_bytes(push.momentum)
        yield encode_frame(header=push.header())
        for offset, piece in pieces(push, data):
            yield encode_frame(offset=offset, payload=piece)
            begun.set()
            await tried.wait()
        yield trailer(data, push.momentum.size)

    async def between() -> None:
        try:
            async with asyncio.timeout(push.deadline_s):
                await begun.wait()
            await asyncio.sleep(HEAD_START_S)
            await attempt(other, other.frames())
        finally:
            tried.set()

    beside = asyncio.create_task(between())
    try:
        return await attempt(push, halting())
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)

"""Pushes that the protocol forbids: how they are sent, and what may follow them."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any

import grpc

from adversary.attacks.parameters import flag
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from client.push import Push, Reply, deliver
from common.rpc.digests import digest_of
from common.rpc.frames import Malformed, encode_frame
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Beside", "Breach", "attempt", "pieces", "trailer"]

log = logging.getLogger("byzuldp.adversary")

LEAST_PIECES = 4


class Breach(Misbehaviour):
    """Sends each momentum so that it is refused; then, unless told otherwise, as it should be.

    Parameters
    ----------
    then_answer
        Whether the momentum follows in good order; otherwise the identity answers no round.
    """

    def __init__(self, ground: Ground, *, then_answer: bool = True) -> None:
        super().__init__(ground)
        self._then_answer = flag(self.name, "then_answer", then_answer)

    @abstractmethod
    def broken(self, push: Push) -> Iterable[bytes]:
        """The messages that are sent in place of the momentum."""

    async def deliver(self, push: Push) -> Reply | None:
        await attempt(push, self.broken(push))
        return await deliver(push) if self._then_answer else None


class Beside(Misbehaviour):
    """Pushes that take long, while the exchange goes on: one at a time for each identity."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, push: Push, work: Coroutine[Any, Any, None]) -> None:
        """Do this for an identity, unless it is still busy with an earlier push."""
        client_id = push.caller.client_id
        if client_id in self._tasks:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[client_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(client_id))

    async def beside(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def attempt(push: Push, frames: Iterable[bytes] | AsyncIterator[bytes]) -> Reply | None:
    """Send something once, whatever comes of it: refused, cut off, nobody there (then None)."""
    try:
        reply = await push.send(frames)
    except grpc.aio.AioRpcError as problem:
        log.debug("client %d: %s: %s", push.caller.client_id, problem.code().name, problem.details())
        return None
    if not isinstance(reply, Malformed):
        answer = kind_name(reply.refusal.kind) if reply.HasField("refusal") else "accepted"
        log.debug("client %d, round %d: %s", push.caller.client_id, push.round_id, answer)
    return reply


def pieces(push: Push, data: memoryview | bytes) -> Iterator[tuple[int, memoryview]]:
    """The offset and content of each chunk: four or more of them, if there is as much, none larger than allowed."""
    view = memoryview(data)
    size = max(1, min(push.chunk_bytes, len(view) // LEAST_PIECES))
    for start in range(0, len(view), size):
        yield start, view[start : start + size]


def trailer(data: memoryview | bytes, count: int) -> bytes:
    """The last message of a push, with a digest that is right."""
    return encode_frame(trailer=pb.Trailer(element_count=count, digest=digest_of(data)))

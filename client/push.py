"""One momentum on its way to the parameter server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from client.memory import Vector
from common.rpc.frames import Malformed, tensor_frames
from common.rpc.methods import ParameterServerStub
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Deliver", "Push", "Reply", "deliver"]

ATTEMPTS = 3
FIRST_BACKOFF_S = 0.1

Reply = pb.PushReply | Malformed


@dataclass(frozen=True)
class Push:
    """A momentum, whose it is, for which round, and over which connection it goes.

    Attributes
    ----------
    momentum
        float32 (d,).
    deadline_s
        Of one call.
    compute_s
        How long it took to compute.
    """

    caller: pb.Caller
    round_id: int
    momentum: Vector
    schema_hash: bytes
    chunk_bytes: int
    deadline_s: float
    stub: ParameterServerStub
    compute_s: float = 0.0

    def header(self, **changes: Any) -> pb.MomentumHeader:
        """What announces it, but for the changes."""
        fields: dict[str, Any] = {
            "caller": self.caller,
            "round_id": self.round_id,
            "schema_hash": self.schema_hash,
            "element_count": self.momentum.size,
            "compute_s": self.compute_s,
        }
        return pb.MomentumHeader(**fields | changes)

    def frames(self) -> list[bytes]:
        """The messages that carry it."""
        return list(tensor_frames(self.header(), self.momentum, self.chunk_bytes))

    async def send(self, frames: Iterable[bytes] | AsyncIterator[bytes]) -> Reply:
        """One call with these messages.

        Raises
        ------
        grpc.aio.AioRpcError
            It failed.
        """
        messages = frames if isinstance(frames, AsyncIterator) else _each(frames)
        reply: Reply = await self.stub.PushMomentum(messages, timeout=self.deadline_s)
        return reply


Deliver = Callable[[Push], Awaitable[Reply | None]]
"""How an exchange sends momenta; None: nobody was asked, so there is no answer."""


async def deliver(push: Push) -> Reply:
    """Send it until it is acknowledged or refused; a repetition is harmless.

    A connection that fails is tried again for a while; after a longer outage the exchange joins anew, and the round is
    served again if it is still open.

    Raises
    ------
    grpc.aio.AioRpcError
        The last attempt failed.
    """
    frames, backoff = push.frames(), FIRST_BACKOFF_S
    for _ in range(ATTEMPTS - 1):
        try:
            return await push.send(frames)
        except grpc.aio.AioRpcError as problem:
            if problem.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff *= 2
    return await push.send(frames)


async def _each(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame

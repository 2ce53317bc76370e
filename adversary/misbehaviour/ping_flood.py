"""Frames that ask for nothing but an answer: PING and SETTINGS, as fast as they are taken."""

from __future__ import annotations

from adversary.misbehaviour.http2 import PING, frame, opened, settings
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, Wire, amount, dial, membership, positive, storm

__all__ = ["PingFlood"]

ANSWER_S = 5.0


class PingFlood(Misbehaviour):
    """Floods connections with HTTP/2's PING and SETTINGS, whose answers it reads, and comes back when thrown out.

    Parameters
    ----------
    connections
        How many at once; pings over every other one, settings over the rest.
    at_once
        Frames that are sent together.
    per_second
        Frames a second.
    """

    name = "ping_flood"

    def __init__(
        self, ground: Ground, *, connections: int = 4, at_once: int = 50, per_second: float = 20_000.0
    ) -> None:
        super().__init__(ground)
        self.connections = amount(self.name, "connections", connections)
        self.at_once = amount(self.name, "at_once", at_once)
        self._pace = Pace(positive(self.name, "per_second", per_second))

    async def beside(self) -> None:
        await membership(self.ground)
        await storm(self.name, self.connections, self._flood)

    async def _flood(self, number: int) -> None:
        await self._pace.turn(self.at_once)
        frames = (frame(PING, 0, 0, bytes(8)) if number % 2 == 0 else settings()) * self.at_once

        async def flood(wire: Wire) -> None:
            while True:
                await wire.send(frames)
                await self._pace.turn(self.at_once)

        async with dial(self.ground, as_client=self.ground.ids[0]) as wire:
            await wire.send(opened())
            await wire.reading(flood(wire), ANSWER_S)

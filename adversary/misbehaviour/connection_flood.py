"""A flood of connections: as many as the server takes, held open, and renewed when it closes them."""

from __future__ import annotations

import asyncio
import contextlib
import resource

from adversary.misbehaviour.http2 import opened
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, amount, dial, positive, storm
from client.push import Push, Reply

__all__ = ["ConnectionFlood"]

FILES_BESIDE = 256


class ConnectionFlood(Misbehaviour):
    """Holds a thousand connections open, half of them without a word, and opens new ones for those it loses.

    It begins when the first round is open: those who are members then are to be disturbed. Who has yet to come finds no
    connection left, which a server behind gRPC can do nothing about.

    Parameters
    ----------
    connections
        How many at once.
    held_s
        After so long one is given up for a new one.
    per_second
        How many are opened a second.
    """

    name = "connection_flood"

    def __init__(
        self, ground: Ground, *, connections: int = 1000, held_s: float = 10.0, per_second: float = 1000.0
    ) -> None:
        super().__init__(ground)
        self.connections = amount(self.name, "connections", connections)
        self.held_s = positive(self.name, "held_s", held_s)
        self._pace = Pace(positive(self.name, "per_second", per_second))
        self._begun = asyncio.Event()

    async def deliver(self, push: Push) -> Reply | None:
        self._begun.set()
        return await super().deliver(push)

    async def beside(self) -> None:
        await self._begun.wait()
        _files_for(self.connections)
        await storm(self.name, self.connections, self._hold)

    async def _hold(self, number: int) -> None:
        """One of them: every other one says that it speaks HTTP/2, and nothing more."""
        await self._pace.turn()
        speaks = number % 2 == 1
        async with dial(self.ground, as_client=self.ground.ids[0] if speaks else None) as wire:
            if speaks:
                await wire.send(opened())
            await wire.until_closed(self.held_s)


def _files_for(connections: int) -> None:
    """Let this process have as many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )

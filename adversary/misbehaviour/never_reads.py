"""Asking for the model, and never reading it."""

from __future__ import annotations

from adversary.misbehaviour.http2 import opened, request
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, amount, dial, membership, positive, storm
from common.rpc.methods import PARAMETER_SERVER
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["NeverReads"]

CALLS_PER_CONNECTION = 4
NEVER_MEANS_S = 3600.0


class NeverReads(Misbehaviour):
    """Asks for the model over connections with a window of zero, and answers pings, so that it looks alive.

    Parameters
    ----------
    connections
        How many at once; each has four such calls.
    held_s
        After so long a connection is given up for a new one.
    per_second
        Connections that are opened a second.
    """

    name = "never_reads"

    def __init__(self, ground: Ground, *, connections: int = 8, held_s: float = 60.0, per_second: float = 50.0) -> None:
        super().__init__(ground)
        self.connections = amount(self.name, "connections", connections)
        self.held_s = positive(self.name, "held_s", held_s)
        self._pace = Pace(positive(self.name, "per_second", per_second))

    async def beside(self) -> None:
        await membership(self.ground)
        await storm(self.name, self.connections, self._ask)

    async def _ask(self, number: int) -> None:
        await self._pace.turn()
        callers = sorted(self.ground.callers().items())
        if not callers:
            return
        client_id, caller = callers[number % len(callers)]
        async with dial(self.ground, as_client=client_id) as wire:
            await wire.send(opened(initial_window=0))
            for k in range(CALLS_PER_CONNECTION):
                wanted = pb.PullModelRequest(caller=caller, wait_s=NEVER_MEANS_S)
                await wire.send(request(f"/{PARAMETER_SERVER}/PullModel", self.ground.address, 2 * k + 1, wanted))
            await wire.answer(self.held_s)

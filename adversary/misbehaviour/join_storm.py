"""A storm of joins: each identity comes anew, again and again, each time in another life."""

from __future__ import annotations

import asyncio
import secrets

import grpc

from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, amount, positive, storm
from client.memory import Outcome
from common.errors import ServerUnreachable
from common.rpc import PROTOCOL_VERSION
from common.rpc.frames import Malformed
from common.rpc.methods import ParameterServerStub
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["JoinStorm"]


class JoinStorm(Misbehaviour):
    """Its identities join again and again, each time superseding themselves, and never train.

    Parameters
    ----------
    at_once
        Joins on their way at once.
    per_second
        Joins a second.
    """

    name = "join_storm"
    takes_part = False

    def __init__(self, ground: Ground, *, at_once: int = 4, per_second: float = 500.0) -> None:
        super().__init__(ground)
        self.at_once = amount(self.name, "at_once", at_once)
        self._pace = Pace(positive(self.name, "per_second", per_second))
        self._stubs: dict[int, ParameterServerStub] = {}
        self._over: asyncio.Future[Outcome]
        self._heard_at = 0.0

    async def beside(self) -> Outcome:
        """Until a join is refused because the run is over.

        Raises
        ------
        ServerUnreachable
            No join has been answered for ``network.server_gone_s``.
        """
        loop = asyncio.get_running_loop()
        self._over, self._heard_at = loop.create_future(), loop.time()
        channels = {client_id: self.ground.channel(client_id) for client_id in self.ground.ids}
        self._stubs = {client_id: ParameterServerStub(channel) for client_id, channel in channels.items()}
        joining = asyncio.create_task(storm(self.name, self.at_once, self._join))
        try:
            return await self._over
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _join(self, number: int) -> None:
        await self._pace.turn()
        client_id = self.ground.ids[number % len(self.ground.ids)]
        network, loop = self.ground.experiment.network, asyncio.get_running_loop()
        try:
            reply: pb.JoinReply | Malformed = await self._stubs[client_id].Join(
                pb.JoinRequest(
                    protocol_version=PROTOCOL_VERSION,
                    client_id=client_id,
                    token=self.ground.tokens[client_id],
                    schema_hash=self.ground.schema_hash,
                    fingerprint=self.ground.experiment.fingerprint(),
                    previous=secrets.token_bytes(16),
                ),
                timeout=network.rpc_deadline_s,
            )
        except grpc.aio.AioRpcError as problem:
            if loop.time() - self._heard_at > network.server_gone_s and not self._over.done():
                self._over.set_exception(
                    ServerUnreachable(f"{self.ground.address} has answered nothing for {network.server_gone_s:.0f} s")
                )
            raise problem
        self._heard_at = loop.time()
        if not isinstance(reply, Malformed) and reply.HasField("run_finished") and not self._over.done():
            self._over.set_result(Outcome(reply.run_finished.status, reply.run_finished.message))

"""Impersonation: speaking for the honest identities, without what proves that one is theirs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, membership, positive, storm
from common.certificates import client_uri
from common.rpc import PROTOCOL_VERSION
from common.rpc.credentials import ClientCredentials, client_credentials, open_channel
from common.rpc.frames import encode_frame
from common.rpc.methods import ParameterServerStub
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Impersonation"]

HANDS = 4
CALL_S = 10.0


class Impersonation(Misbehaviour):
    """Claims honest identities: without a token, with a wrong one, with its own, in a made-up incarnation.

    With TLS it shows its own certificate meanwhile, and one that it signed itself for the identity it claims.

    Parameters
    ----------
    per_second
        Claims a second.
    """

    name = "impersonation"

    def __init__(self, ground: Ground, *, per_second: float = 200.0) -> None:
        super().__init__(ground)
        self._pace = Pace(positive(self.name, "per_second", per_second))
        mine = set(ground.experiment.adversary_ids)
        self._victims = [i for i in range(ground.experiment.federation.clients) if i not in mine]
        self._claims = 0

    async def beside(self) -> None:
        if not self._victims:
            return
        await membership(self.ground)
        mine = self.ground.channel(self.ground.ids[0])
        channels = [mine]
        if (forged := self._forged()) is not None:
            channels.append(open_channel(self.ground.address, self.ground.experiment.network, forged))
        stubs = [ParameterServerStub(channel) for channel in channels]
        try:
            await storm(self.name, HANDS, lambda number: self._claim(stubs[number % len(stubs)]))
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _claim(self, stub: ParameterServerStub) -> None:
        await self._pace.turn()
        number, self._claims = self._claims, self._claims + 1
        ways: list[Callable[[ParameterServerStub, int], Awaitable[Any]]] = [
            lambda stub, victim: self._join(stub, victim, ""),
            lambda stub, victim: self._join(stub, victim, secrets.token_hex(16)),
            lambda stub, victim: self._join(stub, victim, next(iter(self.ground.tokens.values()))),
            self._push,
            self._pull,
            self._attend,
            lambda stub, victim: stub.Leave(pb.LeaveRequest(caller=self._as(victim)), timeout=CALL_S),
        ]
        victim = self._victims[number // len(ways) % len(self._victims)]
        await ways[number % len(ways)](stub, victim)

    def _as(self, victim: int) -> pb.Caller:
        """The victim in a life it never had."""
        run_id = next((caller.run_id for caller in self.ground.callers().values()), "")
        return pb.Caller(run_id=run_id, client_id=victim, incarnation=secrets.token_bytes(16))

    async def _join(self, stub: ParameterServerStub, victim: int, token: str) -> None:
        await stub.Join(
            pb.JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                client_id=victim,
                token=token,
                schema_hash=self.ground.schema_hash,
                fingerprint=self.ground.experiment.fingerprint(),
            ),
            timeout=CALL_S,
        )

    async def _push(self, stub: ParameterServerStub, victim: int) -> None:
        header = pb.MomentumHeader(
            caller=self._as(victim), schema_hash=self.ground.schema_hash, element_count=self.ground.num_parameters
        )
        call = stub.PushMomentum(timeout=CALL_S)
        await call.write(encode_frame(header=header))
        await call

    async def _pull(self, stub: ParameterServerStub, victim: int) -> None:
        async for _ in stub.PullModel(pb.PullModelRequest(caller=self._as(victim)), timeout=CALL_S):
            pass

    async def _attend(self, stub: ParameterServerStub, victim: int) -> None:
        """In all their names at once, its own among them."""
        callers = [*self.ground.callers().values(), self._as(victim)]
        call = stub.Attend(timeout=CALL_S)
        await call.write(pb.AttendRequest(attending=pb.Attending(callers=callers)))
        while await call.read() is not grpc.aio.EOF:
            pass

    def _forged(self) -> ClientCredentials | None:
        """A certificate for the first victim that nobody but its owner has signed; None without TLS."""
        tls = self.ground.experiment.network.tls
        if not tls.enabled:
            return None
        true = client_credentials(tls, self.ground.ids[0])
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"client {self._victims[0]}")])
        signed = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(client_uri(self._victims[0]))]), False
            )
            .sign(key, SHA256())
        )
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return ClientCredentials(true.authorities, signed.public_bytes(Encoding.PEM), secret, true.certificate)

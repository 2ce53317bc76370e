"""What no client of this protocol says: random bytes, HTTP/1.1, TLS where there is none and none where there is."""

from __future__ import annotations

import secrets
import ssl
from itertools import count

from adversary.misbehaviour.http2 import PREFACE, settings
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.storm import Pace, amount, dial, membership, positive, storm
from common.rpc.methods import PARAMETER_SERVER

__all__ = ["Garbage", "Http1", "StrangeBytes", "TlsConfusion"]

HANDS = 8
ANSWER_S = 5.0


class StrangeBytes(Misbehaviour):
    """Opens a connection, says something strange, waits for what comes of it, and begins again.

    Parameters
    ----------
    per_second
        Connections a second.
    """

    def __init__(self, ground: Ground, *, per_second: float = 500.0) -> None:
        super().__init__(ground)
        self._pace, self._number = Pace(positive(self.name, "per_second", per_second)), count()

    def says(self, number: int) -> tuple[bytes, bool]:
        """What is said over connection ``number``, and whether that is said inside TLS, where there is TLS."""
        raise NotImplementedError

    async def beside(self) -> None:
        await membership(self.ground)
        await storm(self.name, HANDS, self._say)

    async def _say(self, _: int) -> None:
        await self._pace.turn()
        said, inside = self.says(next(self._number))
        async with dial(self.ground, as_client=self.ground.ids[0] if inside else None) as wire:
            await wire.send(said)
            await wire.until_closed(ANSWER_S)


class Garbage(StrangeBytes):
    """Sends random bytes to the port, also as a connection that has begun well.

    Parameters
    ----------
    size
        Bytes of each connection.
    per_second
        Connections a second.
    """

    name = "garbage"

    def __init__(self, ground: Ground, *, size: int = 4096, per_second: float = 500.0) -> None:
        super().__init__(ground, per_second=per_second)
        self.size = amount(self.name, "size", size)

    def says(self, number: int) -> tuple[bytes, bool]:
        begun = number % 2 == 1
        return (PREFACE + settings() if begun else b"") + secrets.token_bytes(self.size), begun


class Http1(StrangeBytes):
    """Sends requests of HTTP/1.1, as a browser or a scanner would."""

    name = "http1"

    def says(self, number: int) -> tuple[bytes, bool]:
        host = self.ground.address.encode()
        path = f"/{PARAMETER_SERVER}/Join".encode()
        return (
            b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nUser-Agent: Mozilla/5.0\r\n\r\n",
            b"POST " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0",
            b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
        )[number % 3], number % 2 == 0


class TlsConfusion(StrangeBytes):
    """Begins TLS at a port that has none; where there is TLS, speaks HTTP/2 without it, or breaks the handshake off."""

    name = "tls_confusion"

    def says(self, number: int) -> tuple[bytes, bool]:
        if self.ground.experiment.network.tls.enabled and number % 2 == 0:
            return PREFACE + settings(), False
        hello = _client_hello()
        return hello if number % 4 < 2 else hello[: len(hello) // 2], False


def _client_hello() -> bytes:
    """The first flight of a handshake, as this machine's TLS would send it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    handshake = context.wrap_bio(incoming, outgoing)
    try:
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake is not over before the peer has said anything")

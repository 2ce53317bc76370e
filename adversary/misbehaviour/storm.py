"""Doing the same thing again and again, so often a second, whatever the server says to it."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from adversary.misbehaviour.http2 import HEADER_BYTES, acknowledgement
from adversary.misbehaviour.misbehaviour import Ground
from common.errors import AttackError
from common.parameters import finite_number
from common.rpc.addresses import parse_address
from common.rpc.credentials import client_files

__all__ = ["Pace", "Wire", "amount", "dial", "membership", "positive", "storm"]

log = logging.getLogger("byzuldp.adversary")

AWAY_S = 0.2
LONGEST_BURST_S = 0.1
READ_BYTES = 1 << 16


def amount(owner: str, name: str, value: object) -> int:
    """A parameter that counts something.

    Raises
    ------
    AttackError
        It is no whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AttackError(f"{owner}: {name} = {value!r}: expected a whole number of at least 1")
    return value


def positive(owner: str, name: str, value: object) -> float:
    """A parameter that is a rate or a duration.

    Raises
    ------
    AttackError
        It is no finite number above 0.
    """
    number = finite_number(owner, name, value, error=AttackError)
    if number <= 0:
        raise AttackError(f"{owner}: {name} = {value!r}: expected a number above 0")
    return number


class Pace:
    """So many turns a second; what was missed is made up for within a short while, or not at all."""

    def __init__(self, per_second: float) -> None:
        self._interval_s, self._due = 1.0 / per_second, 0.0

    async def turn(self, count: int = 1) -> None:
        """Wait for ``count`` turns; others in this event loop have theirs meanwhile."""
        now = asyncio.get_running_loop().time()
        due = max(self._due, now - LONGEST_BURST_S)
        self._due = due + count * self._interval_s
        await asyncio.sleep(max(0.0, due - now))


async def membership(ground: Ground) -> None:
    """Wait until one of the identities is a member: what comes before that would keep its own exchange out."""
    while not ground.callers():  # noqa: ASYNC110 - the exchange tells nobody
        await asyncio.sleep(0.05)


async def storm(name: str, hands: int, act: Callable[[int], Awaitable[None]]) -> None:
    """``hands`` tasks that act for ever. What a server does to one act, or its absence, ends that act alone."""
    acts = 0

    async def hand(number: int) -> None:
        nonlocal acts
        while True:
            acts += 1
            try:
                await act(number)
            except grpc.aio.AioRpcError as problem:
                if problem.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(AWAY_S)
            except ConnectionRefusedError:
                await asyncio.sleep(AWAY_S)
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(0)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(hands):
                group.create_task(hand(number))
    finally:
        log.info("%s: begun %d times", name, acts)


@dataclass(frozen=True)
class Wire:
    """A connection as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        """Write, no faster than the peer reads."""
        self.writer.writelines(parts)
        await self.writer.drain()

    async def until_closed(self, deadline_s: float) -> None:
        """Read and forget whatever comes, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while await self.reader.read(READ_BYTES):
                    pass

    async def answer(self, deadline_s: float) -> None:
        """Read HTTP/2 frames for so long, and answer those that only ask whether somebody is there.

        Raises
        ------
        EOFError, OSError
            The connection has ended.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(deadline_s) else deadline_s):
                while True:
                    head = await self.reader.readexactly(HEADER_BYTES)
                    payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                    if answer := acknowledgement(head[3], head[4], payload):
                        await self.send(answer)

    async def reading(self, doing: Coroutine[Any, Any, None], closing_s: float) -> None:
        """Do something until the peer closes the connection, and meanwhile :meth:`answer` what it says.

        Once there is nothing more to do, that is waited for ``closing_s`` at most.
        """
        task, closed = asyncio.create_task(doing), asyncio.create_task(self.answer(math.inf))
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not closed.done():
                await task
                await asyncio.wait({closed}, timeout=closing_s)
        finally:
            for one in (task, closed):
                one.cancel()
            await asyncio.gather(task, closed, return_exceptions=True)


@asynccontextmanager
async def dial(ground: Ground, *, as_client: int | None = None) -> AsyncIterator[Wire]:
    """A connection to the server; ``as_client``: with that identity's certificate, where there is TLS.

    Raises
    ------
    OSError
        There is none to be had.
    """
    address = parse_address(ground.address)
    context = None if as_client is None else _trusting(ground, as_client)
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()  # what is unsent is of no interest to anybody


def _trusting(ground: Ground, client_id: int) -> ssl.SSLContext | None:
    tls = ground.experiment.network.tls
    if not tls.enabled:
        return None
    _, certificate, key = client_files(tls, client_id)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    return context

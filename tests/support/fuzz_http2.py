"""HTTP/2 as no library would speak it: frames drawn by hypothesis, on connections of their own."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fuzz_messages import METHODS, Live, Part, framed, parts_of
from hypothesis import strategies as st

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED = 0x4, 0x8
LINGER_S = 3.0
"""Longer than the server's deadlines here: it has ended every call of a peer that reads nothing."""
HARMLESS = (DATA, PRIORITY, RST_STREAM, PING, WINDOW_UPDATE, 10, 11, 12)
"""Frames after which a server may still be expected to make sense of the next ones."""

OPENINGS: dict[str, bytes] = {
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/1": b"POST /common.rpc.v1.ParameterServer/Join HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "half a preface": b"PRI * HTTP/2.0\r\n",
    "noise": bytes(range(7, 256)) * 4,
    "nothing": b"",
}
SETTINGS_OF: dict[str, bytes] = {
    "usual": b"",
    "a large window": struct.pack(">HI", 4, 2**31 - 1),
    "no window": struct.pack(">HI", 4, 0),
    "too large a window": struct.pack(">HI", 4, 2**32 - 1),
    "a frame of no size": struct.pack(">HI", 5, 0),
    "unknown": struct.pack(">HI", 0xFFFF, 7) * 40,
    "not whole": b"\0\4\0",
    "tables of 4 GiB": struct.pack(">HI", 1, 2**32 - 1),
}


class Open(NamedTuple):
    """HEADERS of a call: which, what about it is odd, and whether END_HEADERS is set."""

    method: str
    odd: str = ""
    whole: bool = True


class Send(NamedTuple):
    """DATA of the last stream that was opened: a message, and what about its framing is odd."""

    part: Part
    odd: str = ""
    end: bool = True


class Frame(NamedTuple):
    """Any other frame; the stream is that of the last call, or a number; the length may be a lie."""

    kind: int
    flags: int = 0
    stream: int | None = None
    payload: bytes = b""
    length: int | None = None


class Connection(NamedTuple):
    """A connection from its first byte to its last."""

    opening: str
    settings: str
    acknowledges: bool
    steps: tuple[Open | Send | Frame, ...]
    closing: str


HEADER_ODDS = (
    "content-type", "no content-type", "no te", "GET", "unknown method", "unknown service", "no path", "many", "huge",
    "gzip", "unknown encoding", "timeout", "upper case", "path twice", "late pseudo-header", "bad index", "table size",
)  # fmt: skip
DATA_ODDS = ("compressed", "gzip bomb", "too long", "too short", "huge length", "split", "padding", "cut", "empty")


def literal(name: str, value: str) -> bytes:
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    return b"\0" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    data = text.encode("latin-1")
    out, rest = bytearray((min(len(data), 127),)), len(data) - 127
    if rest >= 0:
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out) + data


def header_block(step: Open) -> bytes:
    """The encoded headers of a call."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", METHODS[step.method].path),
        (":authority", "fuzz"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    changed: dict[str, dict[str, str | None]] = {
        "content-type": {"content-type": "text/html"},
        "no content-type": {"content-type": None},
        "no te": {"te": None},
        "GET": {":method": "GET"},
        "unknown method": {":path": "/common.rpc.v1.ParameterServer/Resign"},
        "unknown service": {":path": "/none/None"},
        "no path": {":path": None},
    }
    changes = changed.get(step.odd, {})
    fields = [(name, value) for name, old in fields if (value := changes.get(name, old)) is not None]
    extra: dict[str, list[tuple[str, str]]] = {
        "many": [(f"h{number}", "v") for number in range(400)],
        "huge": [("note", "x" * 14_000)],
        "gzip": [("grpc-encoding", "gzip")],
        "unknown encoding": [("grpc-encoding", "lzma")],
        "timeout": [("grpc-timeout", "-99999999999H")],
        "upper case": [("Note", "x")],
        "path twice": [(":path", "/x/y")],
        "late pseudo-header": [(":method", "POST")],
    }
    block = b"".join(literal(*field) for field in fields + extra.get(step.odd, []))
    return block + {"bad index": b"\xff\xff\xff\xff\x0f", "table size": b"\x3f\xff\xff\xff\x7f"}.get(step.odd, b"")


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    said = len(payload) if length is None else length
    return struct.pack(">I", said)[1:] + bytes((kind, flags)) + struct.pack(">I", stream % 2**32) + payload


def _bomb() -> bytes:
    """A message of 64 MiB in 64 KiB."""
    import zlib

    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(deflate.compress(bytes(1 << 20)) for _ in range(64)) + deflate.flush()


_BOMB: list[bytes] = []


def data_frames(step: Send, stream: int, live: Live) -> bytes:
    """The DATA of a message."""
    message = step.part.bytes(live)
    end = END_STREAM if step.end else 0
    match step.odd:
        case "compressed":
            body = framed(message, compressed=1)
        case "gzip bomb":
            _BOMB[:] = _BOMB or [_bomb()]
            body = framed(_BOMB[0], compressed=1)
        case "too long":
            body = framed(message, lie=10)
        case "too short":
            body = framed(message, lie=-min(3, len(message)))
        case "huge length":
            body = framed(message, lie=2**31)
        case "cut":
            body = framed(message)[:-1]
        case "empty":
            body = b""
        case "padding":
            return frame(DATA, end | PADDED, stream, b"\xff" + framed(message)[:100])
        case "split":
            whole = framed(message)[:300]
            return b"".join(frame(DATA, 0, stream, whole[at : at + 1]) for at in range(len(whole))) + frame(
                DATA, end, stream, b""
            )
        case _:
            body = framed(message)
    pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)] or [b""]
    return b"".join(
        frame(DATA, end if number == len(pieces) - 1 else 0, stream, piece) for number, piece in enumerate(pieces)
    )


class Peer:
    """One connection: what was sent, what came back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.ended, self.pending, self.said_goodbye, self.closed = set[int](), set[int](), False, False
        self.changed = asyncio.Event()

    async def listen(self) -> None:
        """Read frames until the other end closes."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                await self._reader.readexactly(length)
                if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                    self.ended.add(stream)
                self.said_goodbye |= kind == GOAWAY
                self.changed.set()
        self.closed = True
        self.changed.set()

    @property
    def answered(self) -> bool:
        return self.closed or self.said_goodbye or self.pending <= self.ended


async def speak(address: str, connection: Connection, live: Live, deadline_s: float) -> str:
    """Carry out a connection; returns how the server took it.

    Raises
    ------
    AssertionError
        A call was neither answered nor closed in time, or the server keeps a connection that we have ended, or that
        never came up.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    peer = Peer(reader, writer)
    listening = asyncio.create_task(peer.listen())
    try:
        with suppress(OSError):
            await _send(writer, peer, connection, live)
        if peer.pending:
            await _until(peer, lambda: peer.answered, deadline_s, "neither answered nor closed")
        if connection.closing == "linger":
            await asyncio.sleep(LINGER_S)
        if connection.closing == "half-close":
            with suppress(OSError):
                writer.write_eof()
        if connection.closing == "half-close" or connection.opening != "http/2":
            await _until(peer, lambda: peer.closed, deadline_s, "still open, though it has ended or never was HTTP/2")
        return "closed" if peer.closed else "goodbye" if peer.said_goodbye else "answered"
    finally:
        listening.cancel()
        writer.transport.abort()
        await asyncio.gather(listening, return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, peer: Peer, connection: Connection, live: Live) -> None:
    """Send all of it, and note which calls must be answered: those that the server must have seen as such."""
    writer.write(OPENINGS[connection.opening])
    understood = connection.opening == "http/2"
    if understood:
        writer.write(frame(SETTINGS, 0, 0, SETTINGS_OF[connection.settings]))
        if connection.acknowledges:
            writer.write(frame(SETTINGS, ACK, 0, b""))
        understood = connection.settings != "no window"
    stream = -1
    for step in connection.steps:
        match step:
            case Open():
                stream += 2
                writer.write(frame(HEADERS, END_HEADERS if step.whole else 0, stream, header_block(step)))
                understood &= step.whole
                if understood:
                    peer.pending.add(stream)
            case Send():
                writer.write(data_frames(step, max(stream, 1), live))
            case Frame():
                on = max(stream, 1) if step.stream is None else step.stream
                writer.write(frame(step.kind, step.flags, on, step.payload, step.length))
                understood &= step.kind in HARMLESS and step.length is None
                if step.kind == SETTINGS:  # it may have taken the window away: then nothing can come any more
                    peer.pending.clear()
                peer.pending -= {on} if step.kind == RST_STREAM else set()
        await writer.drain()


async def _until(peer: Peer, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():
                peer.changed.clear()
                await peer.changed.wait()
    except TimeoutError:
        raise AssertionError(f"after {deadline_s:.0f} s {what}") from None


_parts = st.sampled_from([kind for method in METHODS.values() for kind in method.usual[0]]).flatmap(
    lambda kind: st.just(Part(kind)) | parts_of(kind)
)
_on = st.none() | st.sampled_from([0, 1, 2, 3, 7, 2**31 - 1, 2**32 - 1])
_payloads = st.binary(max_size=30) | st.sampled_from(
    [b"", bytes(4), bytes(5), bytes(6), bytes(8), b"\xff" * 4, b"\xff" * 8, b"\0\4" + bytes(4)]
)
_frames = st.tuples(
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]),
    _on,
    _payloads,
    st.none() | st.none() | st.sampled_from([0, 1, 2**14 + 1, 2**24 - 1]),
).map(lambda drawn: Frame(*drawn))
_opens = st.tuples(
    st.sampled_from(list(METHODS)), st.just("") | st.sampled_from(HEADER_ODDS), st.integers(0, 9).map(bool)
).map(lambda drawn: Open(*drawn))
_sends = st.tuples(_parts, st.just("") | st.sampled_from(DATA_ODDS), st.booleans()).map(lambda drawn: Send(*drawn))
_resets = st.sampled_from([bytes(4), b"\0\0\0\x08"]).map(lambda code: Frame(RST_STREAM, payload=code))


@st.composite
def connections(draw: st.DrawFn) -> Connection:
    """A connection: in most cases it is HTTP/2, and begins with a call that could be one."""
    opening = draw(st.sampled_from(["http/2"] * 9 + list(OPENINGS)))
    steps = draw(st.lists(_opens | _sends | _sends | _resets | _frames, max_size=6))
    if draw(st.integers(0, 3)):
        steps.insert(0, Open(draw(st.sampled_from(list(METHODS)))))
    return Connection(
        opening,
        draw(st.sampled_from(["usual"] * 9 + list(SETTINGS_OF))),
        draw(st.integers(0, 4)) > 0,
        tuple(steps),
        draw(st.sampled_from(["half-close"] * 4 + ["reset"] * 3 + ["linger"])),
    )

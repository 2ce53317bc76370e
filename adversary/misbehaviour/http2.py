"""Just enough HTTP/2 to be a peer that gRPC would not let anyone be."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from google.protobuf.message import Message

__all__ = [
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "HEADERS",
    "HEADER_BYTES",
    "INITIAL_WINDOW_SIZE",
    "MAX_FRAME_BYTES",
    "PING",
    "PREFACE",
    "RST_STREAM",
    "SETTINGS",
    "acknowledgement",
    "frame",
    "header",
    "header_block",
    "opened",
    "request",
    "settings",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_BYTES = 1 << 14
"""What every peer takes (RFC 9113, section 4.2)."""
HEADER_BYTES = 9


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def settings(values: Mapping[int, int] | None = None) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *item) for item in (values or {}).items()))


def opened(initial_window: int | None = None) -> bytes:
    """What a client says first; with a window of 0 its streams may be sent nothing but headers."""
    return PREFACE + settings(None if initial_window is None else {INITIAL_WINDOW_SIZE: initial_window})


def header(name: str, value: str) -> bytes:
    """A header field that is not indexed (RFC 7541, section 6.2.2)."""
    return b"\0" + _string(name) + _string(value)


def header_block(method: str, authority: str, further: Iterable[tuple[str, str]] = ()) -> bytes:
    """The headers of a gRPC call, and what further ones there are."""
    usual = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(header(name, value) for name, value in (*usual, *further))


def request(method: str, authority: str, stream: int, message: Message) -> bytes:
    """A gRPC call with one request, whole."""
    body = message.SerializeToString()
    return frame(HEADERS, END_HEADERS, stream, header_block(method, authority)) + frame(
        DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(body)) + body
    )


def acknowledgement(kind: int, flags: int, payload: bytes) -> bytes:
    """The answer that a frame asks for; empty if it asks for none."""
    if kind not in (SETTINGS, PING) or flags & ACK:
        return b""
    return frame(kind, ACK, 0, payload if kind == PING else b"")


def _string(text: str) -> bytes:
    """A string literal without Huffman coding (RFC 7541, section 5.2)."""
    data, length = text.encode(), bytearray()
    rest = len(data) - 127
    if rest < 0:
        return bytes((len(data),)) + data
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return b"\x7f" + bytes(length) + bytes((rest,)) + data

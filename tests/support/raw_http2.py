"""Just enough HTTP/2 to be a peer that gRPC would not let anyone be: one that grants no window."""

from __future__ import annotations

import socket
import struct

from google.protobuf.message import Message

DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
END_STREAM, END_HEADERS = 0x1, 0x4
INITIAL_WINDOW_SIZE = 0x4


class RawPeer:
    """A connection whose streams may be sent nothing but headers."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._authority, self._next_id = address, 1
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))

    def call(self, method: str, request: Message) -> None:
        """A gRPC call with one request, whole; whatever is answered will not be read."""
        stream, self._next_id = self._next_id, self._next_id + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": self._authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        body = request.SerializeToString()
        self._frame(HEADERS, END_HEADERS, stream, b"".join(map(_literal, headers.items())))
        self._frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(body)) + body)

    def close(self) -> None:
        self._socket.close()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(
            struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload
        )


def _literal(header: tuple[str, str]) -> bytes:
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    name, value = (text.encode() for text in header)
    assert max(len(name), len(value)) < 127
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value

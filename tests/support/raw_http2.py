"""A peer that grants no window, which gRPC would not let anyone be."""

from __future__ import annotations

import socket

from google.protobuf.message import Message

from adversary.misbehaviour.http2 import opened, request


class RawPeer:
    """A connection whose streams may be sent nothing but headers."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._authority, self._next_id = address, 1
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(opened(initial_window=0))

    def call(self, method: str, message: Message) -> None:
        """A gRPC call with one request, whole; whatever is answered will not be read."""
        stream, self._next_id = self._next_id, self._next_id + 2
        self._socket.sendall(request(method, self._authority, stream, message))

    def close(self) -> None:
        self._socket.close()

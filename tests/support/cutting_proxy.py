"""A TCP proxy that can stop carrying: for its ends the connections stand, and nothing comes through."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Literal

Way = Literal["held", "swallowed"]


class CuttingProxy:
    """Forwards connections to an address, until it is told not to.

    ``held``: it reads nothing any more, as a network that has vanished. ``swallowed``: it takes, and so acknowledges,
    all that either end sends. Connections that come later fare alike.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._way: Way | None = None
        self._carrying = threading.Event()
        self._carrying.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, way: Way) -> None:
        self._way = way
        self._carrying.clear()

    def heal(self) -> None:
        """Carry on, with new connections: those that were cut have lost bytes, or are given up."""
        self._way = None
        for each in self._sockets:
            _close(each)
        self._sockets.clear()
        self._carrying.set()

    def close(self) -> None:
        self._listener.close()
        self.heal()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                near.close()  # nobody is there
                continue
            self._sockets += near, far
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while True:
                select.select([source], [], [])
                if self._way == "held":
                    self._carrying.wait()
                data = source.recv(1 << 16)
                if self._way is None:
                    sink.sendall(data)
                if not data:
                    break
        except (OSError, ValueError):
            pass
        finally:
            self._carrying.wait()  # of what becomes of one end the other does not hear
            for each in (source, sink):
                _close(each)


def _close(connection: socket.socket) -> None:
    """Also for a thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()

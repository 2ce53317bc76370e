"""A TCP proxy that keeps what goes through it, each direction by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable


class ListeningProxy:
    """Forwards connections to ``address``; ``up`` and ``down`` are the bytes to it and from it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self.up, self.down = bytearray(), bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink, keep in ((near, far, self.up), (far, near, self.down)):
                threading.Thread(target=self._pump, args=(source, sink, keep.extend), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, keep: Callable[[bytes], None]) -> None:
        try:
            while data := source.recv(1 << 16):
                keep(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def close(self) -> None:
        self._listener.close()

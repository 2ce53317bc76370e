"""Taking the status page's port: before there is a run folder, so that no run fails hours in for its sake."""

from __future__ import annotations

import socket

from common.errors import ConfigError
from common.rpc.addresses import Address, parse_address

__all__ = ["SETTING", "listen"]

SETTING = "monitoring.status"
_BACKLOG = 64


def listen(text: str) -> tuple[socket.socket, Address]:
    """A socket that listens, and the address it has: whoever connects waits until somebody serves.

    Raises
    ------
    ConfigError
        ``text`` is no host:port, or it cannot be bound.
    """
    asked = parse_address(text, setting=SETTING)
    listener = socket.socket(socket.AF_INET6 if ":" in asked.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((asked.host, asked.port))
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        raise ConfigError(
            f"{SETTING} = {text!r} cannot be bound: {problem.strerror or problem}. Choose another port; port 0 takes "
            'any that is free, and "" leaves the status page out'
        ) from None
    listener.setblocking(False)
    return listener, Address(asked.host, listener.getsockname()[1])

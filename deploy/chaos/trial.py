"""Tries a backend in a process of its own: makes a network of one link, does each thing to it, and ends.

Run as ``python -m deploy.chaos.trial NAME``; prints one JSON line: what it can do, and for what it cannot the reason.
Whatever it made ends with it.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from common.errors import RunFailed
from deploy.chaos.backend import BACKENDS, CLEAR, PS, Conditions
from deploy.chaos.bridge import BridgeBackend
from deploy.chaos.star import PORT

__all__ = ["main"]

PEER = "client-0"
TRIED: Mapping[str, Conditions] = {
    "delay": Conditions(delay_s=0.001),
    "jitter": Conditions(delay_s=0.001, jitter_s=0.001),
    "loss": Conditions(loss=0.01),
    "duplication": Conditions(duplication=0.01),
    "reordering": Conditions(delay_s=0.001, reordering=0.01),
    "rate": Conditions(rate_bytes_s=1e6),
    "cut": Conditions(cut=True),
    "refuse": Conditions(refuse=True),
}
WAIT_S = 2.0


def main() -> None:
    module, _, attribute = BACKENDS[sys.argv[1]].partition(":")
    backend: BridgeBackend = getattr(importlib.import_module(module), attribute)()
    found: dict[str, Any] = {"problem": None, "capabilities": [], "reasons": {}}
    try:
        backend.open([PEER])
        for name, attempt in _attempts(backend).items():
            try:
                attempt()
            except (RunFailed, OSError) as problem:
                found["reasons"][name] = str(problem)
            else:
                found["capabilities"].append(name)
    except (RunFailed, OSError) as problem:
        found["problem"] = str(problem)
    finally:
        backend.close()
    if not found["capabilities"] and found["problem"] is None:
        found["problem"] = next(iter(found["reasons"].values()))
    sys.stdout.write(json.dumps(found) + "\n")


def _attempts(backend: BridgeBackend) -> dict[str, Callable[[], None]]:
    attempts: dict[str, Callable[[], None]] = {"reset": partial(_try_reset, backend)}
    for name, conditions in TRIED.items():
        attempts[name] = partial(backend.shape, PEER, conditions, CLEAR)
    return attempts


def _try_reset(backend: BridgeBackend) -> None:
    """On a connection, since a kernel that cannot do it says nothing."""
    with backend.star.inside(PS):
        listener = socket.create_server((backend.star.ip(PS), PORT))
    with backend.star.inside(PEER):
        near = socket.create_connection((backend.star.ip(PS), PORT), timeout=WAIT_S)
    far, _ = listener.accept()
    far.settimeout(WAIT_S)
    with listener, near, far:
        backend.reset(PEER)
        for side in (near, far):
            try:
                side.recv(1)
            except TimeoutError:
                raise RunFailed("ss -K resets no connection: this kernel is built without INET_DIAG_DESTROY") from None
            except OSError:
                continue  # reset


if __name__ == "__main__":
    main()

"""The backend that needs no rights: a TCP proxy on loopback, see :mod:`deploy.chaos.forwarding` for what it can do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import RunFailed
from deploy.chaos import forwarding
from deploy.chaos.backend import PS, Conditions, Placement
from deploy.chaos.helper_process import HelperProcess

__all__ = ["ProxyBackend"]


class ProxyBackend:
    """Each peer dials an address of its own, behind which the proxy process forwards to the parameter server."""

    name = "proxy"
    capabilities = frozenset({"delay", "jitter", "rate", "cut", "refuse", "reset"})

    def __init__(self) -> None:
        self._process: HelperProcess | None = None
        self._addresses: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """The proxy's process; None unless it is open."""
        return None if self._process is None else self._process.pid

    def probe(self) -> str | None:
        try:
            forwarding.bound(0).close()
        except OSError as problem:
            return f"no port can be bound on loopback: {problem}"
        return None

    def open(self, peers: Sequence[str]) -> None:
        with forwarding.bound(0) as server:  # free again at once, and nobody else is given it
            host, port = server.getsockname()
        self._process = HelperProcess(Path(forwarding.__file__), "the proxy")
        ports = self._ask("open", target=[host, port], peers=list(peers))["ports"]
        self._addresses = {PS: f"{host}:{port}"} | {peer: f"{host}:{ports[peer]}" for peer in peers}

    def placement(self, process: str) -> Placement:
        return Placement(self._addresses[process])

    def shape(self, peer: str, up: Conditions, down: Conditions) -> None:
        self._ask("shape", peer=peer, up=asdict(up), down=asdict(down))

    def reset(self, peer: str) -> int:
        return int(self._ask("reset", peer=peer)["count"])

    def facts(self) -> Mapping[str, str]:
        facts = {"network": "a TCP proxy on loopback"}
        with contextlib.suppress(OSError):
            control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
            facts["congestion control"] = control
        return facts

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._process is None:
            raise RunFailed("the proxy is not open")
        return self._process.ask(op, **arguments)

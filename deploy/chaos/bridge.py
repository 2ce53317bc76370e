"""What the backends that disturb packets have in common: namespaces on a bridge, and what is done to connections."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from common.errors import RunFailed
from deploy.chaos.backend import CAPABILITIES, CLEAR, PS, Conditions, Placement
from deploy.chaos.star import PORT, Star

__all__ = ["BridgeBackend", "Trial", "queue_bytes", "tbf"]

TRIAL_S = 60.0  # it takes a second; a busy machine more
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "ss": "iproute2", "nft": "nftables"}
QUEUE_S, LEAST_QUEUE_BYTES = 0.25, 16 * 1514
BURST_S, LEAST_BURST_BYTES = 0.03, 2 * 1514  # what may pass at once, so that a late timer loses nothing


@dataclass(frozen=True)
class Trial:
    """What a backend could do on this machine when it was tried; ``problem``: why it can do nothing."""

    problem: str | None = None
    capabilities: frozenset[str] = frozenset()


class BridgeBackend(ABC):
    """The parts of a backend that do not depend on who delays packets; see :mod:`deploy.chaos.backend`.

    A subclass says what it needs, and disturbs a link's two directions.
    """

    name: str
    tools: Sequence[str]

    def __init__(self) -> None:
        self._star: Star | None = None
        self._shapes: dict[str, tuple[Conditions, Conditions]] = {}
        self._refusing: frozenset[str] = frozenset()

    @cached_property
    def trial(self) -> Trial:
        """What it can do here, found out by doing it in a process that then ends."""
        missing = [tool for tool in self.tools if shutil.which(tool) is None]
        if missing:
            packages = sorted({PACKAGES[tool] for tool in missing})
            return Trial(f"needs the command {missing[0]} (Debian: {' '.join(packages)})")
        try:
            done = subprocess.run(  # noqa: S603 - our own program
                [sys.executable, "-P", "-m", "deploy.chaos.trial", self.name],
                capture_output=True,
                text=True,
                timeout=TRIAL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return Trial(f"could not be tried: {problem}")
        if done.returncode:
            return Trial(f"could not be tried: {' '.join(done.stderr.split())[-300:]}")
        found = json.loads(done.stdout)
        return Trial(found["problem"], frozenset(found["capabilities"]))

    @property
    def capabilities(self) -> frozenset[str]:
        """All of them while :meth:`probe` has a reason why there are none."""
        return frozenset(CAPABILITIES) if self.trial.problem else self.trial.capabilities

    def probe(self) -> str | None:
        return self.trial.problem

    def open(self, peers: Sequence[str]) -> None:
        self._star = Star(peers)
        self._shapes = dict.fromkeys(peers, (CLEAR, CLEAR))
        self._begin()

    def placement(self, process: str) -> Placement:
        return Placement(f"{self.star.ip(PS)}:{PORT}", self.star.path(process))

    def shape(self, peer: str, up: Conditions, down: Conditions) -> None:
        if self._shapes[peer] == (up, down):
            return
        self._shapes.pop(peer)  # whatever it will be if this fails
        self._refuse(peer, refuse=up.refuse)
        self._disturb(peer, up, down)
        self._shapes[peer] = (up, down)

    def reset(self, peer: str) -> int:
        here, there = self.star.ip(PS), self.star.ip(peer)
        killed = self.star.run(peer, "ss", "-H", "-n", "-t", "-K", "dst", here)
        self.star.run(PS, "ss", "-H", "-n", "-t", "-K", "dst", there)  # what a cut line does not tell it
        return len(killed.splitlines())

    def facts(self) -> Mapping[str, str]:
        facts = {
            "network": "network namespaces on a bridge",
            "emulation": self._emulation(),
            "congestion control": self.star.congestion_control,
        }
        if lacking := ", ".join(name for name in CAPABILITIES if name not in self.capabilities):
            facts["not possible here"] = lacking
        return facts

    def close(self) -> None:
        star, self._star = self._star, None
        self._shapes, self._refusing = {}, frozenset()
        if star is not None:
            star.close()

    @property
    def star(self) -> Star:
        if self._star is None:
            raise RunFailed(f"the backend {self.name} is not open")
        return self._star

    @abstractmethod
    def _begin(self) -> None:
        """What there is to do once, when there is a clear network."""

    @abstractmethod
    def _disturb(self, peer: str, up: Conditions, down: Conditions) -> None:
        """Put a link into a state, but for ``refuse``."""

    @abstractmethod
    def _emulation(self) -> str:
        """Who delays packets, in few words."""

    def _refuse(self, peer: str, *, refuse: bool) -> None:
        """At the parameter server's door, so that a refusal takes its time on the line too."""
        refusing = self._refusing | {peer} if refuse else self._refusing - {peer}
        if refusing == self._refusing:
            return
        lines = [
            "add table ip lab",
            "add set ip lab refused { type ipv4_addr; }",
            "add chain ip lab arriving { type filter hook input priority 0; }",
            "flush chain ip lab arriving",
            "add rule ip lab arriving ip saddr @refused tcp flags & (syn | ack) == syn reject with tcp reset",
            "flush set ip lab refused",
        ]
        lines += [f"add element ip lab refused {{ {self.star.ip(name)} }}" for name in sorted(refusing)]
        self.star.run(PS, "nft", "-f", "-", text="\n".join(lines) + "\n")
        self._refusing = refusing


def queue_bytes(rate: float) -> int:
    """The room before a narrow place, in bytes: a quarter of a second's worth."""
    return max(LEAST_QUEUE_BYTES, int(rate * QUEUE_S))


def tbf(rate: float) -> list[str]:
    """The arguments of a token bucket that lets so many bytes pass in a second."""
    burst = max(LEAST_BURST_BYTES, int(rate * BURST_S))
    return ["tbf", "rate", f"{max(1, round(rate))}bps", "burst", str(burst), "limit", str(queue_bytes(rate))]

"""The backend for kernels without ``sch_netem``: namespaces, nftables, ``tbf``, and an emulator in userspace.

A link starts as a pair of virtual devices, at the kernel's full speed. Loss and cuts are rules where its packets
arrive, a rate is a token bucket where they leave. The first time that it needs a delay or anything else that a packet
must wait for, the link is led through the emulator (:mod:`deploy.chaos.emulator`), which it then stays on::

    eth0 ── v<k> ── b<k> ── n<k> ═ emulator ═ f<k> ── br0

From then on the emulator also does what is lost there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from deploy.chaos import emulator
from deploy.chaos.backend import CLEAR, Conditions
from deploy.chaos.bridge import BridgeBackend, tbf
from deploy.chaos.helper_process import HelperProcess
from deploy.chaos.star import HUB

__all__ = ["NetnsBackend"]

EMULATED = frozenset({"delay", "jitter", "duplication", "reordering"})
OUT_OF = 1_000_000_000  # a loss is drawn as an integer below
TAP_QUEUE_FRAMES = 10_000  # what may come while the emulator waits for a processor


class NetnsBackend(BridgeBackend):
    """Everything, on any kernel with namespaces, bridges, TAP devices, nftables and ``tbf``."""

    name = "netns"
    tools = ("ip", "tc", "ss", "nft")

    def __init__(self) -> None:
        super().__init__()
        self._emulator: HelperProcess | None = None
        self._emulated: set[str] = set()
        self._filters: dict[tuple[str, str], str] = {}  # by namespace and device, as the kernel has them
        self._rates: dict[tuple[str, str], float] = {}

    def counts(self, peer: str) -> Mapping[str, Mapping[str, int]]:
        """What the emulator did to a link that goes through it, by direction: see :class:`emulator.Counts`."""
        return self._helper.ask("counts", name=peer)

    def close(self) -> None:
        helper, self._emulator = self._emulator, None
        self._emulated, self._filters, self._rates = set(), {}, {}
        if helper is not None:
            helper.close()
        super().close()

    def _begin(self) -> None:
        with self.star.inside(HUB):
            self._emulator = HelperProcess(Path(emulator.__file__), "the packet emulator")

    def _emulation(self) -> str:
        return "nftables, tbf, and a packet emulator in userspace"

    def _disturb(self, peer: str, up: Conditions, down: Conditions) -> None:
        port = self.star.port_device(peer)
        if (up.needs() | down.needs()) & EMULATED and peer not in self._emulated:
            self._lead_through_emulator(peer)
        lossy = peer not in self._emulated
        self._filter(HUB, port, up, lossy=lossy)
        self._filter(peer, "eth0", down, lossy=lossy)
        self._limit(peer, "eth0", up.rate_bytes_s)
        self._limit(HUB, port, down.rate_bytes_s)
        if peer in self._emulated:
            self._helper.ask("shape", name=peer, up=asdict(up), down=asdict(down))

    def _lead_through_emulator(self, peer: str) -> None:
        port, number = self.star.port_device(peer), self.star.number(peer)
        near, far, bridge = f"n{number}", f"f{number}", f"b{number}"
        self._helper.ask("line", name=peer, near=near, far=far)
        self._helper.ask("shape", name=peer, up=asdict(CLEAR), down=asdict(CLEAR))
        self.star.batch(
            HUB,
            [
                f"link add {bridge} type bridge",
                f"link set {bridge} up",
                f"link set {near} txqueuelen {TAP_QUEUE_FRAMES} master {bridge} up",
                f"link set {far} txqueuelen {TAP_QUEUE_FRAMES} master br0 up",
                f"link set {port} master {bridge}",
            ],
        )
        self._emulated.add(peer)

    def _filter(self, space: str, device: str, conditions: Conditions, *, lossy: bool) -> None:
        """What does not arrive at a device; all of it changes at once."""
        verdict = ""
        if conditions.cut:
            verdict = "drop"
        elif lossy and conditions.loss:
            verdict = f"numgen random mod {OUT_OF} < {round(conditions.loss * OUT_OF)} drop"
        if verdict == self._filters.get((space, device), ""):
            return
        chain = f"netdev lab {device}"
        lines = [
            "add table netdev lab",
            f'add chain {chain} {{ type filter hook ingress device "{device}" priority 0; }}',
            f"flush chain {chain}",
        ]
        if verdict:
            lines.append(f"add rule {chain} {verdict}")
        self.star.run(space, "nft", "-f", "-", text="\n".join(lines) + "\n")
        self._filters[space, device] = verdict

    def _limit(self, space: str, device: str, rate: float | None) -> None:
        before = self._rates.get((space, device))
        if rate == before:
            return
        if rate is None:
            self.star.run(space, "tc", "qdisc", "del", "dev", device, "root")
            del self._rates[space, device]
        else:
            self.star.run(space, "tc", "qdisc", "replace", "dev", device, "root", *tbf(rate))
            self._rates[space, device] = rate

    @property
    def _helper(self) -> HelperProcess:
        _ = self.star  # says so when it is not open
        assert self._emulator is not None  # noqa: S101 - they come and go together
        return self._emulator

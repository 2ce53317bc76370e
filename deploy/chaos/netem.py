"""The backend for kernels with ``sch_netem``: namespaces on a bridge, each device with a ``netem`` of its own.

What a peer sends passes the ``netem`` of its own device, what it receives that of its port at the bridge; a rate is a
token bucket behind it. ``netem`` lets packets with different delays overtake each other, except when it also has a
rate: then each waits for the one before it. So where order is to be kept it is given a rate that nobody will notice.
"""

from __future__ import annotations

from common.errors import RunFailed
from deploy.chaos.backend import CLEAR, Conditions
from deploy.chaos.bridge import BridgeBackend, tbf
from deploy.chaos.star import HUB

__all__ = ["NetemBackend", "netem"]

QUEUE_PACKETS = 50_000  # 75 MB
UNNOTICED_RATE = "10gbit"


class NetemBackend(BridgeBackend):
    """All disturbances of packets by the kernel itself; connections are refused and reset where it can do that."""

    name = "netem"
    tools = ("ip", "tc", "ss")

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[tuple[str, str], Conditions] = {}  # by namespace and device, as the kernel has them

    def close(self) -> None:
        self._states = {}
        super().close()

    def _begin(self) -> None:
        """One ``netem`` for each direction that there will ever be, so that a change never loses what is waiting."""
        for peer in self.star.peers:
            for end in self._ends(peer):
                try:
                    self._tc("add", *end, "root", "handle", "1:", *netem(CLEAR))
                except RunFailed as problem:
                    raise RunFailed(f"this kernel has no netem (sch_netem): {problem}") from None

    def _emulation(self) -> str:
        return "netem of the kernel"

    def _disturb(self, peer: str, up: Conditions, down: Conditions) -> None:
        for end, conditions in zip(self._ends(peer), (up, down), strict=True):
            before = self._states.get(end, CLEAR)
            if conditions.rate_bytes_s != before.rate_bytes_s:
                self._limit(*end, conditions.rate_bytes_s)
            if (arguments := netem(conditions)) != netem(before):
                self._tc("change", *end, "root", "handle", "1:", *arguments)
            self._states[end] = conditions

    def _ends(self, peer: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and device at which each direction leaves."""
        return (peer, "eth0"), (HUB, self.star.port_device(peer))

    def _limit(self, space: str, device: str, rate: float | None) -> None:
        if rate is None:
            self._tc("del", space, device, "parent", "1:1")
        else:
            self._tc("replace", space, device, "parent", "1:1", "handle", "2:", *tbf(rate))

    def _tc(self, verb: str, space: str, device: str, *arguments: str) -> None:
        self.star.run(space, "tc", "qdisc", verb, "dev", device, *arguments)


def netem(conditions: Conditions) -> list[str]:
    """The arguments of ``tc`` for everything but the rate. They say everything, since a change keeps what is unsaid."""
    loss = 1.0 if conditions.cut else conditions.loss
    arguments = ["netem", "limit", str(QUEUE_PACKETS), "delay", _microseconds(conditions.delay_s)]
    if conditions.jitter_s:
        arguments.append(_microseconds(conditions.jitter_s))
    arguments += ["loss", _percent(loss), "duplicate", _percent(conditions.duplication)]
    if conditions.reordering and conditions.delay_s:  # else there is nothing to overtake
        arguments += ["reorder", _percent(conditions.reordering)]
    in_order = bool(conditions.jitter_s) and not conditions.reordering
    return [*arguments, "rate", UNNOTICED_RATE if in_order else "0bit"]


def _microseconds(seconds: float) -> str:
    return f"{round(seconds * 1e6)}us"


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.7f}%"

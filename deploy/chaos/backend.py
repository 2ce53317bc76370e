"""What a network backend of the fault lab is, and how one is chosen.

The network of a run is a star: the parameter server in the middle, and one *link* to each of its peers, the processes
``client-0``, ``client-1``, …, ``adversary``. A link is named by its peer, and has two directions: ``up`` is what the
peer sends to the parameter server, ``down`` what it receives. A backend can do two things to a link:

* :meth:`Backend.shape` sets the :class:`Conditions` of both directions. They are a state, not an event: each call says
  everything about the link, and replaces what was said before; :data:`CLEAR` twice heals it.
* :meth:`Backend.reset` is an event: the connections that exist now are reset, new ones are none the wiser.

What several faults make of one link together is not a backend's business: :func:`combined` has been applied before.
Faults of processes (a kill, a stop, a clock) need no backend at all.

The life of a backend
---------------------
One object serves one ``byzuldp chaos`` command, which runs the federation twice (undisturbed and disturbed), so in
this order, all in the command's main thread:

``probe``
    Before anything else, on every backend. Answers in a second, leaves nothing behind, and raises nothing.
``open(peers)``
    Once, before any other process of the run exists and while this process has a single thread, so a backend may call
    ``unshare`` here, and everything that is started later is born inside. Whatever it makes it must be able to take
    away again: names carry the process id, so that two labs on a machine do not meet.
``placement(process)``
    Any number of times: where the parameter server listens, and where a peer dials and lives. The answer for one name
    never changes, since the parameter server is killed and started again at the same address.
``shape``, ``reset``
    Any number of times, while processes come and go. They return once the network is in that state: what is sent
    afterwards meets the new conditions. They take milliseconds, for the timeline waits for them.
``close``
    Once at least, also after an ``open`` that failed half-way and after Ctrl-C. Ends what ``open`` started and takes
    everything away; a second call does nothing. If this process is killed instead, what was made must not outlive it
    for long: let helpers end at the end of file of a pipe that only this process holds.

A backend that cannot go on (its helper died, a command failed) raises :class:`common.errors.RunFailed` from the call
that noticed, with the command and what it said.

To write one: a class with these methods in a module of its own, and a line in :data:`BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError

__all__ = [
    "BACKENDS",
    "CAPABILITIES",
    "CLEAR",
    "PS",
    "Backend",
    "Choice",
    "Conditions",
    "Placement",
    "choose_backend",
    "combined",
]

PS = "ps"

CAPABILITIES = ("delay", "jitter", "loss", "duplication", "reordering", "rate", "cut", "refuse", "reset")
"""Everything that may be asked of a link. All but ``reset`` are fields of :class:`Conditions`."""

BACKENDS: Mapping[str, str] = {
    "proxy": "deploy.chaos.proxy:ProxyBackend",
    "netns": "deploy.chaos.netns:NetnsBackend",
    "netem": "deploy.chaos.netem:NetemBackend",
}
"""``module:class`` by name, in the order in which ``auto`` tries them: from the least to the most it asks for."""


@dataclass(frozen=True)
class Conditions:
    """What happens to everything that travels in one direction of a link.

    "A unit" is whatever the backend forwards at a time: a packet, or what a proxy read from a socket.

    Attributes
    ----------
    delay_s
        Added to the travel of each unit, in seconds.
    jitter_s
        The delay of a unit is uniform in ``delay_s ± jitter_s``, never negative, independently drawn. A backend that
        forwards a byte stream keeps its order; one that forwards packets keeps their order too, unless ``reordering``
        is asked for.
    loss
        Fraction of the units that vanish, independently, in [0, 1].
    duplication
        Fraction of the units that arrive twice, in [0, 1].
    reordering
        Fraction of the units that overtake those before them, in [0, 1]: such a unit is not delayed. It needs a delay
        to overtake.
    rate_bytes_s
        What may pass per second, in bytes; None: no limit. A sender that is faster is slowed by its own flow control
        or by a full queue, as the backend's link would do it; nobody holds more than about a second's worth.
    cut
        Nothing passes, and nothing is said: no reset, no refusal, no end of stream. Connections that exist stay open
        on both sides for as long as their ends believe in them, and go on if the cut heals before that. A connection
        begun meanwhile does not come about, or not before the cut heals: cutting one direction is enough for that.
    refuse
        New connections are answered by "connection refused"; those that exist are left alone. Only ``up`` may have it.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    rate_bytes_s: float | None = None
    cut: bool = False
    refuse: bool = False

    def needs(self) -> frozenset[str]:
        """The capabilities that a backend needs for this."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return frozenset(name.removesuffix("_bytes_s").removesuffix("_s") for name in changed)


CLEAR = Conditions()


def combined(several: Iterable[Conditions]) -> Conditions:
    """What faults that hold at the same time make of a direction, as if one came after the other.

    Delays and jitters add up; of what one lets pass the next takes its share; the narrowest rate counts.
    """
    result = CLEAR
    for other in several:
        rates = [rate for rate in (result.rate_bytes_s, other.rate_bytes_s) if rate is not None]
        result = Conditions(
            delay_s=result.delay_s + other.delay_s,
            jitter_s=result.jitter_s + other.jitter_s,
            loss=1 - (1 - result.loss) * (1 - other.loss),
            duplication=1 - (1 - result.duplication) * (1 - other.duplication),
            reordering=1 - (1 - result.reordering) * (1 - other.reordering),
            rate_bytes_s=min(rates, default=None),
            cut=result.cut or other.cut,
            refuse=result.refuse or other.refuse,
        )
    return result


@dataclass(frozen=True)
class Placement:
    """Where a process lives in the network. Plain values: they travel to the process.

    Attributes
    ----------
    address
        ``host:port``, numeric. For :data:`PS` the one to listen at: a fixed port, free in the place where it lives,
        and outside the range of ports that the system gives to outgoing connections, or one of those could take it
        while the parameter server is dead. For a peer the one to dial, which need not be the same.
    netns
        The network namespace to enter, as a path to give to ``setns`` (``/run/netns/NAME``, ``/proc/PID/ns/net``),
        valid in the namespaces that ``open`` left this process in. A process enters it before it does anything else.
        None: it stays where this process is.
    """

    address: str
    netns: Path | None = None


class Backend(Protocol):
    """One way to disturb links; see this module's text for who calls what when.

    Attributes
    ----------
    name
        As in :data:`BACKENDS`.
    capabilities
        What it can do to a link, of :data:`CAPABILITIES`. It is never asked for anything else.
    """

    name: str
    capabilities: frozenset[str]

    def probe(self) -> str | None:
        """None when it would work here and now, else one line that says what is missing: a right, a module, a tool."""

    def open(self, peers: Sequence[str]) -> None:
        """Make the network: a clear link between ``ps`` and each of ``peers``.

        Raises
        ------
        RunFailed
            It could not be made; what was made is taken away by ``close``.
        """

    def placement(self, process: str) -> Placement:
        """Where ``ps`` or a peer lives."""

    def shape(self, peer: str, up: Conditions, down: Conditions) -> None:
        """Put a link into a state."""

    def reset(self, peer: str) -> int:
        """Reset the link's present connections, both ends; returns how many there were."""

    def facts(self) -> Mapping[str, str]:
        """What a reader of the report should know of this network (the congestion control, who emulates what), in
        few words each; asked for after ``open``."""

    def close(self) -> None:
        """Take everything away."""


@dataclass(frozen=True)
class Choice:
    """A chosen backend, and what became of the others (name to reason)."""

    backend: Backend
    passed_over: Mapping[str, str]


def choose_backend(wanted: str, needed: frozenset[str]) -> Choice:
    """The backend that is asked for, or with ``auto`` the first that can do everything needed and works here.

    Parameters
    ----------
    wanted
        A name of :data:`BACKENDS`, or ``auto``.
    needed
        Capabilities that the scenario needs.

    Raises
    ------
    ConfigError
        There is none. The message says for each why not; a fault is never left out silently.
    """
    if wanted != "auto" and wanted not in BACKENDS:
        raise ConfigError(f"--backend {wanted}: expected auto or one of {', '.join(BACKENDS)}")
    passed_over: dict[str, str] = {}
    for name in BACKENDS if wanted == "auto" else (wanted,):
        backend, reason = _usable(name, needed)
        if backend is not None:
            return Choice(backend, passed_over)
        passed_over[name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    if wanted == "auto":
        raise ConfigError(f"no backend can run this scenario here: {why}")
    able = [name for name in BACKENDS if name != wanted and _usable(name, needed)[0] is not None]
    remedy = f"use --backend {able[0]}" if able else "no other backend can do it here either; leave those faults out"
    raise ConfigError(f"this scenario cannot run on the backend {why}; {remedy}")


def _usable(name: str, needed: frozenset[str]) -> tuple[Backend | None, str]:
    module, _, attribute = BACKENDS[name].partition(":")
    if find_spec(module) is None:
        return None, "is not part of this installation"
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    if lacking := [capability for capability in CAPABILITIES if capability in needed - backend.capabilities]:
        return None, f"cannot do {', '.join(lacking)}"
    problem = backend.probe()
    return (None, problem) if problem else (backend, "")

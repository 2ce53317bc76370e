"""Doing faults to links, processes and the disk, and undoing them.

A link's conditions are worked out anew from all faults that hold, so that overlapping ones add up and each may end
before or after the other.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from typing import Protocol

from deploy.chaos.backend import CLEAR, Backend, Conditions, combined
from deploy.chaos.clocks import Clocks
from deploy.chaos.disk import SmallDisk
from deploy.chaos.faults import Clock, DiskFull, Kill, LinkFault, Restart, Squeeze, Stop
from deploy.chaos.life import Life
from deploy.chaos.plan import Plan
from deploy.chaos.squeezing import Squeezer
from deploy.chaos.timeline import Occurrence, Timeline

__all__ = ["Cast", "Inflictor"]

_STILL = (CLEAR, CLEAR)


class Cast(Protocol):
    """Who is there to be disturbed."""

    def living(self, name: str) -> Life | None:
        """The process of that name, unless there is none at present."""

    def revive(self, name: str) -> None:
        """Start a process again as soon as it is dead; nothing if it lives on."""


class Inflictor:
    """Carries out what the timeline says.

    Parameters
    ----------
    disk
        The run folder's own file system, where the scenario needs one.

    Attributes
    ----------
    met_full_disk
        Lives of the parameter server during which its disk was full.
    """

    def __init__(
        self, plan: Plan, timeline: Timeline, backend: Backend, cast: Cast, clocks: Clocks, disk: SmallDisk | None
    ) -> None:
        self._plan, self._timeline, self._backend, self._cast = plan, timeline, backend, cast
        self._clocks, self._disk = clocks, disk
        self.met_full_disk: set[Life] = set()
        self._squeezer = Squeezer()
        self._shapes: dict[str, tuple[Conditions, Conditions]] = {}
        self._killed: dict[Occurrence, list[str]] = {}

    @property
    def disk_is_full(self) -> bool:
        return any(isinstance(item.fault, DiskFull) for item in self._timeline.holding)

    def begin(self, item: Occurrence) -> None:
        """Do what has become due.

        Raises
        ------
        RunFailed
            The backend cannot go on.
        """
        match item.fault:
            case LinkFault(do="reset"):
                peers = dict.fromkeys(peer for peer, _ in self._plan.links(item.fault))
                count = sum(self._backend.reset(peer) for peer in peers)
                item.note(f"{count} connection{'s' if count != 1 else ''}")
            case LinkFault():
                self._shape()
            case Kill():
                self._killed[item] = [life.name for life in self._victims(item) if self._end_life(life)]
            case Restart():
                for life in self._victims(item):
                    self._end_life(life)
                    self._cast.revive(life.name)
            case Stop():
                for life in self._victims(item):
                    life.send(signal.SIGSTOP)
            case Squeeze():
                for life in self._victims(item, quietly=item.at.unit == "start"):
                    self._squeeze(item, life)
            case Clock():
                self._set_clocks(item)
            case DiskFull():
                self.met_full_disk.update(self._living(item))
                if self._disk is not None:
                    item.note(f"{self._disk.fill() / 1e6:.1f} of {self._disk.size_mb} MB taken")

    def end(self, item: Occurrence) -> None:
        """Undo what is over; ``item`` does not hold any more."""
        match item.fault:
            case LinkFault():
                self._shape()
            case Kill():
                for name in self._killed.pop(item, []):
                    if not any(name in names for names in self._killed.values()):
                        self._cast.revive(name)
            case Stop():
                for life in self._living(item):
                    if not self._still(Stop, life.name):
                        life.send(signal.SIGCONT)
            case Squeeze():
                for life in self._living(item):
                    self._squeezer.release(life.pid)
                    self._squeeze_again(life)
            case Clock():
                self._set_clocks(item)
            case DiskFull():
                if self._disk is not None and not self.disk_is_full:
                    self._disk.free()

    def born(self, life: Life) -> None:
        """A process has been started: faults of its name that hold are done to it too."""
        self._squeeze_again(life)

    def heal(self) -> None:
        """Undo whatever still holds."""
        for peer, shape in list(self._shapes.items()):
            if shape != _STILL:
                self._backend.shape(peer, *_STILL)
        self._shapes.clear()
        if self._disk is not None:
            self._disk.free()
        self._squeezer.close()
        for name in self._plan.names:
            if (life := self._cast.living(name)) is not None:
                life.send(signal.SIGCONT)

    # ---------------------------------------------------------------- links

    def _shape(self) -> None:
        held: dict[tuple[str, str], list[Conditions]] = {}
        for item in self._timeline.holding:
            if isinstance(item.fault, LinkFault):
                for end in self._plan.links(item.fault):
                    held.setdefault(end, []).append(item.fault.conditions())
        for peer in self._plan.peers:
            shape = combined(held.get((peer, "up"), ())), combined(held.get((peer, "down"), ()))
            if shape != self._shapes.get(peer, _STILL):
                self._backend.shape(peer, *shape)
                self._shapes[peer] = shape

    # ---------------------------------------------------------------- processes

    def _living(self, item: Occurrence) -> Iterable[Life]:
        for name in self._plan.processes(item.fault):
            if (life := self._cast.living(name)) is not None:
                yield life

    def _victims(self, item: Occurrence, *, quietly: bool = False) -> list[Life]:
        """Those of the fault's processes that are there; the others are noted."""
        living = list(self._living(item))
        there = {life.name for life in living}
        absent = [name for name in self._plan.processes(item.fault) if name not in there]
        if absent and not quietly:
            item.note(f"not running: {', '.join(absent)}")
        return living

    @staticmethod
    def _end_life(life: Life) -> bool:
        life.by_lab = True
        return life.send(signal.SIGKILL)

    def _still(self, kind: type, name: str) -> bool:
        return any(
            isinstance(item.fault, kind) and name in self._plan.processes(item.fault) for item in self._timeline.holding
        )

    def _squeeze(self, item: Occurrence, life: Life) -> None:
        if isinstance(item.fault, Squeeze):
            with contextlib.suppress(ProcessLookupError):  # it has just died
                item.note(self._squeezer.squeeze(life.pid, item.fault.share))

    def _squeeze_again(self, life: Life) -> None:
        for item in self._timeline.holding:
            if isinstance(item.fault, Squeeze) and life.name in self._plan.processes(item.fault):
                self._squeeze(item, life)

    def _set_clocks(self, item: Occurrence) -> None:
        for name in self._plan.processes(item.fault):
            jumps = (
                held.fault.jump_s
                for held in self._timeline.holding
                if isinstance(held.fault, Clock) and name in self._plan.processes(held.fault)
            )
            self._clocks.set(name, sum(jumps))

"""Plays one run: its processes, and the timeline of what is done to them.

Where the launcher (:mod:`deploy.supervisor`) ends a run whose parameter server dies, the conductor expects that: what
it killed it starts again when the timeline says so, at the same address and from what the process had written down,
while all others live on. An end that it did not cause is remembered, and judged later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from common.config import Experiment
from common.errors import Interrupted, RunFailed, RunFolderExists, StoreProblem, leaves
from common.rpc.addresses import parse_address
from deploy.chaos.backend import PS, Backend, Placement
from deploy.chaos.clocks import Clocks
from deploy.chaos.disk import SmallDisk
from deploy.chaos.inflicting import Inflictor
from deploy.chaos.life import Life
from deploy.chaos.plan import Plan
from deploy.chaos.recorder import recording_file
from deploy.chaos.roles import LAB_ROLES
from deploy.chaos.timeline import Occurrence, Timeline
from deploy.children import Assignment
from deploy.events import Event
from deploy.local import assign
from deploy.processes import woken_by_signals
from deploy.supervisor import Onlooker

__all__ = ["FINAL", "Conductor", "End", "Played"]

FINAL = ("completed", "budget_exhausted", "quorum_lost", "interrupted")
"""Statuses with which a parameter server ends of its own accord and in good order."""

TICK_S = 0.2
CHECK_S, START_S = 900.0, 180.0
HEAR_S, TERMINATE_S, KILL_S = 5.0, 5.0, 3.0

Context = ForkServerContext | SpawnContext


@dataclass(frozen=True)
class End:
    """How one life of a process ended.

    Attributes
    ----------
    how
        As :attr:`deploy.chaos.life.Life.how` says.
    by_lab
        The lab killed it, or asked it to end after the run was over.
    """

    name: str
    how: str
    status: str | None
    by_lab: bool
    description: str


@dataclass(frozen=True)
class Played:
    """What became of a run.

    Attributes
    ----------
    seconds
        From the clients' start to the parameter server's end.
    restarts
        How often each process was started again.
    """

    status: str
    message: str
    run_dir: Path
    seconds: float
    restarts: Mapping[str, int]
    ends: tuple[End, ...]
    timeline: tuple[Occurrence, ...]


class _Over(Exception):
    def __init__(self, status: str, message: str) -> None:
        self.status, self.message = status, message


class Conductor:
    """One run.

    Parameters
    ----------
    plan
        Who there is, and what is to happen; no faults for a run that is left alone.
    context
        Where ordinary processes come from; one whose clock will jump is always a new program.
    backend
        Open, and clear.
    entries
        ``module:function`` of each role, see :class:`deploy.children.Assignment`.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        plan: Plan,
        onlooker: Onlooker,
        context: Context,
        backend: Backend,
        *,
        deadline_s: float,
        disk_mb: int = 64,
        check: bool = True,
        entries: Mapping[str, str] = LAB_ROLES,
    ) -> None:
        self._run_dir, self._plan, self._onlooker = run_dir.absolute(), plan, onlooker
        self._context, self._backend, self._deadline_s, self._check = context, backend, deadline_s, check
        self._timeline = Timeline(plan.faults)
        self._disk_mb = disk_mb if plan.needs_disk else None
        address = backend.placement(PS).address
        # A network of the lab's own, which nothing else reaches, needs no encryption.
        insecure = experiment.network.insecure or not parse_address(address).is_loopback
        network = experiment.network.model_copy(update={"address": address, "insecure": insecure})
        # Nobody could look at a page in that network, and its loopback may be down.
        monitoring = experiment.monitoring.model_copy(update={"status": ""})
        changed = {"network": network, "monitoring": monitoring}
        parts = assign(experiment.model_copy(update=changed), run_dir, entries=entries)
        self._parts: dict[str, Assignment] = {part.name: part for part in parts}
        self._clocks = Clocks(run_dir.absolute().with_name(f"{run_dir.name}-clocks"), plan.clocks)
        self._lives: list[Life] = []
        self._current: dict[str, Life] = {}
        self._reviving: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._listening = False
        self._wiretap: str | None = None
        self._rounds = 0
        self._zero: float | None = None  # when the first round was done
        self._over: tuple[str, str] | None = None
        self._resume_when_healed = False
        self._wake = -1
        self._inflictor: Inflictor

    def play(self) -> Played:
        """From the first process's start to the last one's end.

        Raises
        ------
        RunFailed
            The backend, or the disk, cannot go on.
        Interrupted
            A signal asked for the end.
        """
        disk = self._lay_out()
        self._inflictor = Inflictor(self._plan, self._timeline, self._backend, self, self._clocks, disk)
        began_at = time.monotonic()
        try:
            with woken_by_signals() as self._wake:
                try:
                    began_at = self._start()
                    self._watch(lambda: False, began_at + self._deadline_s, "the run")
                except _Over as over:
                    self._over = over.status, over.message
                finally:
                    seconds = time.monotonic() - began_at
                    self._leave_nothing_behind()
        finally:
            if disk is not None:
                disk.close()
        status, message = self._over or ("failed", "the run did not end")
        ends = tuple(End(life.name, life.how, life.status, life.by_lab, life.describe_end()) for life in self._lives)
        return Played(status, message, self._run_dir, seconds, self._restarts, ends, tuple(self._timeline.occurrences))

    # ---------------------------------------------------------------- the cast

    def living(self, name: str) -> Life | None:
        life = self._current.get(name)
        return None if life is None or life.over else life

    def revive(self, name: str) -> None:
        if self._over is not None:
            return
        if self.living(name) is not None:
            self._reviving.add(name)  # it is about to die
            return
        self._restarts[name] = self._restarts.get(name, 0) + 1
        self._begin(name)
        self._onlooker.show({"event": "note", "message": f"{name} is started again"})

    def _begin(self, name: str) -> Life:
        part, again = self._parts[name], name in self._current
        # The check fetches what is missing, so it stays where the rest of the world is.
        placement = Placement("") if name == "check" else self._backend.placement(name)
        if part.role == "ps":
            part = replace(part, resume=again)
        elif part.role != "check":
            part = replace(part, address=placement.address, wiretap=self._wiretap)
        extra = self._clocks.environment(name)
        life = Life.begin(get_context("spawn") if extra else self._context, part, placement, extra)
        self._current[name] = life
        self._lives.append(life)
        self._inflictor.born(life)
        return life

    # ---------------------------------------------------------------- from the start

    def _lay_out(self) -> SmallDisk | None:
        """The run folder and its rooms, on a file system of its own where it is to be full."""
        for folder in (self._run_dir, recording_file(self._run_dir, PS).parent):
            if folder.exists() and any(folder.iterdir()):
                raise RunFolderExists(f"{folder}: is not empty; choose another --run-dir")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        disk = None if self._disk_mb is None else SmallDisk(self._run_dir, self._disk_mb)
        for private in ("operator", "clients"):
            (self._run_dir / private).mkdir(exist_ok=True)
            (self._run_dir / private).chmod(0o700)
        (self._run_dir / "operator" / "logs").mkdir(exist_ok=True)
        return disk

    def _start(self) -> float:
        """Start everything; returns when the peers were started."""
        if self._check:
            self._onlooker.show({"event": "note", "message": "loading PyTorch, checking the experiment"})
            checking = self._begin("check")
            self._watch(lambda: checking.over, time.monotonic() + CHECK_S, "checking the experiment")
        self._act()
        self._begin(PS)
        self._watch(lambda: self._listening, time.monotonic() + START_S, "starting the parameter server")
        for name in self._plan.peers:
            self._begin(name)
        return time.monotonic()

    def _watch(self, done: Callable[[], bool], give_up_at: float, doing: str) -> None:
        """Take in what happens, and act by the timeline, until ``done``.

        Raises
        ------
        _Over
            Something ended the run, or the time is over.
        """
        while True:
            if self._over is not None:
                raise _Over(*self._over)
            if done():
                return
            if time.monotonic() >= give_up_at:
                raise _Over(RunFailed.status, f"{doing}: not over in time; it was ended")
            wait = self._timeline.next_s(self._now())
            self._take_in(TICK_S if wait is None else min(TICK_S, wait))
            if self._over is None:
                self._act()

    def _now(self) -> float | None:
        return None if self._zero is None else time.monotonic() - self._zero

    def _act(self) -> None:
        """Do what the timeline says is due."""
        over, new = self._timeline.due(self._now(), self._rounds)
        for item in over:
            self._inflictor.end(item)
            self._tell(item, "over: ")
        for item in new:
            self._tell(item, "")
            self._inflictor.begin(item)
        if self._resume_when_healed and not self._inflictor.disk_is_full:
            self._resume_when_healed = False
            for name in self._plan.names:  # its clients had been told that the run had failed
                if self.living(name) is None and not self._current[name].by_lab:
                    self.revive(name)

    def _tell(self, item: Occurrence, prefix: str) -> None:
        detail = item.fault.detail()
        message = f"{prefix}{item.fault.do} on {', '.join(item.fault.on)}" + (f" ({detail})" if detail else "")
        self._onlooker.show({"event": "note", "message": f"round {self._rounds}: {message}"})

    # ---------------------------------------------------------------- taking in

    def _take_in(self, timeout: float) -> None:
        sources: dict[Any, Life | None] = {self._wake: None} if self._wake >= 0 else {}
        for life in self._lives:
            if not life.hung_up:
                sources[life.events] = life
            if not life.over:
                sources[life.process.sentinel] = life
        for ready in mp_connection.wait(list(sources), timeout):
            source = sources[ready]
            if source is None:
                number = os.read(self._wake, 4096)[0]
                raise Interrupted(f"{signal.Signals(number).name}; the runs so far are in {self._run_dir.parent}")
            if ready is source.events:
                self._hear(source)
            elif not source.over:
                self._noticed_end(source)
        self._onlooker.tick()

    def _hear(self, life: Life) -> None:
        event = life.hear()
        if event is None:
            return
        if life.role == "ps":
            self._heard_from_server(event)
        elif event["event"] == "note":
            self._onlooker.show(event)

    def _heard_from_server(self, event: Event) -> None:
        match event["event"]:
            case "listening":
                self._listening, self._wiretap = True, event.get("wiretap")
            case "round":
                self._rounds = max(self._rounds, int(event["round"]))
                if self._zero is None:
                    self._zero = time.monotonic()
        if event["event"] != "warning":  # what the lab does is warned of all the time
            self._onlooker.show(event)

    def _noticed_end(self, life: Life) -> None:
        while not life.hung_up and life.events.poll():  # what it said before
            self._hear(life)
        life.note_end()
        if self._over is not None:
            return
        wanted = life.name in self._reviving
        self._reviving.discard(life.name)
        if wanted and life.how == "died":
            self.revive(life.name)
        elif life.role == "check" and life.how != "done":
            self._over = life.status or RunFailed.status, life.describe_end()
        elif life.role == "ps":
            self._server_ended(life)
        elif not life.by_lab and life.how != "done":
            self._onlooker.show({"event": "warning", "message": life.describe_end()})
            if self._zero is None:  # it cannot do what was asked of it: waiting for the others would not help
                self._over = life.status or RunFailed.status, life.describe_end()

    def _server_ended(self, life: Life) -> None:
        if life.by_lab and life.how == "died":
            return  # the timeline says when it comes back
        if life.status in FINAL or not (life in self._inflictor.met_full_disk and _may_be_disk(life)):
            outcome = life.outcome or {}
            message = str(outcome.get("message")) if life.how == "done" else life.describe_end()
            self._over = life.status or RunFailed.status, message
            return
        # It ended since it could not write; its operator makes room and starts it again.
        self._resume_when_healed = True
        self._onlooker.show({"event": "note", "message": f"the parameter server ended: {life.status}"})

    # ---------------------------------------------------------------- to the end

    def _leave_nothing_behind(self) -> None:
        """Heal everything, let the peers hear the end, and end what is left."""
        if self._over is None:
            self._over = RunFailed.status, "the lab could not go on"
        with contextlib.suppress(RunFailed):
            self._inflictor.heal()
        if self._over[0] in FINAL:
            self._settle(HEAR_S)
        for number, patience_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
            for life in self._lives:
                if not life.over:
                    life.by_lab = True
                    life.send(number)
            self._settle(patience_s)
        for life in self._lives:
            if not life.hung_up:
                life.hung_up = True
                life.events.close()

    def _settle(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while time.monotonic() < until and not all(life.over for life in self._lives):
            with contextlib.suppress(Interrupted):
                self._take_in(0.05)


def _may_be_disk(life: Life) -> bool:
    """Whether a full disk explains this end."""
    written = {leaf.status for leaf in leaves(StoreProblem)}
    return life.how in ("done", "failed") and life.status in {RunFailed.status, *written}

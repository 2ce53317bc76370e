"""Watches over the children of a run: starts them, hears them, notices their ends, and leaves none behind.

One thread that waits for whatever happens first: an event from a child, a child's death, a signal. Every wait has a
deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from deploy.children import Assignment, run_child
from deploy.events import Event, receive
from deploy.logs import tail
from deploy.processes import CHILD_ENVIRONMENT, environment, shielded, woken_by_signals

__all__ = ["Onlooker", "Supervisor"]

log = logging.getLogger("byzuldp.launcher")

TICK_S = 0.2
CHECK_DEADLINE_S = 900.0  # a data set may have to be fetched
START_DEADLINE_S = 180.0  # until the parameter server listens
EVALUATE_DEADLINE_S = 300.0  # after the run's end: the last model on the whole test set
LEAVE_S, STOP_S, TERMINATE_S, KILL_S = 5.0, 20.0, 3.0, 3.0
SECOND_CTRL_C_S = 0.3  # sooner than that it is the same one, delivered twice


class Onlooker(Protocol):
    """Whoever is shown what happens; a display."""

    def show(self, event: Event) -> None:
        """Something happened."""

    def tick(self) -> None:
        """Time has passed."""


class _Over(Exception):
    """The run ends because of what the supervisor saw."""

    def __init__(self, status: str, message: str) -> None:
        self.status, self.message = status, message


@dataclass
class _Child:
    """A child and what it told us last; ``over`` once its end was noticed, ``hung_up`` once its pipe was read out."""

    assignment: Assignment
    process: BaseProcess
    events: Connection
    outcome: Event | None = None
    over: bool = False
    hung_up: bool = False

    @property
    def name(self) -> str:
        return self.assignment.name

    @property
    def role(self) -> str:
        return self.assignment.role

    @property
    def how(self) -> str:
        """``done``, ``failed`` (an error with a status), ``crashed`` (a defect) or ``died`` (without a word)."""
        return "died" if self.outcome is None else str(self.outcome["event"])

    def describe_end(self) -> str:
        """For instance ``client-3 was killed by SIGKILL``, and what its log says last unless the child told us."""
        if self.how == "failed":
            return f"{self.name}: {self.outcome['message']}" if self.outcome else self.name
        code = self.process.exitcode
        if self.how == "crashed":
            ended = "crashed"
        elif code is not None and code < 0:
            ended = f"was killed by {_signal_name(-code)}"
        else:
            ended = f"died with exit code {code}"
        said = tail(self.assignment.log_file)
        return f"{self.name} {ended}" + (f"; {self.assignment.log_file} ends with:\n{said}" if said else "")

    def send(self, number: signal.Signals) -> None:
        """Signal the child; one that leads a group of its own, with the group."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.role == "check" and os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


class Supervisor:
    """One run's children.

    Parameters
    ----------
    assignments
        As :func:`deploy.local.assign` made them: the check, the parameter server, then its peers.
    leave_deadline_s
        How long the parameter server waits for clients to hear the run's end.

    Attributes
    ----------
    startup_s
        Seconds from the beginning to the first round's opening; None before.
    """

    def __init__(
        self,
        assignments: Sequence[Assignment],
        run_dir: Path,
        onlooker: Onlooker,
        context: ForkServerContext | SpawnContext,
        *,
        leave_deadline_s: float,
    ) -> None:
        self.startup_s: float | None = None
        self._check, self._server, *self._peers = assignments
        self._run_dir, self._onlooker, self._context = run_dir, onlooker, context
        self._leave_deadline_s = leave_deadline_s
        self._children: list[_Child] = []
        self._ps: _Child | None = None
        self._address = ""
        self._wiretap: str | None = None
        self._kill = False
        self._began_at = time.monotonic()
        self._stop_asked_at: float | None = None
        self._ends_by = math.inf
        self._wake = -1

    def run(self) -> tuple[str, str]:
        """From the first child's start to the last one's end; returns the run's status and a message."""
        with woken_by_signals() as self._wake, environment(CHILD_ENVIRONMENT):
            try:
                status, message = self._from_start_to_end()
            except _Over as over:
                status, message = over.status, over.message
            except BaseException:
                self._kill = True
                raise
            finally:
                self._leave_nothing_behind()
        return status, message

    @property
    def summed_up(self) -> bool:
        """Whether the parameter server came to its own end, and so wrote a summary."""
        return self._ps is not None and self._ps.how == "done"

    def _from_start_to_end(self) -> tuple[str, str]:
        self._onlooker.show({"event": "note", "message": "loading PyTorch, checking the experiment"})
        checking = self._start(self._check)
        self._watch(lambda: checking.over, CHECK_DEADLINE_S, "checking the experiment and preparing the data")
        self._ps = serving = self._start(self._server)
        self._watch(lambda: serving.over or bool(self._address), START_DEADLINE_S, "starting the parameter server")
        for peer in self._peers if self._address else ():
            self._start(replace(peer, address=self._address, wiretap=self._wiretap))
        self._write_processes()
        self._watch(lambda: serving.over, math.inf, "the run")
        # A status is final only when the clients have heard of it, or have had their time.
        with contextlib.suppress(_Over):
            self._watch(lambda: all(child.over for child in self._children), LEAVE_S, "the clients' leave")
        outcome = serving.outcome or {}
        return str(outcome.get("status")), str(outcome.get("message"))

    # ---------------------------------------------------------------- starting

    def _start(self, assignment: Assignment) -> _Child:
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(target=run_child, args=(assignment, writer), name=assignment.name, daemon=True)
        with shielded(), writer:
            try:
                process.start()
            except (EOFError, OSError) as problem:
                reader.close()
                raise _Over("failed", f"cannot start {assignment.name}: {problem or 'the fork server died'}") from None
        child = _Child(assignment, process, reader)
        self._children.append(child)
        return child

    def _write_processes(self) -> None:
        """Which process is who, for whoever wants to look at one, or to kill one."""
        found = {
            child.name: {"pid": child.process.pid, "ids": list(child.assignment.ids)}
            for child in self._children
            if not child.over
        }
        with contextlib.suppress(OSError):  # a convenience, never a reason to end a run
            (self._run_dir / "operator" / "processes.json").write_text(json.dumps(found) + "\n")

    # ---------------------------------------------------------------- watching

    def _watch(self, done: Callable[[], bool], deadline_s: float, doing: str) -> None:
        """Take in what happens until ``done``.

        Raises
        ------
        _Over
            Something ended the run, or the time was over.
        """
        give_up_at = time.monotonic() + deadline_s
        while not done():
            now = time.monotonic()
            if now >= self._ends_by:
                self._kill = True
                status = "failed" if self._stop_asked_at is None else "interrupted"
                raise _Over(status, "the parameter server did not come to its end in time, and was killed")
            if now >= give_up_at:
                raise _Over("failed", f"{doing}: not done after {deadline_s:.0f} s")
            self._take_in(TICK_S)

    def _take_in(self, timeout: float) -> None:
        sources: dict[Any, _Child | None] = {self._wake: None}
        for child in self._children:
            if not child.hung_up:
                sources[child.events] = child
            if not child.over:
                sources[child.process.sentinel] = child
        for ready in mp_connection.wait(list(sources), timeout):
            source = sources[ready]
            if source is None:
                self._signalled(os.read(self._wake, 4096))
            elif ready is source.events:
                self._hear(source)
            elif not source.over:
                self._noticed_end(source)
        self._onlooker.tick()

    def _hear(self, child: _Child) -> None:
        try:
            event = receive(child.events)
        except EOFError:
            child.hung_up = True
            child.events.close()
            return
        if event["event"] in ("done", "failed", "crashed"):
            child.outcome = event
        elif child is self._ps:
            self._heard_from_server(event)
        elif event["event"] == "note":
            self._onlooker.show(event)
        elif event["event"] == "warning" and self._stop_asked_at is None:  # after that they are a matter of course
            self._onlooker.show({**event, "message": f"{child.name}: {event.get('message')}"})

    def _heard_from_server(self, event: Event) -> None:
        match event["event"]:
            case "listening":
                self._address, self._wiretap = str(event["address"]), event.get("wiretap")
            case "round":
                if self.startup_s is None:
                    self.startup_s = time.monotonic() - self._began_at - float(event["latency_s"])
            case "end":
                self._ends_by = time.monotonic() + EVALUATE_DEADLINE_S
        self._onlooker.show(event)

    def _noticed_end(self, child: _Child) -> None:
        """A child is no more: a matter of course, a warning, or the end of the run?

        Raises
        ------
        _Over
            The end of the run.
        """
        while not child.hung_up and child.events.poll():  # what it said before
            self._hear(child)
        child.process.join(KILL_S)
        child.over = True
        stopping = self._stop_asked_at is not None
        if child.how == "done" or (stopping and child is not self._ps):
            return
        if stopping:
            raise _Over("interrupted", "stopped before the parameter server was ready")
        # A peer refused for what was asked of it: waiting for the others would not help.
        is_peer, hopeless = child.role in ("client", "adversary"), child.how == "failed" and self.startup_s is None
        if child.outcome is not None and child.how == "failed" and (hopeless or not is_peer):
            raise _Over(child.outcome["status"], child.describe_end() if is_peer else child.outcome["message"])
        if not is_peer:
            raise _Over("failed", child.describe_end())
        self._onlooker.show({"event": "warning", "message": child.describe_end()})
        clients = [other for other in self._children if other.role == "client"]
        if clients and all(other.over and other.how != "done" for other in clients):
            raise _Over("failed", "no client process is left; the operator/logs say why each of them ended")

    # ---------------------------------------------------------------- stopping

    def _signalled(self, numbers: bytes) -> None:
        now = time.monotonic()
        for number in numbers:
            if self._stop_asked_at is None:
                self._stop_asked_at = now
                self._ask_to_stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
            elif number == signal.SIGINT and now - self._stop_asked_at > SECOND_CTRL_C_S:
                self._kill = True
                raise _Over("interrupted", "killed by a second Ctrl-C")

    def _ask_to_stop(self, why: str) -> None:
        if self._ps is None or self._ps.over or not self._address:
            raise _Over("interrupted", f"{why} before the run began")
        self._onlooker.show({"event": "note", "message": f"{why}: ending in good order; Ctrl-C again kills"})
        self._ps.send(signal.SIGTERM)
        self._ends_by = time.monotonic() + self._leave_deadline_s + EVALUATE_DEADLINE_S

    def _leave_nothing_behind(self) -> None:
        """End what is left: first the parameter server, in good order; SIGTERM; SIGKILL; each with its deadline."""
        if self._ps is not None and not self._kill:
            ps = self._ps
            ps.send(signal.SIGTERM)
            self._settle(lambda: ps.over, self._leave_deadline_s + STOP_S)
        if not self._kill:
            for child in self._alive():
                child.send(signal.SIGTERM)
            self._settle(lambda: not self._alive(), TERMINATE_S)
        for child in self._alive():
            child.send(signal.SIGKILL)
        self._kill = False  # nothing is left to hurry
        self._settle(lambda: not self._alive(), KILL_S)
        for child in self._children:
            if not child.hung_up:
                child.events.close()
        if left := [f"{child.name} (process {child.process.pid})" for child in self._alive()]:
            log.error("could not be killed: %s", ", ".join(left))

    def _alive(self) -> list[_Child]:
        return [child for child in self._children if not child.over]

    def _settle(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Wait for ends that are expected; what the children still say is shown."""
        until = time.monotonic() + deadline_s
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
        while not done() and not self._kill and time.monotonic() < until:
            with contextlib.suppress(_Over):
                self._take_in(0.05)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""One life of one process of the lab, from its start to what it said last."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from common.errors import RunFailed
from deploy.chaos.backend import Placement
from deploy.chaos.roles import run_placed
from deploy.children import Assignment
from deploy.events import Event, receive
from deploy.logs import tail
from deploy.processes import CHILD_ENVIRONMENT, environment, shielded

__all__ = ["Life"]

JOIN_S = 3.0


@dataclass(eq=False)
class Life:
    """A process, and what it told us.

    Attributes
    ----------
    over
        Its end was noticed.
    hung_up
        Its pipe was read out.
    by_lab
        We killed it, or asked it to end.
    """

    assignment: Assignment
    process: BaseProcess
    events: Connection
    outcome: Event | None = None
    over: bool = False
    hung_up: bool = False
    by_lab: bool = False

    @classmethod
    def begin(
        cls,
        context: ForkServerContext | SpawnContext,
        assignment: Assignment,
        placement: Placement,
        extra: Mapping[str, str],
    ) -> Life:
        """Start a process.

        Parameters
        ----------
        extra
            Environment variables for it alone; they need a context that starts a new program.

        Raises
        ------
        RunFailed
            It cannot be started.
        """
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=run_placed, args=(assignment, placement, writer), name=assignment.name, daemon=True
        )
        with shielded(), environment({**CHILD_ENVIRONMENT, **extra}), writer:
            try:
                process.start()
            except (EOFError, OSError) as problem:
                reader.close()
                reason = problem or "the fork server died"
                raise RunFailed(f"cannot start {assignment.name}: {reason}") from None
        return cls(assignment, process, reader)

    @property
    def name(self) -> str:
        return self.assignment.name

    @property
    def role(self) -> str:
        return self.assignment.role

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def how(self) -> str:
        """``done``, ``failed`` (an error with a status), ``crashed`` (a defect) or ``died`` (without a word)."""
        return "died" if self.outcome is None else str(self.outcome["event"])

    @property
    def status(self) -> str | None:
        """What it said its end was, by the names of :mod:`common.errors`."""
        status = (self.outcome or {}).get("status")
        return None if status is None else str(status)

    def hear(self) -> Event | None:
        """The next thing it says; None at the end of its pipe, and for its last words, which are kept."""
        try:
            event = receive(self.events)
        except EOFError:
            self.hung_up = True
            self.events.close()
            return None
        if event["event"] in ("done", "failed", "crashed"):
            self.outcome = event
            return None
        return event

    def note_end(self) -> None:
        """It is no more."""
        self.process.join(JOIN_S)
        self.over = True

    def send(self, number: signal.Signals) -> bool:
        """Signal it (a check with what it has started); False when it is gone already."""
        if self.over or not self.process.is_alive():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.role == "check" and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
            return True
        return False

    def describe_end(self) -> str:
        """Its end in words, and what its log says last unless it told us."""
        if self.how in ("done", "failed"):
            outcome: Mapping[str, Any] = self.outcome or {}
            return f"{self.name}: {outcome.get('status')}: {outcome.get('message')}"
        code = self.process.exitcode
        ended = "crashed" if self.how == "crashed" else f"died with exit code {code}"
        if self.how == "died" and code is not None and code < 0:
            with contextlib.suppress(ValueError):
                ended = f"was killed by {signal.Signals(-code).name}"
        said = tail(self.assignment.log_file)
        return f"{self.name} {ended}" + (f"; {self.assignment.log_file} ends with:\n{said}" if said else "")

"""What the launcher's children do: everything between the fork and the role's own code, and back.

A child writes to its own log file, tells the launcher what happens through a pipe, leaves Ctrl-C to the launcher, and
does not outlive it. Nothing here imports torch or gRPC before a role needs it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.config import Experiment, experiment_from
from common.errors import ByzULDPError
from deploy.events import Event, EventSender
from deploy.logs import forward_warnings, log_to_stderr

__all__ = ["ROLES", "Assignment", "attack", "check", "run_child", "serve", "take_part"]

Report = Callable[[Event], None]

ORPHANED = 23  # exit code of RunFailed
ORPHANED_SERVER_S = 20.0

ROLES = {
    "check": "deploy.children:check",
    "ps": "deploy.children:serve",
    "client": "deploy.children:take_part",
    "adversary": "deploy.children:attack",
}


@dataclass(frozen=True)
class Assignment:
    """What one child is to do: plain values only, since they travel by pickle from the launcher to its own child.

    Attributes
    ----------
    role, number
        Which child this is; ``client`` 3 is shown as ``client-3``.
    entry
        ``module:function``, called with the assignment and ``report``; returns a status and a message.
    experiment
        The effective configuration, as JSON values.
    tokens
        Join tokens of the identities this child holds; the parameter server gets ``token_hashes`` only.
    """

    role: str
    number: int
    entry: str
    experiment: Mapping[str, Any]
    run_dir: Path
    resume: bool = False
    ids: tuple[int, ...] = ()
    tokens: Mapping[int, str] = field(default_factory=dict, repr=False)
    token_hashes: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    address: str = ""
    wiretap: str | None = None

    @property
    def name(self) -> str:
        return self.role if self.role in ("check", "ps", "adversary") else f"{self.role}-{self.number}"

    @property
    def log_file(self) -> Path:
        return self.run_dir / "operator" / "logs" / f"{self.name}.log"

    @property
    def state_file(self) -> Path:
        """What a client process keeps from one life to the next; private to its identities."""
        return self.run_dir / "clients" / f"{self.name}.state"

    def load(self) -> Experiment:
        return experiment_from(dict(self.experiment), where=f"the experiment given to {self.name}")


def run_child(assignment: Assignment, events: Connection) -> None:
    """The body of every child process. Ends the process with an exit code.

    The launcher is told the outcome in a last event: ``done`` (status, message), ``failed`` (status, message) for an
    error of the tree in :mod:`common.errors`, or ``crashed`` (message) for a defect. None at all means a sudden death.
    """
    _redirect_output(assignment.log_file)
    faulthandler.enable()
    if assignment.role == "check":
        os.setpgid(0, 0)  # a download it started dies with it: the whole group is signalled
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(ORPHANED))  # unwinds, so that temporary files go
    _do_not_outlive_launcher(assignment.role)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # Ctrl-C and SIGHUP stay with the launcher
    report = EventSender(events)
    log_to_stderr(logging.INFO)
    forward_warnings(report)
    try:
        status, message = _function(assignment.entry)(assignment, report)
    except ByzULDPError as problem:
        report.close({"event": "failed", "status": problem.status, "message": str(problem)})
        with suppress(OSError):  # a full disk must not hide the reason
            sys.stderr.write(f"error: {problem}\n")
        sys.exit(problem.exit_code)
    except Exception as problem:
        report.close({"event": "crashed", "message": f"{type(problem).__name__}: {problem}"[:1000]})
        with suppress(OSError):
            traceback.print_exc()
        sys.exit(1)
    report.close({"event": "done", "status": status, "message": message})


def check(assignment: Assignment, report: Report) -> tuple[str, str]:
    """Prepare the data, and build whatever can refuse the experiment, before a run folder or a peer exists."""
    from common.learning.partitions import deal_experiment
    from common.learning.prepared import prepare_dataset
    from common.learning.task import build_task
    from common.plugins import is_plugin
    from ps.mechanism import device_of, noise_of, opened

    experiment = assignment.load()
    if not is_plugin(experiment.data.dataset):
        prepare_dataset(
            experiment.data.dataset, experiment.data.root, lambda text: report({"event": "note", "message": text})
        )
    task = build_task(experiment)
    opened(experiment, lambda: task.dataset.train.labels)
    noise_of(experiment, task.num_parameters)
    device_of(experiment.training.device)
    deal_experiment(experiment, task.dataset.train.labels)
    if experiment.num_adversaries:
        from adversary.main import attack_of, misbehaviours_of

        attack_of(experiment)
        misbehaviours_of(experiment)
    return "completed", "the experiment can be run"


def serve(assignment: Assignment, report: Report) -> tuple[str, str]:
    """The parameter server. Its summary is in the run folder."""
    from ps.main import run_parameter_server

    summary = run_parameter_server(
        assignment.load(),
        assignment.run_dir,
        resume=assignment.resume,
        token_hashes=assignment.token_hashes,
        report=report,
    )
    return summary["status"], summary["message"]


def take_part(assignment: Assignment, _report: Report) -> tuple[str, str]:
    """Honest clients."""
    from client.main import run_client

    outcome = run_client(
        assignment.load(), address=assignment.address, tokens=assignment.tokens, state=assignment.state_file
    )
    return outcome.status, outcome.message


def attack(assignment: Assignment, _report: Report) -> tuple[str, str]:
    """All the Byzantine identities."""
    from adversary.main import run_adversary

    outcome = run_adversary(
        assignment.load(), address=assignment.address, tokens=assignment.tokens, wiretap_address=assignment.wiretap
    )
    return outcome.status, outcome.message


def _function(entry: str) -> Callable[[Assignment, Report], tuple[str, str]]:
    module, _, name = entry.partition(":")
    found: Callable[[Assignment, Report], tuple[str, str]] = getattr(importlib.import_module(module), name)
    return found


def _redirect_output(log_file: Path) -> None:
    """Standard output and error, those of C libraries included, go to the log file."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _do_not_outlive_launcher(role: str) -> None:
    """End this process when the launcher is gone, however it went.

    The sentinel is a pipe whose other end only the launcher holds: its end of file is the launcher's death, by SIGKILL
    too. (PR_SET_PDEATHSIG would speak of the thread that forked us, which is the fork server's.)
    """
    launcher = parent_process()
    if launcher is None:
        return

    def watch() -> None:
        mp_connection.wait([launcher.sentinel])
        with suppress(OSError):
            sys.stderr.write("the launcher is gone; stopping\n")
            sys.stderr.flush()
        if role == "ps":  # the round that is being made is still committed
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ORPHANED_SERVER_S)
        if role == "check":
            os.killpg(0, signal.SIGKILL)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()

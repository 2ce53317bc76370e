"""Stand-ins for the processes of the fault lab: they do rounds and can be disturbed, and train nothing.

A role is named to the conductor as ``lab_roles:name``; it runs in a real child process. What happened to whom is in
the run folder: ``rounds`` (how many are done), and ``lives`` (a line of JSON for each process that began).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import StoreUnwritable
from deploy.children import Assignment

Report = Callable[[dict[str, Any]], None]

LONG_S = 60.0
EVERYBODY = 4  # the server, two clients, the adversary
ROUND_S = 0.02
DISK_IS_FULL = "disk-is-full"


def check(_: Assignment, __: Report) -> tuple[str, str]:
    return "completed", "fine"


def _born(assignment: Assignment) -> None:
    life = {"name": assignment.name, "pid": os.getpid(), "resume": assignment.resume, "address": assignment.address}
    with (assignment.run_dir / "lives").open("a") as file:
        file.write(json.dumps(life | {"listens": assignment.experiment["network"]["address"]}) + "\n")


def _count(run_dir: Path) -> int:
    return int(path.read_text()) if (path := run_dir / "rounds").exists() else 0


def server(assignment: Assignment, report: Report) -> tuple[str, str]:
    """Rounds until ``training.rounds`` are done, through any number of lives."""
    _born(assignment)
    run_dir, total = assignment.run_dir, int(assignment.experiment["training"]["rounds"])
    report({"event": "listening", "address": "x", "wiretap": None, "run_id": "ab", "run_dir": str(run_dir)})
    while len((run_dir / "lives").read_text().splitlines()) < EVERYBODY:  # a real one waits for them too
        time.sleep(ROUND_S)
    while (done := _count(run_dir)) < total:
        time.sleep(ROUND_S)
        if (run_dir / DISK_IS_FULL).exists():
            (run_dir / "failed").write_text(str(time.time()))
            raise StoreUnwritable("no space left")
        new = run_dir / "rounds.new"
        new.write_text(str(done + 1))
        new.replace(run_dir / "rounds")
        report({"event": "round", "round": done + 1, "of": total, "latency_s": ROUND_S, "answered": 1, "missing": []})
    (run_dir / "over").touch()
    return "completed", "all rounds are done"


def server_that_dies(assignment: Assignment, report: Report) -> tuple[str, str]:
    report({"event": "listening", "address": "x", "wiretap": None, "run_id": "ab", "run_dir": "x"})
    report({"event": "round", "round": 1, "of": 9, "latency_s": 0.1, "answered": 1, "missing": []})
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def client(assignment: Assignment, _: Report) -> tuple[str, str]:
    """Waits for the end, or for the server to say that the run has failed."""
    born_at, failed = time.time(), assignment.run_dir / "failed"
    _born(assignment)
    until = time.monotonic() + LONG_S
    while not (assignment.run_dir / "over").exists() and time.monotonic() < until:
        if failed.exists() and failed.stat().st_mtime > born_at:
            return "failed", "heard that it failed"
        time.sleep(0.02)
    return "completed", "heard the end"


def client_0_crashes(assignment: Assignment, report: Report) -> tuple[str, str]:
    if assignment.number == 0:
        raise ZeroDivisionError("client 0 divided by zero")
    return client(assignment, report)


def client_that_is_deaf(assignment: Assignment, _: Report) -> tuple[str, str]:
    """Neither hears the end nor SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _born(assignment)
    time.sleep(LONG_S)
    return "completed", "never"

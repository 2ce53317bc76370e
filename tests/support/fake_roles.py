"""Stand-ins for a run's processes, so that the launcher can be watched without training anything.

A role is named to the launcher as ``fake_roles:name``; it runs in a real child process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from common.errors import AttackError
from deploy.children import Assignment

Report = Callable[[dict[str, Any]], None]

LONG_S = 60.0


def ready(_: Assignment, report: Report) -> tuple[str, str]:
    report({"event": "note", "message": "checked"})
    return "completed", "fine"


def refused(_: Assignment, report: Report) -> tuple[str, str]:
    raise AttackError("no such attack")


def fetches_for_long(assignment: Assignment, report: Report) -> tuple[str, str]:
    """A check that has a download running in a process of its own."""
    import subprocess

    with subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"]) as download:
        report({"event": "note", "message": f"download {download.pid}"})
        download.wait()
    return "completed", "fetched"


class _Server:
    """Listens, and then: ends with the status that ``RUN/end`` holds, or in good order on SIGTERM."""

    def __init__(self, assignment: Assignment, report: Report) -> None:
        self.run_dir, self.report = assignment.run_dir, report
        self.stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.stopped.set())
        (self.run_dir / "hashes.json").write_text(json.dumps(sorted(assignment.token_hashes)))
        (self.run_dir / "ps.pid").write_text(str(os.getpid()))
        address = {"address": "127.0.0.1:5", "wiretap": "127.0.0.1:6", "run_id": "ab", "run_dir": "x"}
        report({"event": "listening", **address})

    def round(self) -> None:
        self.report({"event": "round", "round": 1, "of": 3, "latency_s": 0.1, "answered": 4})

    def wait(self) -> tuple[str, str]:
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            if self.stopped.is_set():
                return self.end("interrupted", "asked to stop")
            file = self.run_dir / "end"
            if file.exists() and (status := file.read_text()):  # it is empty until it has been written
                return self.end(status, "as the test said")
            time.sleep(0.02)
        return self.end("failed", "nobody ended this test")

    def end(self, status: str, message: str) -> tuple[str, str]:
        (self.run_dir / "summary.json").write_text(json.dumps({"status": status, "message": message}))
        (self.run_dir / "over").touch()
        self.report({"event": "end", "status": status, "message": message})
        return status, message


def server(assignment: Assignment, report: Report) -> tuple[str, str]:
    return _Server(assignment, report).wait()


def server_in_its_rounds(assignment: Assignment, report: Report) -> tuple[str, str]:
    serving = _Server(assignment, report)
    serving.round()
    return serving.wait()


def server_that_dies(assignment: Assignment, report: Report) -> tuple[str, str]:
    _Server(assignment, report).round()
    sys.stderr.write("the last words of the parameter server\n")
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def server_that_ignores_sigterm(assignment: Assignment, report: Report) -> tuple[str, str]:
    serving = _Server(assignment, report)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return serving.wait()


def client(assignment: Assignment, _: Report) -> tuple[str, str]:
    """Waits for the end like a good client, and notes what it was given."""
    given = {"ids": assignment.ids, "tokens": sorted(assignment.tokens), "address": assignment.address}
    given["wiretap"] = assignment.wiretap
    given["blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    given["pid"] = os.getpid()
    (assignment.run_dir / f"{assignment.name}.json").write_text(json.dumps(given))
    until = time.monotonic() + LONG_S
    while not (assignment.run_dir / "over").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return "completed", "heard the end"


def client_0_is_killed(assignment: Assignment, report: Report) -> tuple[str, str]:
    if assignment.number == 0:
        sys.stderr.write("memory is short\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return client(assignment, report)


def client_0_crashes(assignment: Assignment, report: Report) -> tuple[str, str]:
    if assignment.number == 0:
        raise ZeroDivisionError("client 0 divided by zero")
    return client(assignment, report)


def dies(_: Assignment, __: Report) -> tuple[str, str]:
    time.sleep(0.2)
    os._exit(7)


def hangs(assignment: Assignment, _: Report) -> tuple[str, str]:
    """Does not hear the end, nor SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (assignment.run_dir / f"{assignment.name}.json").write_text(json.dumps({"pid": os.getpid()}))
    time.sleep(LONG_S)
    return "completed", "never"


def talks_too_much(assignment: Assignment, report: Report) -> tuple[str, str]:
    for number in range(20_000):
        report({"event": "warning", "message": f"warning {number} " + "x" * 200})
    return client(assignment, report)

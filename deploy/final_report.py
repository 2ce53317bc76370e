"""The report at a run's end, written by a process of its own: whatever goes wrong there is one line, and no more.

Another process, since it can be killed when it takes too long, and since drawing needs modules that neither the
launcher nor the parameter server has. Where a fork server is there already, it has most of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from deploy.processes import CHILD_ENVIRONMENT, child_context, environment, shielded

__all__ = ["DEADLINE_S", "report_at_end"]

Body = Callable[[Path, float, Connection], None]

DEADLINE_S = 120.0
LOG = Path("operator", "logs", "report.log")
DIED = f"its process died; see {LOG}"


def report_at_end(
    run_dir: Path,
    *,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    deadline_s: float = DEADLINE_S,
    body: Body | None = None,
) -> tuple[Path | None, str]:
    """Write the report of a run that has ended.

    Parameters
    ----------
    run_dir
        Its folder.
    start_method
        ``forkserver`` where there is one already, as in the launcher.
    deadline_s
        When to give up.
    body
        What the process does, instead of writing the report: for tests.

    Returns
    -------
    path, problem
        Where the report is; None if there is no round to report of, or with what went wrong, in one line.
    """
    if not (run_dir / "run.sqlite").exists():
        return None, ""
    try:
        with _started(run_dir, start_method, deadline_s, body or _write) as (process, answer):
            if not mp_connection.wait([answer, process.sentinel], deadline_s):
                return None, "it took too long"
            if not answer.poll():
                return None, DIED
            path, problem = answer.recv_bytes().decode().split("\n", 1)
            return (run_dir / path if path else None), problem
    except EOFError:  # the pipe was closed, and nothing said
        return None, DIED
    except OSError as problem:
        return None, f"no process could be started for it ({problem})"


@contextlib.contextmanager
def _started(
    run_dir: Path, start_method: Literal["forkserver", "spawn"], deadline_s: float, body: Body
) -> Iterator[tuple[BaseProcess, Connection]]:
    """The process and the pipe on which it answers; it is gone afterwards."""
    context = child_context(start_method)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=body, args=(run_dir.absolute(), deadline_s, writer), name="report", daemon=True)
    with reader:
        with shielded(), environment(CHILD_ENVIRONMENT), writer:
            process.start()
        try:
            yield process, reader
        finally:
            process.kill()
            process.join()


def _write(run_dir: Path, deadline_s: float, answer: Connection) -> None:
    """The body of the process. It says ``PATH\\nPROBLEM``, either of them empty, and ends in time whoever waits."""
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    with contextlib.suppress(OSError):
        _redirect_output(run_dir / LOG)
    path = problem = ""
    try:
        from deploy.report.writing import write_report
        from ps.reader import RunReader

        if RunReader(run_dir).status().round_id > 0:
            path = str(write_report(run_dir).relative_to(run_dir))
    except Exception as reason:  # the run is over, and its ending has been said: nothing may change that
        problem = " ".join((str(reason) or type(reason).__name__).split())
    answer.send_bytes(f"{path}\n{problem}".encode())


def _redirect_output(log_file: Path) -> None:
    """What the libraries have to say is not for the terminal, which has the run's result on it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)

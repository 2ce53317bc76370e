"""The cores of this machine: one process each, with one thread of PyTorch.

A worker runs one job after the other. One that dies (the system was short of memory, say) costs its own job only, and
is replaced. Workers do not outlive the sweep, however that ends, SIGKILL included.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from deploy.processes import CHILD_ENVIRONMENT, child_context, environment, shielded
from deploy.sweep.job import Job, run_as_text
from deploy.sweep.results import ERROR, Row

__all__ = ["Pool", "cores"]

ORPHANED = 3


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A process that takes jobs from a pipe and answers with rows."""

    def __init__(self, context: ForkServerContext | SpawnContext) -> None:
        self.here, there = context.Pipe()
        self.job: Job | None = None
        with environment(CHILD_ENVIRONMENT), shielded():
            self.process: BaseProcess = context.Process(target=_work, args=(there,), name="sweep", daemon=True)
            self.process.start()
        there.close()

    def take(self, job: Job) -> bool:
        """Begin a job; False if the worker is dead."""
        try:
            self.here.send_bytes(job.as_text().encode())
        except OSError:
            return False
        self.job = job
        return True

    def ended(self) -> Row:
        """The outcome of its job: as told, or why it tells nothing."""
        job, self.job = self.job, None
        assert job is not None  # noqa: S101 - it had one
        try:
            told = self.here.recv_bytes()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            hint = " (out of memory? fewer --jobs need less)" if code == -signal.SIGKILL else ""
            return Row(job.key, job.values, ERROR, error=f"the process of this run died: {why}{hint}", exit_code=1)
        return Row(**json.loads(told))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.here.close()


class Pool:
    """So many workers as asked for.

    Parameters
    ----------
    width
        How many runs at a time.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def rows(self, jobs: Sequence[Job], begun: Callable[[Job], None]) -> Generator[Row, None, None]:
        waiting, workers = deque(jobs), list[_Worker]()
        context = child_context("forkserver")
        try:
            while waiting or any(worker.job for worker in workers):
                while waiting and sum(worker.job is not None for worker in workers) < self.width:
                    idle = next((worker for worker in workers if worker.job is None), None)
                    if idle is None:
                        idle = _Worker(context)
                        workers.append(idle)
                    begun(waiting[0])
                    if idle.take(waiting[0]):
                        waiting.popleft()
                    else:
                        idle.kill()
                        workers.remove(idle)
                busy = {worker.here: worker for worker in workers if worker.job is not None}
                for ready in mp_connection.wait(list(busy)):
                    assert isinstance(ready, Connection)  # noqa: S101 - what we waited for
                    worker = busy[ready]
                    yield worker.ended()
                    if not worker.process.is_alive():
                        worker.kill()
                        workers.remove(worker)
        finally:
            for worker in workers:
                worker.kill()


def _work(jobs: Connection) -> None:
    """The body of a worker."""
    launcher = parent_process()
    if launcher is not None:

        def watch() -> None:
            mp_connection.wait([launcher.sentinel])
            os._exit(ORPHANED)

        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            jobs.send_bytes(run_as_text(jobs.recv_bytes().decode()).encode())

"""The process around the launcher: where children come from, and what signals do.

Children inherit three things at their start: the environment, the signal mask, and nothing else. While one is started
the signals that ask the launcher to stop are blocked, so they are born with them blocked: Ctrl-C, which the terminal
sends to the whole group, reaches the launcher alone, and it decides what that means for whom.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Literal

__all__ = ["CHILD_ENVIRONMENT", "LAUNCHER_SIGNALS", "child_context", "environment", "shielded", "woken_by_signals"]

LAUNCHER_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGTERM})

# One thread each: OpenBLAS would make its threads on import, and a process with threads must not fork.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",  # a client.py in the working directory is not our client
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # its fork handlers; no process of ours forks after using gRPC
}


def child_context(start_method: Literal["forkserver", "spawn"]) -> ForkServerContext | SpawnContext:
    """Where children come from; the fork server is started here, and imports while we go on."""
    if start_method == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deploy.preload"])
    resource_tracker.ensure_running()  # before the mask: starting it unblocks signals
    with environment(CHILD_ENVIRONMENT), shielded():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Hold signals back while a process is started: it inherits the mask, and we miss nothing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def woken_by_signals() -> Iterator[int]:
    """A file descriptor on which the numbers of the signals that ask us to stop arrive, one byte each."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(writer, bytes([number]))

    before = {number: signal.signal(number, note) for number in LAUNCHER_SIGNALS}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)

"""The audit's parameter servers: real ones, each in a process of its own, all forked from one parent.

The parent has imported what the servers run, and forks whenever one is asked for; so do launchers that start servers
quickly, and so this project's own. Whatever state a server inherits, and should not use, is then the same in all.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from common.config import Experiment, experiment_from
from common.errors import RunFailed
from common.plugins import load_plugin
from deploy.logs import log_to_stderr, tail
from deploy.processes import child_context

__all__ = ["PRODUCT", "Servers"]

PRODUCT = "ps.main:run_parameter_server"

START_S, ANSWER_S = 60.0, 90.0

Message = dict[str, Any]


class Servers:
    """Starts parameter servers, one at a time, and kills them.

    Parameters
    ----------
    folder
        For their common log.
    entry
        ``module:function``, called like :func:`ps.main.run_parameter_server`.

    Raises
    ------
    RunFailed
        Here and in all methods: a process does not do what it should; the message ends with its log.
    """

    def __init__(self, folder: Path, entry: str = PRODUCT) -> None:
        self._log = folder / "servers.log"
        self._control, theirs = multiprocessing.Pipe()
        self._process = child_context("forkserver").Process(
            target=_fork_on_demand, args=(theirs, entry, self._log), name="audit-servers"
        )
        self._process.start()
        theirs.close()

    def start(
        self, experiment: Experiment, run_dir: Path, token_hashes: Mapping[int, bytes], *, resume: bool = False
    ) -> str:
        """Start a server, or go on with its run; returns its address once it listens. The one before is killed."""
        answer = self._ask(
            {
                "do": "start",
                "experiment": experiment.model_dump(mode="json"),
                "run_dir": str(run_dir),
                "token_hashes": {str(client_id): value.hex() for client_id, value in token_hashes.items()},
                "resume": resume,
            }
        )
        return str(answer["address"])

    def kill(self) -> None:
        """SIGKILL the server, and wait until it is dead."""
        self._ask({"do": "kill"})

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()  # the parent notices, and kills what it has forked
        self._process.join(ANSWER_S)
        self._process.kill()
        self._process.join()

    def _ask(self, request: Message) -> Message:
        answer: Message = {"failed": "the process that forks the servers is gone"}
        with contextlib.suppress(OSError, EOFError):
            self._control.send_bytes(json.dumps(request).encode())
            if self._control.poll(ANSWER_S):
                answer = json.loads(self._control.recv_bytes())
            else:
                answer = {"failed": f"no answer for {ANSWER_S:.0f} s"}
                self._process.kill()  # a later answer would be taken for that to another question
        if "failed" in answer:
            raise RunFailed(
                f"the audit's parameter server, asked to {request['do']}: {answer['failed']}; its log ends with\n"
                f"{tail(self._log)}"
            )
        return answer


# ---------------------------------------------------------------- in the parent


def _fork_on_demand(control: Connection, entry: str, log: Path) -> None:
    """Serve requests until the audit is gone. One thread, no gRPC: that is what makes forking safe here."""
    _write_to(log)
    serve = load_plugin(entry)
    server: ForkProcess | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            request: Message = json.loads(control.recv_bytes())
            answer: Message = {}
            _kill(server)
            if request["do"] == "start":
                server, answer = _forked(serve, request)
            control.send_bytes(json.dumps(answer).encode())
    _kill(server)


def _forked(serve: Callable[..., object], request: Message) -> tuple[ForkProcess, Message]:
    news, teller = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(serve, request, teller), name="audit-ps")
    server.start()
    teller.close()
    with contextlib.closing(news), contextlib.suppress(EOFError, OSError):
        if news.poll(START_S):
            return server, json.loads(news.recv_bytes())
        return server, {"failed": f"does not listen after {START_S:.0f} s"}
    _kill(server)
    return server, {"failed": "ended before it listened"}


def _kill(server: ForkProcess | None) -> None:
    if server is not None:
        server.kill()
        server.join()


# ---------------------------------------------------------------- in a server


def _serve(serve: Callable[..., object], request: Message, teller: Connection) -> None:
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    log_to_stderr()

    def report(event: Message) -> None:
        if event["event"] == "listening":
            teller.send_bytes(json.dumps({"address": event["address"]}).encode())

    try:
        serve(
            experiment_from(request["experiment"], where="the audit's experiment"),
            Path(request["run_dir"]),
            resume=request["resume"],
            token_hashes={int(key): bytes.fromhex(value) for key, value in request["token_hashes"].items()},
            report=report,
        )
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        mp_connection.wait([parent.sentinel])
        os._exit(1)


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)

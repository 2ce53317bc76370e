"""Real processes for tests: a parameter server, clients, adversaries.

They are forked from a server that has imported torch once, so that one starts in a fraction of a second. What a child
has to tell goes line by line into a file, which survives its death by SIGKILL.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Experiment, experiment_from
from common.errors import ByzULDPError
from deploy.processes import child_context
from ps.reader import RunReader

DEADLINE_S = 100.0
"""Nothing here takes so long, unless it is broken."""

Tree = dict[str, dict[str, Any]]

SMALL: Tree = {
    "federation": {"clients": 5, "byzantine": 1},
    "training": {"rounds": 1_000_000, "learning_rate": 1.0, "server_momentum": 0.0, "batch_size": 8},
    "evaluation": {"every": 1_000_000},
    "aggregation": {"rule": "mean"},
    "data": {"dataset": "tiny_task:blobs", "partition": "iid"},
    "model": {"name": "logistic"},
    "network": {
        "grace_factor": 0.01,
        "grace_floor_s": 0.2,
        "liveness_s": 60.0,
        "leave_deadline_s": 0.2,
        "strikes": 0,
        "max_joins": 1_000_000,
        "patience_s": 1e9,
        "join_deadline_s": 3600.0,
        "quorum_deadline_s": 3600.0,
    },
    "monitoring": {"status": ""},
}
"""Five clients, of whom four answers close a round soon: θ' = θ - mean of the rows that arrived.

Tests break the protocol, join, and keep silent as often as they like, so nobody is suspended or given up here; and a
server that many tests share waits for the next one, however long that takes.
"""


def small_experiment(**sections: Mapping[str, Any]) -> Experiment:
    """:data:`SMALL` with some keys changed."""
    tree = {name: dict(section) for name, section in SMALL.items()}
    for name, section in sections.items():
        tree.setdefault(name, {}).update(section)
    return experiment_from(tree)


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for a condition's first true value."""
    give_up = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {deadline_s:.0f} s in vain for {what}"
        time.sleep(0.005)
    return value


class Child:
    """A process that runs ``target(say, *arguments)``; ``say`` writes an event."""

    def __init__(self, folder: Path, name: str, target: Callable[..., None], *arguments: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._events, self._log = name, folder / f"{name}.jsonl", folder / f"{name}.log"
        process = child_context("forkserver").Process(
            target=_run_child, args=(target, arguments, self._events, self._log), name=name, daemon=True
        )
        process.start()
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What it said so far, of one kind."""
        try:
            lines = self._events.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        said = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in said if event["event"] == kind]

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The first event of a kind.

        Raises
        ------
        AssertionError
            The child ended without saying it.
        """

        def said() -> dict[str, Any] | None:
            ended = not self._process.is_alive()
            events = self.events(kind)
            assert events or not ended, f"{self.name} ended with {self._process.exitcode}:\n{self.log()}"
            return events[0] if events else None

        return until(said, f"{self.name} to say {kind!r}")

    def exit_code(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end."""
        self._process.join(deadline_s)
        assert self._process.exitcode is not None, f"{self.name} does not end:\n{self.log()}"
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        self._process.kill()
        self._process.join(DEADLINE_S)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.kill()


class ServerProcess(Child):
    """A parameter server in a process of its own.

    ``dies_at`` is a fault plan: the name of a point (see :mod:`ps.faults`), and which visit there ends it by SIGKILL.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        run_dir: Path | None = None,
        resume: bool = False,
        dies_at: tuple[str, int] | None = None,
    ):
        self.experiment, self.run_dir = experiment, run_dir or folder / "run"
        name = f"ps-{len(list(folder.glob('ps-*.log')))}" if folder.exists() else "ps-0"
        super().__init__(folder, name, _serve, experiment, self.run_dir, resume, dies_at)

    def listening(self) -> ServerProcess:
        """Wait until it listens; returns itself."""
        self.wait_for("listening")
        return self

    @property
    def address(self) -> str:
        return self.wait_for("listening")["address"]

    @property
    def wiretap(self) -> str | None:
        return self.wait_for("listening")["wiretap"]

    @property
    def run_id(self) -> str:
        return self.wait_for("listening")["run_id"]

    @property
    def schema_hash(self) -> bytes:
        return bytes.fromhex(self.wait_for("task")["schema_hash"])

    @property
    def num_parameters(self) -> int:
        return self.wait_for("task")["num_parameters"]

    def tokens(self, ids: Sequence[int] | None = None) -> dict[int, str]:
        """Join tokens: those of ``ids``, or all."""
        stored = json.loads((self.run_dir / "operator" / "join_tokens.json").read_text())
        every = {int(client_id): token for client_id, token in stored.items()}
        return every if ids is None else {client_id: every[client_id] for client_id in ids}

    def refusals(self, client_id: int | str | None = "all") -> Counter[str]:
        """Refusals counted so far by kind: all of them, or those of one identity (None: of strangers)."""
        counts: Counter[str] = Counter()
        for refusal in RunReader(self.run_dir).refusals():
            if client_id in ("all", refusal.client_id):
                counts[refusal.kind] += refusal.count
        return counts

    def theta(self) -> np.ndarray:
        """The last committed model, from the run folder."""
        return theta_of(self.run_dir)

    def died(self) -> str:
        """Wait until its fault plan has killed it; returns the point it died at."""
        code = self.exit_code()
        assert code == -signal.SIGKILL, f"it ended with {code}:\n{self.log()}"
        (last,) = self.events("dies")
        return str(last["at"])

    def stop(self) -> dict[str, Any]:
        """SIGTERM; returns the summary."""
        os.kill(self.pid, signal.SIGTERM)
        return self.finish()

    def finish(self) -> dict[str, Any]:
        """Wait for its end; returns the summary."""
        assert self.exit_code() == 0, self.log()
        return json.loads((self.run_dir / "summary.json").read_text())


def theta_of(run_dir: Path) -> np.ndarray:
    """The newest model of a run folder."""
    from safetensors.numpy import load_file

    newest = max((run_dir / "models").glob("model-*.safetensors"), key=lambda path: int(path.stem.partition("-")[2]))
    return load_file(newest)["theta"]


def client_process(
    folder: Path, experiment: Experiment, address: str, tokens: Mapping[int, str], *, name: str = "client"
) -> Child:
    """Honest clients: exit code 0 once the run has ended, whatever its status."""
    return Child(folder, name, _take_part, experiment, address, dict(tokens))


def halting_client_process(
    folder: Path, experiment: Experiment, address: str, tokens: Mapping[int, str], *, frames: int
) -> Child:
    """An honest client that stops for ever after ``frames`` frames of its first push, and then says ``halted``."""
    return Child(folder, "halting", _halt, experiment, address, dict(tokens), frames)


def adversary_process(
    folder: Path, experiment: Experiment, address: str, tokens: Mapping[int, str], wiretap: str | None
) -> Child:
    """The adversary with all its identities."""
    return Child(folder, "adversary", _attack, experiment, address, dict(tokens), wiretap)


# ---------------------------------------------------------------- in the children


def _run_child(target: Callable[..., None], arguments: Sequence[object], events: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(levelname)s %(message)s")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    file = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(event: Mapping[str, Any]) -> None:
        os.write(file, json.dumps(event).encode() + b"\n")

    try:
        target(say, *arguments)
    except ByzULDPError as problem:
        say({"event": "error", "status": problem.status, "message": str(problem)})
        sys.exit(problem.exit_code)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def _serve(
    say: Callable[..., None], experiment: Experiment, run_dir: Path, resume: bool, dies_at: tuple[str, int] | None
) -> None:
    from common.learning.task import build_task
    from ps import tally
    from ps.main import run_parameter_server

    tally.WRITE_EVERY_S = 0.0  # so that a test reads what has just been refused
    task = build_task(experiment)
    say({"event": "task", "schema_hash": task.schema_hash.hex(), "num_parameters": task.num_parameters})
    visits: Counter[str] = Counter()

    def fault(point: str) -> None:
        visits[point] += 1
        if (point, visits[point]) == dies_at:
            say({"event": "dies", "at": point})
            os.kill(os.getpid(), signal.SIGKILL)

    run_parameter_server(experiment, run_dir, resume=resume, report=say, fault=fault)


def _take_part(say: Callable[..., None], experiment: Experiment, address: str, tokens: Mapping[int, str]) -> None:
    from client.main import run_client

    outcome = run_client(experiment, address=address, tokens=tokens)
    say({"event": "outcome", "status": outcome.status, "message": outcome.message})


def _halt(
    say: Callable[..., None], experiment: Experiment, address: str, tokens: Mapping[int, str], frames: int
) -> None:
    import asyncio

    from client import push

    async def some(every: list[bytes]) -> Any:
        for frame in every[:frames]:
            yield frame
        say({"event": "halted", "of": len(every)})
        await asyncio.Event().wait()

    push._each = some  # a fault point that the product does not have
    _take_part(say, experiment, address, tokens)


def _attack(
    say: Callable[..., None], experiment: Experiment, address: str, tokens: Mapping[int, str], wiretap: str | None
) -> None:
    from adversary.main import run_adversary

    outcome = run_adversary(experiment, address=address, tokens=tokens, wiretap_address=wiretap)
    say({"event": "outcome", "status": outcome.status, "message": outcome.message})

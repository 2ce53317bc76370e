"""One machine, separate processes: start them, watch them, and leave none behind.

The launcher is one thread that waits for whatever happens first: an event from a child, a child's death, a signal.
It imports neither torch nor gRPC; its children are forked from a server that has imported both (see
:mod:`deploy.preload`), so that a dozen of them start in the time of one.

Who does what when things go wrong: a client process that dies is shown, and the run goes on, since that is what the
system is for; one that refuses to start because of what was asked for ends the run with its error. The parameter
server's death ends the run. Ctrl-C and SIGTERM reach the launcher alone, which asks the parameter server to end in good
order; a second Ctrl-C kills. The launcher's own death, by SIGKILL too, ends every child.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing import connection as mp_connection
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

from common.config import Experiment, experiment_from
from common.errors import RunFolderExists, StoreDamaged
from common.rpc.addresses import parse_address, refuse_insecure
from deploy.children import LAUNCHER_SIGNALS, ROLES, Assignment, run_child
from deploy.events import Event, receive
from deploy.logs import tail

__all__ = ["Ending", "Onlooker", "assign", "new_run_dir", "run_locally", "stored_experiment"]

log = logging.getLogger("byzuldp.launcher")

TICK_S = 0.2
CHECK_DEADLINE_S = 900.0  # a data set may have to be fetched
START_DEADLINE_S = 180.0  # until the parameter server listens
EVALUATE_DEADLINE_S = 300.0  # after the run's end: the last model on the whole test set
LEAVE_S, TERMINATE_S, KILL_S = 5.0, 3.0, 3.0
SECOND_CTRL_C_S = 0.3  # sooner than that it is the same one, delivered twice

# One thread each: OpenBLAS would make its threads on import, and a process with threads must not fork.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


class Onlooker(Protocol):
    """Whoever is shown what happens; a display."""

    def show(self, event: Event) -> None: ...

    def tick(self) -> None: ...


@dataclass(frozen=True)
class Ending:
    """How a run ended; ``summary`` is None when the parameter server wrote none."""

    status: str
    message: str
    run_dir: Path
    summary: Mapping[str, Any] | None = None


def run_locally(
    experiment: Experiment,
    run_dir: Path,
    onlooker: Onlooker,
    *,
    resume: bool = False,
    entries: Mapping[str, str] = ROLES,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
) -> Ending:
    """Run an experiment in processes of this machine, until it has ended and they are all gone.

    Parameters
    ----------
    run_dir
        A new folder, or with ``resume`` that of the run to go on with, under the configuration stored there.
    onlooker
        Shown the parameter server's events, and ``note``, ``warning`` events of the launcher's own.
    entries
        ``module:function`` of each role, see :class:`deploy.children.Assignment`.

    Raises
    ------
    UsageProblem, NetworkProblem, StoreProblem
        Nothing was started.
    """
    if resume:
        experiment = stored_experiment(run_dir)
    elif (run_dir / "experiment.json").exists() or (run_dir / "run.sqlite").exists():
        raise RunFolderExists(f"{run_dir}: holds a run already; continue it with --resume, or choose another --run-dir")
    address = parse_address(experiment.network.address)
    refuse_insecure(address, insecure=experiment.network.insecure)
    logs = run_dir / "operator" / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (run_dir / "operator").chmod(0o700)
    except OSError as problem:
        raise StoreDamaged(f"{run_dir}: cannot be created ({problem}); choose another --run-dir") from None
    return _Launcher(experiment, run_dir, onlooker, resume, entries, _context(start_method)).run()


def new_run_dir(name: str) -> Path:
    """``runs/<name>-<time>``, UTC; a number is added when there is one of the same second."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{k}" for k in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def stored_experiment(run_dir: Path) -> Experiment:
    """The configuration a run was started with.

    Raises
    ------
    StoreDamaged
        There is none, or it is not readable.
    """
    path = run_dir / "experiment.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise StoreDamaged(
            f"{path}: cannot be read ({problem}); --resume needs --run-dir with the folder of a run"
        ) from None
    return experiment_from(tree, where=str(path))


def assign(experiment: Experiment, run_dir: Path, entries: Mapping[str, str] = ROLES) -> list[Assignment]:
    """Who does what: one check, one parameter server, the clients in order of their ids, one adversary process.

    Every identity gets a fresh random token. The parameter server is given only the tokens' hashes, and each process
    only the tokens of its own identities.
    """
    tokens = {client_id: secrets.token_urlsafe(24) for client_id in range(experiment.federation.clients)}
    tree = experiment.model_dump(mode="json")

    def part(role: str, number: int = 0, ids: Sequence[int] = ()) -> Assignment:
        given = Assignment(role, number, entries[role], tree, run_dir, Path(), ids=tuple(ids))
        log_file = run_dir / "operator" / "logs" / f"{given.name}.log"
        return replace(given, log_file=log_file.absolute(), tokens={client_id: tokens[client_id] for client_id in ids})

    hashes = {client_id: sha256(token.encode()).digest() for client_id, token in tokens.items()}
    honest, held = experiment.honest_ids, experiment.federation.clients_per_process
    parts = [part("check"), replace(part("ps"), token_hashes=hashes)]
    parts += [
        part("client", number, honest[number * held : (number + 1) * held])
        for number in range(math.ceil(len(honest) / held))
    ]
    if experiment.num_adversaries:
        parts.append(part("adversary", 0, experiment.adversary_ids))
    return parts


@dataclass
class _Child:
    assignment: Assignment
    process: BaseProcess
    events: Connection
    last: Event | None = None
    over: bool = False
    hung_up: bool = False

    @property
    def name(self) -> str:
        return self.assignment.name

    def describe_end(self) -> str:
        """``client-3 was killed by SIGKILL``, with what its log says last unless it told us itself."""
        code = self.process.exitcode
        if self.last is not None:
            return f"{self.name}: {self.last.get('message')}"
        how = f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"died with exit code {code}"
        said = tail(self.assignment.log_file)
        return f"{self.name} {how}" + (f"; {self.assignment.log_file} ends with\n{said}" if said else "")


class _Over(Exception):
    """The run is over because of what the launcher saw."""

    def __init__(self, status: str, message: str) -> None:
        self.status, self.message = status, message


class _Launcher:
    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        onlooker: Onlooker,
        resume: bool,
        entries: Mapping[str, str],
        context: BaseContext,
    ) -> None:
        self._experiment, self._run_dir, self._onlooker = experiment, run_dir, onlooker
        self._context = context
        self._check, self._server, *self._peers = assign(experiment, run_dir, entries)
        self._server = replace(self._server, resume=resume)
        self._children: list[_Child] = []
        self._ps: _Child | None = None
        self._address, self._wiretap = "", None
        self._rounds_begun = False
        self._stop_asked_at: float | None = None
        self._ends_by = math.inf
        self._wake = -1

    def run(self) -> Ending:
        """From the first child to the last one's end."""
        ending: Ending | None = None
        with _woken_by_signals() as self._wake, _environment(CHILD_ENVIRONMENT):
            try:
                ending = self._from_start_to_end()
            except _Over as over:
                ending = self._ended(over.status, over.message)
            finally:
                self._leave_nothing_behind(in_good_order=ending is not None)
        return ending

    def _from_start_to_end(self) -> Ending:
        self._onlooker.show({"event": "note", "message": "loading PyTorch and checking the experiment"})
        checking = self._start(self._check)
        self._watch(lambda: checking.over, CHECK_DEADLINE_S, "preparing the data")
        self._ps = serving = self._start(self._server)
        self._watch(lambda: bool(self._address) or serving.over, START_DEADLINE_S, "waiting for the parameter server")
        for peer in self._peers if self._address else ():
            self._start(replace(peer, address=self._address, wiretap=self._wiretap))
        self._write_processes()
        self._watch(lambda: serving.over, math.inf, "the run")
        assert serving.last is not None  # noqa: S101 - a death without a last word has raised _Over
        status, message = serving.last["status"], serving.last["message"]
        others = [child for child in self._children if child is not serving]
        # A status is final only when the clients have heard of it, or have had their time.
        with contextlib.suppress(_Over):
            self._watch(lambda: all(child.over for child in others), LEAVE_S, "the clients' leave")
        return self._ended(status, message)

    # ---------------------------------------------------------------- starting

    def _start(self, assignment: Assignment) -> _Child:
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_child, args=(assignment, writer), name=assignment.name, daemon=True
        )
        with _shielded(), writer:
            try:
                process.start()
            except (EOFError, OSError) as problem:
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
            (self._run_dir / "operator" / "processes.json").write_text(json.dumps(found, indent=1) + "\n")

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
            if now >= min(give_up_at, self._ends_by):
                if self._stop_asked_at is not None:
                    raise _Over("interrupted", "the parameter server did not stop in time and was killed")
                raise _Over("failed", f"{doing}: not done after {deadline_s:.0f} s")
            self._take_in(min(TICK_S, give_up_at - now))

    def _take_in(self, timeout: float) -> None:
        sources: dict[Any, _Child | None] = {self._wake: None}
        for child in self._children:
            if not child.hung_up:
                sources[child.events] = child
            if not child.over:
                sources[child.process.sentinel] = child
        for ready in mp_connection.wait(list(sources), timeout):
            child = sources[ready]
            if child is None:
                self._signalled(os.read(self._wake, 4096))
            elif ready is child.events:
                self._hear(child)
            elif not child.over:
                self._ended_child(child)
        self._onlooker.tick()

    def _hear(self, child: _Child) -> None:
        try:
            event = receive(child.events)
        except EOFError:
            child.hung_up = True
            child.events.close()
            return
        if event["event"] in ("done", "failed", "crashed"):
            child.last = event
        elif child is self._ps:
            self._heard_from_ps(event)
        elif event["event"] == "note":
            self._onlooker.show(event)
        elif event["event"] == "warning":
            self._onlooker.show({**event, "message": f"{child.name}: {event.get('message')}"})

    def _heard_from_ps(self, event: Event) -> None:
        match event["event"]:
            case "listening":
                self._address, self._wiretap = str(event["address"]), event.get("wiretap")
            case "round":
                self._rounds_begun = True
            case "end":
                self._ends_by = time.monotonic() + EVALUATE_DEADLINE_S
        self._onlooker.show(event)

    def _ended_child(self, child: _Child) -> None:
        """A child is no more: good, bad, or the end of the run?"""
        while not child.hung_up and child.events.poll():  # what it said before it died
            self._hear(child)
        child.process.join(KILL_S)
        child.over = True
        outcome = child.last["event"] if child.last is not None else "died"
        if outcome == "done":
            if child.last is not None and child.assignment.role in ("client", "adversary"):
                log.info("%s left: %s", child.name, child.last["status"])
            return
        if self._stop_asked_at is not None and child is not self._ps:
            return
        if outcome == "crashed" and (said := tail(child.assignment.log_file)):
            child.last = {"event": outcome, "message": f"crashed; {child.assignment.log_file} ends with\n{said}"}
        description = child.describe_end()
        if child is self._ps or child.assignment.role == "check":
            if self._stop_asked_at is not None:
                raise _Over("interrupted", "stopped before the parameter server was ready")
            self._fail(child, description)
        if not self._rounds_begun and outcome == "failed":
            self._fail(child, description)  # what was asked for cannot be done; waiting for others would not help
        self._onlooker.show({"event": "warning", "message": description})
        clients = [other for other in self._children if other.assignment.role == "client"]
        if clients and all(other.over and not _well(other) for other in clients):
            raise _Over("failed", f"no client process is left; the last was {description}")

    def _fail(self, child: _Child, description: str) -> None:
        if child.last is not None and child.last["event"] == "failed":
            told_by = "" if child.assignment.role in ("check", "ps") else f"{child.name}: "
            raise _Over(child.last["status"], told_by + child.last["message"])
        raise _Over("failed", description)

    # ---------------------------------------------------------------- stopping

    def _signalled(self, numbers: bytes) -> None:
        now = time.monotonic()
        for number in numbers:
            if self._stop_asked_at is None:
                self._stop_asked_at = now
                self._ask_to_stop(signal.Signals(number).name)
            elif number == signal.SIGINT and now - self._stop_asked_at > SECOND_CTRL_C_S:
                self._ends_by = 0.0
                raise _Over("interrupted", "killed by a second Ctrl-C")

    def _ask_to_stop(self, why: str) -> None:
        if self._ps is None or self._ps.over or not self._address:
            raise _Over("interrupted", f"{why} before the run began")
        self._onlooker.show({"event": "note", "message": f"{why}: ending the round in good order; Ctrl-C again kills"})
        self._ps.process.terminate()
        self._ends_by = time.monotonic() + self._experiment.network.leave_deadline_s + EVALUATE_DEADLINE_S

    def _ended(self, status: str, message: str) -> Ending:
        return Ending(status, message, self._run_dir)

    def _leave_nothing_behind(self, *, in_good_order: bool) -> None:
        """End what is left: a word to the parameter server, then SIGTERM, then SIGKILL, each with its deadline."""
        if in_good_order and self._ps is not None and not self._ps.over and self._ends_by > 0:
            self._ps.process.terminate()
            self._settle(lambda: self._ps is None or self._ps.over, self._experiment.network.leave_deadline_s)
        if in_good_order and self._ends_by > 0:
            for child in self._alive():
                child.process.terminate()
            self._settle(lambda: not self._alive(), TERMINATE_S)
        for child in self._alive():
            if child.assignment.role == "check" and child.process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
        self._settle(lambda: not self._alive(), KILL_S)
        for child in self._children:
            if not child.hung_up:
                child.events.close()
        if left := [f"{child.name} (process {child.process.pid})" for child in self._alive()]:
            log.error("could not be killed: %s", ", ".join(left))

    def _alive(self) -> list[_Child]:
        return [child for child in self._children if child.process.is_alive()]

    def _settle(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Wait for ends that are expected; what the children still say is shown, their ends are not."""
        until = time.monotonic() + deadline_s
        self._stop_asked_at = self._stop_asked_at or time.monotonic()
        while not done() and time.monotonic() < until:
            with contextlib.suppress(_Over):
                self._take_in(0.05)


def _well(child: _Child) -> bool:
    return child.last is not None and child.last["event"] == "done"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -------------------------------------------------------------------- the process around the launcher


def _context(start_method: Literal["forkserver", "spawn"]) -> BaseContext:
    """Where children come from; the fork server is started here, and imports while we go on."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["deploy.preload"])
        resource_tracker.ensure_running()  # before the mask: starting it unblocks signals
        with _environment(CHILD_ENVIRONMENT), _shielded():
            forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Hold signals back while a process is started: it inherits the mask, and we miss nothing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
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
def _woken_by_signals() -> Iterator[int]:
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

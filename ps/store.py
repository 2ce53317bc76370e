"""The run folder: what the server has committed, safe against a crash at any instant.

::

    experiment.json             the effective configuration, for people; run.sqlite holds it too
    run.sqlite                  ledger, models, progress: one transaction per round (WAL, synchronous=FULL)
    models/model-<t>.safetensors  θ_t and R, the last few; ….prepared until the round is committed
    public/                     what may be shown: functions of the released aggregates and of the configuration
    operator/                   what may not: metrics, refusals (mode 0700)
    lock                        held while a server has the folder open

A round is aggregated, noised, **committed**, and only then published. The types hold that order: whatever publishes
takes a :class:`CommittedRound`, and only this module makes one, after the transaction. What was committed and not
yet published when the server died is :meth:`RunStore.latest` after the restart, and is published as it is: a round is
never noised twice.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np

from common.errors import RunFolderExists, StoreDamaged, exit_code_of
from ps import folder as layout
from ps import journal, records, tensors
from ps.durable import FolderLock, connect, explaining, reading, transaction
from ps.faults import Fault, no_fault
from ps.journal import LedgerRow, RunRecord, RunStatus
from ps.reader import RunReader
from ps.records import EvaluationRecord, Records, RefusalCount, RoundMetrics
from ps.tensors import FloatVector

__all__ = [
    "CommittedRound",
    "EvaluationRecord",
    "PreparedRound",
    "RefusalCount",
    "RoundMetrics",
    "RunReader",
    "RunStatus",
    "RunStore",
]

_SEAL = object()


@dataclass(frozen=True)
class PreparedRound:
    """A model that has been computed and noised, and not yet committed: nobody may see it.

    Attributes
    ----------
    round_id
        The round of the model this makes: t + 1.
    theta, server_momentum
        θ_{t+1} and R, float32, shape ``(d,)``.
    ledger_json
        The ledger's row, canonical JSON; opaque here.
    answered
        How many identities answered.
    notes
        What else is worth keeping about the round (JSON values).
    """

    round_id: int
    theta: FloatVector
    server_momentum: FloatVector
    ledger_json: str
    answered: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, vector in (("theta", self.theta), ("server_momentum", self.server_momentum)):
            if vector.dtype != np.float32 or vector.shape != (self.theta.size,) or not vector.size:
                raise ValueError(
                    f"{name} has dtype {vector.dtype} and shape {vector.shape}; expected float32, flat, of theta's size"
                )
        if not self.ledger_json:
            raise ValueError("ledger_json is empty; no model leaves without its row")


@final
class CommittedRound:
    """A model that is durable together with its ledger row; the only thing that may be published.

    Made by :class:`RunStore` alone; it cannot be built, subclassed, changed or unpickled elsewhere.

    Attributes
    ----------
    round_id : int
        The model's round; 0 is the initial model.
    theta, server_momentum : float32, shape (d,)
        θ and R, read-only.
    head : bytes
        Head of the ledger's hash chain, 32 bytes.
    """

    __slots__ = ("head", "round_id", "server_momentum", "theta")

    round_id: int
    theta: FloatVector
    server_momentum: FloatVector
    head: bytes

    def __init__(
        self, round_id: int, theta: FloatVector, server_momentum: FloatVector, head: bytes, *, seal: object = None
    ) -> None:
        if seal is not _SEAL:
            raise TypeError("a CommittedRound comes from RunStore.create, commit or latest only")
        for name, value in (
            ("round_id", round_id),
            ("theta", theta),
            ("server_momentum", server_momentum),
            ("head", head),
        ):
            object.__setattr__(self, name, value)

    def __init_subclass__(cls, **_: Any) -> NoReturn:
        raise TypeError("CommittedRound cannot be subclassed")

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise AttributeError(f"a committed round does not change ({name})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a committed round does not change ({name})")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError("a CommittedRound is neither copied nor pickled: only the store makes one")

    def __repr__(self) -> str:
        return f"CommittedRound(round_id={self.round_id}, d={self.theta.size}, head={self.head.hex()[:12]}…)"


class RunStore:
    """One run's folder, open for writing by one server.

    Made by :meth:`create` or :meth:`open`. One thread uses it at a time, whichever; a forked child's copy is closed.
    """

    def __init__(self, folder: Path, resources: ExitStack, fault: Fault) -> None:
        self.folder = folder
        self._fault = fault
        self._resources = resources
        self._mutex = threading.RLock()
        self._records_mutex = threading.RLock()  # a refusal is counted on the event loop while a commit writes
        self._in_doubt = False

    # set by create() and open()
    _run: RunRecord
    _lock: FolderLock
    _journal: sqlite3.Connection
    _records: Records
    _latest: CommittedRound

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def fingerprint(self) -> str:
        return self._run.fingerprint

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The effective configuration the run was created with."""
        return self._run.configuration

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        run_id: str,
        configuration: Mapping[str, Any],
        fingerprint: str,
        genesis_json: str,
        theta: FloatVector,
        keep: int = 3,
        fault: Fault = no_fault,
    ) -> tuple[RunStore, CommittedRound]:
        """Begin a run: commit the initial model θ_0 (R = 0) with the ledger's first row.

        A folder whose creation was cut short is begun again; other files in it are left alone.

        Raises
        ------
        RunFolderExists
            The folder holds a run.
        RunFolderInUse
            Another server has it open.
        StoreUnwritable
            It cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep}; at least the last model must stay")
        folder = Path(folder)
        first = PreparedRound(0, theta, np.zeros_like(theta), genesis_json)
        run = RunRecord(run_id, fingerprint, configuration, keep, theta.size, time.time())
        layout.lay_out(folder)
        with ExitStack() as resources:
            store = cls(folder, resources, fault)
            store._run = run
            store._lock_up()
            layout.refuse_orphans(folder)
            store._connect(create=True)
            path = folder / journal.FILE
            with explaining(path, "create the run's database"):
                try:
                    begun = journal.begun(store._journal, path)
                except StoreDamaged as error:
                    raise RunFolderExists(str(error)) from None
            if begun:
                raise RunFolderExists(
                    f"{folder}: holds a run already; continue it with --resume, or choose another --run-dir"
                )
            layout.refuse_rollback(folder, last=-1)
            layout.clear(folder, last=-1, keep=keep)
            layout.write_experiment(folder, configuration)
            store._open_records()
            committed = store._make_durable(first, journal.GENESIS_HEAD, founding=run)
            store._resources = resources.pop_all()
        return store, committed

    @classmethod
    def open(cls, folder: Path, *, fault: Fault = no_fault) -> RunStore:
        """Take up a run where its last committed round left it, after checking everything it stands on.

        Removes what an interrupted round left behind: temporary files, and a model without its row.

        Raises
        ------
        RunFolderInUse
            Another server has it open.
        StoreDamaged
            Not a run folder, or a file is missing, torn, changed, or older than its neighbours.
        """
        folder = Path(folder)
        path = folder / journal.FILE
        with explaining(path, "look into the run folder"):
            there = path.is_file()
        if not there:
            raise StoreDamaged(
                f"{folder}: holds no run to resume: {journal.FILE} is missing; "
                "name the folder of a run, or start one without --resume"
            )
        with ExitStack() as resources:
            store = cls(folder, resources, fault)
            store._lock_up()
            # Read-only first: a refusal leaves the folder as it was, whatever could be restored in it included. (The
            # last writer to close a database deletes its write-ahead log, damaged or not.)
            with reading(path) as database:
                if not journal.begun(database, path):
                    layout.refuse_rollback(folder, last=-1)
                    raise StoreDamaged(
                        f"{path}: the run was cut short before it began; start it again without --resume"
                    )
                journal.check_consistent(database, path)
                store._run = journal.run_record(database)
                round_id, expected = journal.last_model(database)
                head = journal.ledger(database)[-1][2]
            layout.check_experiment(folder, store.configuration)
            layout.refuse_rollback(folder, round_id)
            theta, server_momentum = tensors.read_model(folder / layout.MODELS, expected)
            store._connect(create=False)
            layout.clear(folder, last=round_id, keep=store._run.keep)
            store._latest = CommittedRound(round_id, theta, server_momentum, head, seal=_SEAL)
            store._open_records()
            store._resources = resources.pop_all()
        return store

    def commit(self, prepared: PreparedRound) -> CommittedRound:
        """Make a round durable: the tensors first, then ledger, model row and progress in one transaction.

        Returns
        -------
        CommittedRound
            What may now be published.

        Raises
        ------
        StoreUnwritable
            Nothing was committed, unless the message says that this is in doubt; the last round stands. When it is
            not in doubt, the *same* prepared round may be tried again.
        ValueError
            Not the next round of this run.
        """
        with self._mutex:
            self._check_open()
            if self._in_doubt:
                raise StoreDamaged(
                    f"{self.folder / journal.FILE}: an earlier commit failed half-way, and only the file knows how it "
                    "ended; stop the server and continue with --resume"
                )
            if prepared.round_id != self._latest.round_id + 1:
                raise ValueError(f"round {prepared.round_id} was prepared; next is {self._latest.round_id + 1}")
            if prepared.theta.size != self._run.parameters:
                raise ValueError(f"{prepared.theta.size} parameters; this run has {self._run.parameters}")
            committed = self._make_durable(prepared, self._latest.head)
            old = self.folder / layout.MODELS / tensors.file_name(prepared.round_id - self._run.keep)
            if committed.theta.nbytes < tensors.HASHED_BESIDE:
                _remove(old)
            else:  # giving so many blocks back takes the file system a while, which the round need not wait for
                threading.Thread(target=_remove, args=(old,), name="models").start()
            return committed

    def latest(self) -> CommittedRound:
        """The last committed round."""
        return self._latest

    def ledger_rows(self) -> list[LedgerRow]:
        """All committed ledger rows, in order: (round, canonical JSON, head)."""
        with self._using(journal.FILE, "read the ledger"):
            return journal.ledger(self._journal)

    def status(self) -> RunStatus:
        with self._using(journal.FILE, "read the run's status"):
            return journal.run_status(self._journal)

    def note_late(self, round_id: int) -> None:
        """Say, durably and before it happens, that a model is published behind the public schedule."""
        with self._using(journal.FILE, "note a late model"), transaction(self._journal):
            journal.note_late(self._journal, round_id)

    def late_models(self) -> int:
        """How many models were published behind the public schedule."""
        with self._using(journal.FILE, "read the run's models"):
            return journal.late_models(self._journal)

    def finish(self, status: str, message: str = "") -> None:
        """Say, durably, how the run ended; committing another round makes it ``running`` again.

        Raises
        ------
        KeyError
            ``status`` is neither ``completed`` nor that of an error of :mod:`common.errors`.
        """
        exit_code_of(status)
        with self._using(journal.FILE, "store the run's status"), transaction(self._journal):
            journal.set_status(self._journal, status, message)

    def record_round(self, metrics: RoundMetrics) -> None:
        """Record how a round went; not durable against a loss of power (see :mod:`ps.records`)."""
        with self._records_mutex:  # each round's: what _using() does beside is done by the records too
            self._check_open()
            self._records.round(metrics)

    def record_evaluation(self, round_id: int, accuracy: float, loss: float, images: int) -> None:
        with self._using():
            self._records.evaluation(EvaluationRecord(round_id, accuracy, loss, images))

    def record_refusals(self, counts: Iterable[RefusalCount]) -> None:
        """Add counts to those recorded; ``client_id`` None when the sender is nobody we know."""
        with self._using():
            self._records.refusals(counts)

    def rounds(self) -> list[RoundMetrics]:
        with self._using():
            return self._records.read(records.rounds)

    def evaluations(self) -> list[EvaluationRecord]:
        with self._using():
            return self._records.read(records.evaluations)

    def refusals(self) -> list[RefusalCount]:
        with self._using():
            return self._records.read(records.refusals)

    def close(self) -> None:
        """Close the files and release the lock; closing twice does nothing."""
        with self._mutex, self._records_mutex:
            self._resources.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock_up(self) -> None:
        self._lock = FolderLock(self.folder / layout.LOCK)
        self._resources.callback(self._lock.close)

    def _connect(self, *, create: bool) -> None:
        path = self.folder / journal.FILE
        with explaining(path, "open the run's database"):
            self._journal = connect(path, synchronous="FULL", create=create)
        self._resources.callback(self._journal.close)

    def _open_records(self) -> None:
        self._records = Records(self.folder / records.FILE)
        self._resources.callback(self._records.close)

    def _check_open(self) -> None:
        if not self._lock.held:
            raise RuntimeError(f"{self.folder}: this run store is closed, or belongs to the process that forked")

    @contextmanager
    def _using(self, file: str = records.FILE, doing: str = "record the run's metrics") -> Iterator[None]:
        mutex = self._records_mutex if file == records.FILE else self._mutex
        with mutex, explaining(self.folder / file, doing):
            self._check_open()
            yield

    def _make_durable(
        self, prepared: PreparedRound, previous_head: bytes, founding: RunRecord | None = None
    ) -> CommittedRound:
        head = journal.next_head(previous_head, prepared.ledger_json)
        models = self.folder / layout.MODELS
        self._fault("before_tensor")
        with explaining(models / tensors.file_name(prepared.round_id), "write the model"):
            model, theta, server_momentum = tensors.write_model(
                models,
                prepared.round_id,
                prepared.theta,
                prepared.server_momentum,
                written=lambda: self._fault("tensor_written"),
            )
        self._fault("tensor_renamed")
        with explaining(self.folder / journal.FILE, f"commit round {prepared.round_id}"), transaction(self._journal):
            if founding is not None:
                journal.found(self._journal, founding)
            journal.append(
                self._journal,
                prepared.round_id,
                prepared.ledger_json,
                head,
                model,
                answered=prepared.answered,
                notes=prepared.notes,
            )
            self._fault("before_commit")
            # If COMMIT itself fails, or a signal interrupts it, the rows may be on the disk or not.
            self._in_doubt = True
        self._latest = CommittedRound(prepared.round_id, theta, server_momentum, head, seal=_SEAL)
        self._in_doubt = False
        self._fault("after_commit")
        with suppress(OSError):  # the round stands; the next open() does this again
            tensors.settle(models, prepared.round_id)
        return self._latest


def _remove(model: Path) -> None:
    """The round stands: whatever keeps an old model from going is left to the next :meth:`RunStore.open`."""
    with suppress(OSError):
        model.unlink(missing_ok=True)

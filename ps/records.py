"""``operator/metrics.sqlite``: how the rounds went, for the operator's eyes; nothing here decides anything.

A database of its own, in WAL mode with ``synchronous=NORMAL``, written by a thread of its own: a record never slows the
commit of a round. The death of the process may take the rounds of the last half second, a loss of power a
little more; neither damages the file (with ``OFF`` it could). The ledger's guarantees rest on ``run.sqlite`` alone. It
lies in ``operator/`` since who was missing, and when, is not for the public. ε is recomputed from the ledger, never
recorded.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ps.durable import connect, explaining, reading, transaction
from ps.spans import Span, pack, unpack

__all__ = [
    "FILE",
    "EvaluationRecord",
    "Records",
    "RefusalCount",
    "RoundMetrics",
    "Span",
    "evaluations",
    "refusals",
    "rounds",
    "spans",
]

FILE = "operator/metrics.sqlite"
IF_DAMAGED = "move the file away (with its -wal and -shm): the run does not depend on it, and goes on with --resume"
T = TypeVar("T")

_Row = tuple[float | str | bytes, ...]
_Write = tuple[str, tuple[_Row, ...]]
"""A statement, and the rows it is for."""

GATHER_S = 0.5
"""So long a record waits for others. A process that is killed loses no more than what came since."""
MOVE_EVERY = 256  # writes, of two pages or so

NO_CLIENT = -1  # NULL would make every row of the key distinct

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
  round_id INTEGER PRIMARY KEY, started_at REAL NOT NULL, latency_s REAL NOT NULL, segments TEXT NOT NULL,
  answered INTEGER NOT NULL, missing TEXT NOT NULL, bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL,
  spans BLOB
);
CREATE TABLE IF NOT EXISTS evaluations (
  round_id INTEGER PRIMARY KEY, accuracy REAL, loss REAL, images INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS refusals (
  kind TEXT NOT NULL, client_id INTEGER NOT NULL, count INTEGER NOT NULL, first_round INTEGER NOT NULL,
  last_round INTEGER NOT NULL, PRIMARY KEY (kind, client_id)
);
"""


@dataclass(frozen=True)
class RoundMetrics:
    """How one round went, from θ_t available to θ_{t+1} available."""

    round_id: int
    started_at: float
    """Unix time, seconds."""
    latency_s: float
    segments: Mapping[str, float] = field(default_factory=dict)
    """Where the time went, in order: name to seconds. They follow one another, and add up to ``latency_s``."""
    answered: int = 0
    missing: tuple[int, ...] = ()
    """The identities without an answer; operator only."""
    bytes_down: int = 0
    bytes_up: int = 0
    spans: Sequence[Span] = ()
    """What else took time, at the same time; operator only."""


@dataclass(frozen=True)
class EvaluationRecord:
    """How the model of a round did on the public test set; NaN loss means the model diverged."""

    round_id: int
    accuracy: float
    loss: float
    images: int


@dataclass(frozen=True)
class RefusalCount:
    """How often one kind of message of one client was refused."""

    kind: str
    client_id: int | None
    """None: the sender was nobody we know."""
    count: int
    first_round: int
    last_round: int


class Records:
    """The writer; one per run folder, under the store's lock.

    A thread of its own writes, a few tenths of a second at a time: whoever records a round hands it over, and neither
    waits for the disk nor pays for a transaction. What could not be written, the next one who records or reads is told.
    Evaluations and refusals are rare, and written when the call returns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0
        with explaining(path, "open the run's metrics", damaged=IF_DAMAGED):
            self._connection = connect(path, synchronous="NORMAL", create=True)
            try:
                self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # see _move_now_and_then
                self._connection.executescript(_SCHEMA)
                if not _has_spans(self._connection):
                    self._connection.execute("ALTER TABLE rounds ADD COLUMN spans BLOB")
            except BaseException:
                self._connection.close()
                raise
        self._waiting = queue.SimpleQueue[_Write | threading.Event | None]()
        self._urgent = threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is waiting, and stop."""
        self._waiting.put(None)
        self._urgent.set()
        self._thread.join()
        self._connection.close()

    def flush(self) -> None:
        """Wait until everything is written.

        Raises
        ------
        StoreProblem
            Something could not be.
        """
        written = threading.Event()
        self._waiting.put(written)
        self._urgent.set()  # after that, so that whoever hears it finds it
        written.wait()
        self._raise()

    def _raise(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _work(self) -> None:
        closed = False
        while not closed:
            taken = [self._waiting.get()]
            self._urgent.wait(GATHER_S)
            self._urgent.clear()
            with suppress(queue.Empty):
                while True:
                    taken.append(self._waiting.get_nowait())
            self._problem = self._write_all([item for item in taken if isinstance(item, tuple)]) or self._problem
            for item in taken:
                if isinstance(item, threading.Event):
                    item.set()
            closed = None in taken

    def _write_all(self, writes: Sequence[_Write]) -> Exception | None:
        """What went wrong, whatever it is: a thread that died would leave everybody waiting who asks it to write."""
        if not writes:
            return None
        try:
            with explaining(self._path, "record the run's metrics", damaged=IF_DAMAGED), transaction(self._connection):
                for statement, rows in writes:
                    self._connection.executemany(statement, rows)
                self._written += len(writes)
            self._move_now_and_then()
        except Exception as problem:
            return problem
        return None

    def _move_now_and_then(self) -> None:
        """SQLite's log is moved into the database, which costs an fsync."""
        if self._written >= MOVE_EVERY:
            self._written = 0
            with explaining(self._path, "move the log into the database", damaged=IF_DAMAGED):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def round(self, metrics: RoundMetrics) -> None:
        """Record a round; one that is run again after a crash replaces the record of its first try."""
        row = (
            metrics.round_id,
            metrics.started_at,
            metrics.latency_s,
            _segments_template(tuple(metrics.segments)) % tuple(metrics.segments.values()),
            metrics.answered,
            json.dumps(metrics.missing) if metrics.missing else "[]",
            metrics.bytes_down,
            metrics.bytes_up,
            pack(metrics.spans),
        )
        self._hand_over("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def evaluation(self, record: EvaluationRecord) -> None:
        row = (record.round_id, record.accuracy, record.loss, record.images)
        self._hand_over("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", row)
        self.flush()

    def refusals(self, counts: Iterable[RefusalCount]) -> None:
        """Add counts to those that are there."""
        self._hand_over(
            "INSERT INTO refusals VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, client_id) DO UPDATE SET "
            "count = count + excluded.count, last_round = max(last_round, excluded.last_round)",
            *(
                (c.kind, NO_CLIENT if c.client_id is None else c.client_id, c.count, c.first_round, c.last_round)
                for c in counts
            ),
        )
        self.flush()

    def read(self, query: Callable[[sqlite3.Connection], list[T]]) -> list[T]:
        """Ask :func:`rounds`, :func:`evaluations` or :func:`refusals`."""
        self.flush()
        with reading(self._path, damaged=IF_DAMAGED) as connection:
            return query(connection)

    def _hand_over(self, statement: str, *rows: _Row) -> None:
        self._waiting.put((statement, rows))
        if self._problem is not None:
            self._raise()


@lru_cache
def _segments_template(names: tuple[str, ...]) -> str:
    """JSON with a place for each number, to nine digits: ``json`` would take five times as long."""
    return "{" + ", ".join(f"{json.dumps(name).replace('%', '%%')}: %.9g" for name in names) + "}"


def rounds(connection: sqlite3.Connection) -> list[RoundMetrics]:
    """All of them, in order; without their spans, which are asked for apart."""
    return [
        RoundMetrics(round_id, started, latency, json.loads(segments), answered, tuple(json.loads(missing)), down, up)
        for round_id, started, latency, segments, answered, missing, down, up in connection.execute(
            "SELECT round_id, started_at, latency_s, segments, answered, missing, bytes_down, bytes_up "
            "FROM rounds ORDER BY round_id"
        )
    ]


def spans(connection: sqlite3.Connection, round_id: int) -> list[Span]:
    """What happened during one round; empty for one that was recorded before there were spans."""
    if not _has_spans(connection):
        return []
    row = connection.execute("SELECT spans FROM rounds WHERE round_id = ?", (round_id,)).fetchone()
    return list(unpack(row[0])) if row is not None and row[0] is not None else []


def _has_spans(connection: sqlite3.Connection) -> bool:
    return any(name == "spans" for _, name, *_ in connection.execute("PRAGMA table_info(rounds)"))


def evaluations(connection: sqlite3.Connection) -> list[EvaluationRecord]:
    # SQLite stores NaN as NULL.
    nan = float("nan")
    return [
        EvaluationRecord(round_id, nan if accuracy is None else accuracy, nan if loss is None else loss, images)
        for round_id, accuracy, loss, images in connection.execute(
            "SELECT round_id, accuracy, loss, images FROM evaluations ORDER BY round_id"
        )
    ]


def refusals(connection: sqlite3.Connection) -> list[RefusalCount]:
    return [
        RefusalCount(kind, None if client_id == NO_CLIENT else client_id, count, first, last)
        for kind, client_id, count, first, last in connection.execute(
            "SELECT kind, client_id, count, first_round, last_round FROM refusals ORDER BY kind, client_id"
        )
    ]

"""``operator/metrics.sqlite``: how the rounds went, for the operator's eyes; nothing here decides anything.

A database of its own, in WAL mode with ``synchronous=NORMAL``: a record costs no fsync, so it never slows the commit
of a round; it survives the death of the process, and a loss of power may take the last records, never damage the
file (with ``OFF`` it could). The ledger's guarantees rest on ``run.sqlite`` alone. It lies in ``operator/`` since
who was missing, and when, is not for the public. ε is recomputed from the ledger, never recorded.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from common.errors import StoreProblem
from ps.durable import connect, explaining, transaction
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
    """The writer; one per run folder, under the store's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0
        self._moving: threading.Thread | None = None
        with explaining(path, "open the run's metrics", damaged=IF_DAMAGED):
            self._connection = connect(path, synchronous="NORMAL", create=True)
            try:
                self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # see _wrote
                self._connection.executescript(_SCHEMA)
                if not _has_spans(self._connection):
                    self._connection.execute("ALTER TABLE rounds ADD COLUMN spans BLOB")
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        if self._moving is not None:
            self._moving.join()
        self._connection.close()

    def _wrote(self) -> None:
        """Now and then SQLite's log is moved into the database, which costs an fsync: not on the thread that records,
        which is the event loop's."""
        self._written += 1
        if self._written >= MOVE_EVERY and (self._moving is None or not self._moving.is_alive()):
            self._written = 0
            self._moving = threading.Thread(target=self._move, name="records", daemon=True)
            self._moving.start()

    def _move(self) -> None:
        with suppress(StoreProblem), explaining(self._path, "move the log into the database", damaged=IF_DAMAGED):
            connection = connect(self._path, synchronous="NORMAL", create=False)
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                connection.close()

    def round(self, metrics: RoundMetrics) -> None:
        """Record a round; one that is run again after a crash replaces the record of its first try."""
        self._write(
            "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            metrics.round_id,
            metrics.started_at,
            metrics.latency_s,
            _segments_template(tuple(metrics.segments)) % tuple(metrics.segments.values()),
            metrics.answered,
            json.dumps(metrics.missing),
            metrics.bytes_down,
            metrics.bytes_up,
            pack(metrics.spans),
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            record.round_id,
            record.accuracy,
            record.loss,
            record.images,
        )

    def refusals(self, counts: Iterable[RefusalCount]) -> None:
        """Add counts to those that are there."""
        with explaining(self._path, "record the run's metrics", damaged=IF_DAMAGED), transaction(self._connection):
            self._connection.executemany(
                "INSERT INTO refusals VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, client_id) DO UPDATE SET "
                "count = count + excluded.count, last_round = max(last_round, excluded.last_round)",
                [
                    (c.kind, NO_CLIENT if c.client_id is None else c.client_id, c.count, c.first_round, c.last_round)
                    for c in counts
                ],
            )
        self._wrote()

    def read(self, query: Callable[[sqlite3.Connection], list[T]]) -> list[T]:
        """Ask :func:`rounds`, :func:`evaluations` or :func:`refusals`."""
        with explaining(self._path, "read the run's metrics", damaged=IF_DAMAGED):
            return query(self._connection)

    def _write(self, statement: str, *values: float | str | bytes) -> None:
        with explaining(self._path, "record the run's metrics", damaged=IF_DAMAGED):
            self._connection.execute(statement, values)  # one statement is a transaction
        self._wrote()


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

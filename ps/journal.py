"""``run.sqlite``: what was committed, append-only, and the chain that ties its rows together.

One transaction per round adds the ledger's row, the model's row and the progress of the run. The ledger's rows are
opaque here (canonical JSON, written by :mod:`ps.privacy`); the chain over them is not:
head_k = SHA-256(head_{k−1} ‖ row_k in UTF-8), with 32 zero bytes before the first row.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.errors import StoreDamaged
from ps.tensors import TensorFile

__all__ = [
    "FILE",
    "GENESIS_HEAD",
    "LedgerRow",
    "RunRecord",
    "RunStatus",
    "append",
    "begun",
    "check_consistent",
    "found",
    "last_model",
    "late_models",
    "ledger",
    "next_head",
    "note_late",
    "run_record",
    "run_status",
    "set_status",
]

FILE = "run.sqlite"
GENESIS_HEAD = bytes(32)
VERSION = 1
APPLICATION_ID = 0x427A4C44  # "BzLD": what `file` and this module know the database by

_REMEDY = "restore the whole run folder from a backup taken at its last round, or choose another --run-dir"

LedgerRow = tuple[int, str, bytes]
"""Round of the model the row pays for, canonical JSON, head of the chain after it (32 bytes)."""

_SCHEMA = f"""
CREATE TABLE run (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  run_id TEXT NOT NULL, fingerprint TEXT NOT NULL, configuration TEXT NOT NULL, keep INTEGER NOT NULL,
  parameters INTEGER NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
  round_id INTEGER NOT NULL, status TEXT NOT NULL, message TEXT NOT NULL
);
CREATE TABLE ledger (
  round_id INTEGER PRIMARY KEY, entry TEXT NOT NULL, head BLOB NOT NULL CHECK (length(head) = 32)
);
CREATE TABLE models (
  round_id INTEGER PRIMARY KEY REFERENCES ledger, file TEXT NOT NULL, sha256 TEXT NOT NULL, size INTEGER NOT NULL,
  parameters INTEGER NOT NULL, answered INTEGER NOT NULL, notes TEXT NOT NULL, committed_at REAL NOT NULL
);
CREATE TRIGGER ledger_rows_stay BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER ledger_rows_live BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True)
class RunRecord:
    """What a run is; fixed when it is created."""

    run_id: str
    fingerprint: str
    configuration: Mapping[str, Any]
    keep: int
    """How many model files stay."""
    parameters: int
    """d."""
    created_at: float
    """Unix time, seconds."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run is."""

    status: str
    """``running``, ``completed``, or the status of an error of :mod:`common.errors`. A run whose server was killed
    still says ``running``."""
    message: str
    round_id: int
    """The last committed model's round; 0 is the initial model."""
    created_at: float
    updated_at: float
    """Unix time, seconds."""


def next_head(head: bytes, entry: str) -> bytes:
    """The head of the chain after one more row."""
    return sha256(head + entry.encode()).digest()


def begun(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database holds a run; False when it is still empty (its creation was cut short).

    Raises
    ------
    StoreDamaged
        It is a database of something else, or of a newer version.
    """
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return False
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreDamaged(f"{path}: a database, but not of a ByzULDP run; choose another --run-dir")
    if version != VERSION:
        raise StoreDamaged(
            f"{path}: written by version {version} of the run folder, this program reads version {VERSION}; "
            "use the program that wrote it, or choose another --run-dir"
        )
    return True


def found(connection: sqlite3.Connection, run: RunRecord) -> None:
    """Make the tables and the run's own row; inside the transaction that commits the initial model."""
    for statement in _statements(_SCHEMA):
        connection.execute(statement)
    connection.execute(
        "INSERT INTO run VALUES (1, ?, ?, ?, ?, ?, ?, ?, -1, 'running', '')",
        (
            run.run_id,
            run.fingerprint,
            json.dumps(run.configuration, sort_keys=True, allow_nan=False),
            run.keep,
            run.parameters,
            run.created_at,
            run.created_at,
        ),
    )


def _statements(script: str) -> list[str]:
    # executescript() would commit the open transaction first.
    statements, pending = [], ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


def append(
    connection: sqlite3.Connection,
    round_id: int,
    entry: str,
    head: bytes,
    model: TensorFile,
    *,
    answered: int,
    notes: Mapping[str, Any],
) -> None:
    """Add one round's rows and move the run on; inside one transaction."""
    now = time.time()
    connection.execute("INSERT INTO ledger VALUES (?, ?, ?)", (round_id, entry, head))
    connection.execute(
        "INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            round_id,
            model.name,
            model.sha256,
            model.size,
            model.parameters,
            answered,
            json.dumps(notes, sort_keys=True, allow_nan=False),
            now,
        ),
    )
    connection.execute("UPDATE run SET round_id = ?, status = 'running', message = '', updated_at = ?", (round_id, now))


def note_late(connection: sqlite3.Connection, round_id: int) -> None:
    """The model of a round is about to be published behind the public schedule."""
    connection.execute(
        "UPDATE models SET notes = json_set(notes, '$.late', json('true')) WHERE round_id = ?", (round_id,)
    )


def late_models(connection: sqlite3.Connection) -> int:
    """How many models were published behind the public schedule."""
    (number,) = connection.execute("SELECT count(*) FROM models WHERE json_extract(notes, '$.late')").fetchone()
    return int(number)


def set_status(connection: sqlite3.Connection, status: str, message: str) -> None:
    connection.execute("UPDATE run SET status = ?, message = ?, updated_at = ?", (status, message, time.time()))


def run_record(connection: sqlite3.Connection) -> RunRecord:
    """What the run is.

    Raises
    ------
    StoreDamaged
        The stored configuration is none.
    """
    run_id, fingerprint, text, keep, parameters, created_at = connection.execute(
        "SELECT CAST(run_id AS TEXT), CAST(fingerprint AS TEXT), CAST(configuration AS TEXT), keep, parameters, "
        "created_at FROM run"
    ).fetchone()
    try:
        configuration = json.loads(text)
        if not isinstance(configuration, dict):
            raise ValueError("not a JSON object")
    except ValueError as problem:
        (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
        raise StoreDamaged(f"{path}: the stored configuration is damaged ({problem}); {_REMEDY}") from None
    return RunRecord(run_id, fingerprint, configuration, keep, parameters, created_at)


def run_status(connection: sqlite3.Connection) -> RunStatus:
    row = connection.execute("SELECT status, message, round_id, created_at, updated_at FROM run").fetchone()
    return RunStatus(*row)


def ledger(connection: sqlite3.Connection) -> list[LedgerRow]:
    # A flipped bit can change a value's type too; then it does not fit the chain.
    return connection.execute(
        "SELECT round_id, CAST(entry AS TEXT), CAST(head AS BLOB) FROM ledger ORDER BY round_id"
    ).fetchall()


def last_model(connection: sqlite3.Connection) -> tuple[int, TensorFile]:
    """The round and the file of the last committed model."""
    round_id, *file = connection.execute(
        "SELECT round_id, CAST(file AS TEXT), CAST(sha256 AS TEXT), size, parameters FROM models "
        "ORDER BY round_id DESC LIMIT 1"
    ).fetchone()
    return round_id, TensorFile(*file)


def check_consistent(connection: sqlite3.Connection, path: Path) -> None:
    """Check the file, the chain, and that every row has its partner.

    Raises
    ------
    StoreDamaged
        Naming the first row that is wrong.
    """
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StoreDamaged(f"{path}: damaged ({' '.join(verdict.split())}); {_REMEDY}")
    head = GENESIS_HEAD
    rows = ledger(connection)
    for expected, (round_id, entry, recorded) in enumerate(rows):
        if round_id != expected:
            raise StoreDamaged(f"{path}: the ledger's row of round {expected} is missing; {_REMEDY}")
        head = next_head(head, entry)
        if head != recorded:
            raise StoreDamaged(f"{path}: the ledger's row of round {round_id} does not fit the hash chain; {_REMEDY}")
    models = [round_id for (round_id,) in connection.execute("SELECT round_id FROM models ORDER BY round_id")]
    progress = connection.execute("SELECT round_id FROM run").fetchone()
    if not rows or models != list(range(len(rows))) or progress != (len(rows) - 1,):
        raise StoreDamaged(
            f"{path}: the ledger has {len(rows)} rows, but there are {len(models)} models and the run is at round "
            f"{progress[0] if progress else 'none'}; {_REMEDY}"
        )
    sizes = connection.execute("SELECT parameters FROM models UNION SELECT parameters FROM run").fetchall()
    if len(sizes) != 1:
        raise StoreDamaged(f"{path}: its models have {len(sizes)} different numbers of parameters; {_REMEDY}")

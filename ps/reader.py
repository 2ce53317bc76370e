"""Reading a run folder without touching it: for the command line, the report and the launcher.

Takes no lock and writes nothing in the folder's files, so it works beside a running server and in a read-only folder.
Every call reads anew and holds nothing open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from common.errors import StoreDamaged
from ps import journal, records
from ps.durable import explaining, reading
from ps.folder import MODELS, newest_model, refuse_rollback
from ps.journal import LedgerRow, RunRecord, RunStatus
from ps.records import EvaluationRecord, RefusalCount, RoundMetrics, Span
from ps.tensors import FloatVector, read_model

__all__ = ["RunReader"]

T = TypeVar("T")


class RunReader:
    """A run folder, read-only.

    Parameters
    ----------
    folder
        The run folder.

    Attributes
    ----------
    run : RunRecord
        What the run is: run id, fingerprint, configuration, d.

    Raises
    ------
    StoreProblem
        The folder holds no run (or none yet), or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.run: RunRecord = self._committed(journal.run_record)

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def status(self) -> RunStatus:
        return self._committed(journal.run_status)

    def ledger_rows(self) -> list[LedgerRow]:
        """All committed rows, in order; :func:`verify` checks them."""
        return self._committed(journal.ledger)

    def verify(self) -> bytes:
        """Check the journal's integrity and its hash chain; returns the head.

        Raises
        ------
        StoreDamaged
            Naming the first row that is wrong.
        """
        newest = newest_model(self.folder)  # before the database is read: a running server adds to both
        self._committed(lambda connection: journal.check_consistent(connection, self.folder / journal.FILE))
        rows = self.ledger_rows()
        refuse_rollback(self.folder, last=rows[-1][0], newest=newest)
        return rows[-1][2]

    def late_models(self) -> int:
        """How many models were published behind the public schedule."""
        return self._committed(journal.late_models)

    def last_model(self) -> tuple[int, FloatVector, FloatVector]:
        """The last committed model: its round, θ and R, checked against the row that was committed with it.

        Raises
        ------
        StoreDamaged
            The file is missing, torn or changed.
        """
        round_id, expected = self._committed(journal.last_model)
        return round_id, *read_model(self.folder / MODELS, expected)

    def rounds(self) -> list[RoundMetrics]:
        return self._recorded(records.rounds)

    def spans(self, round_id: int) -> list[Span]:
        """What happened during one round, beside its segments."""
        return self._recorded(lambda connection: records.spans(connection, round_id))

    def evaluations(self) -> list[EvaluationRecord]:
        return self._recorded(records.evaluations)

    def refusals(self) -> list[RefusalCount]:
        return self._recorded(records.refusals)

    def _committed(self, query: Callable[[sqlite3.Connection], T]) -> T:
        path = self.folder / journal.FILE
        with explaining(path, "look into the run folder"):
            there = path.exists()
        if not there:
            raise StoreDamaged(f"{self.folder}: not a run folder: {journal.FILE} is missing; name the folder of a run")
        with reading(path) as connection:
            if not journal.begun(connection, path):
                raise StoreDamaged(f"{path}: the run has not begun; try again, or start it with `byzuldp run`")
            return query(connection)

    def _recorded(self, query: Callable[[sqlite3.Connection], list[T]]) -> list[T]:
        path = self.folder / records.FILE
        with explaining(path, "look into the run folder"):
            there = path.exists()
        if not there:
            return []  # the server makes it just after the run's first commit
        with reading(path, damaged=records.IF_DAMAGED) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'refusals'").fetchone():
                return []
            return query(connection)

"""A sweep from its plan to its tables: what is missing is run, what was run is not run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from deploy.progress import seconds_words
from deploy.sweep.backends import Backend
from deploy.sweep.job import Job
from deploy.sweep.log import Recorded, Recorder, recorded
from deploy.sweep.plan import Plan
from deploy.sweep.plots import draw
from deploy.sweep.points import Point, shown
from deploy.sweep.results import Row
from deploy.sweep.selection import best_of, summary_text
from deploy.sweep.table import TABLE, columns_of, read_table, records_of, write_csv, write_parquet, write_text

__all__ = ["Sweep"]

Say = Callable[[str], None]

TABLE_EVERY_S = 10.0


@dataclass(frozen=True)
class Sweep:
    """A plan and its folder.

    Attributes
    ----------
    out
        Holds ``table.csv``, ``log/``, ``summary.md``, ``best.csv``, ``plots/`` and, while they are made, ``runs/``.
    keep_runs
        Whether the run folders stay.
    """

    plan: Plan
    out: Path
    say: Say
    keep_runs: bool = False

    def outcomes(self) -> tuple[dict[str, Row], Recorded]:
        """What is known of the plan's runs, from the table and from the logs; and the logs."""
        log, table = recorded(self.out), read_table(self.out / TABLE)
        rows: dict[str, Row] = {}
        for point in self.plan.points:
            row, listed = log.row(point.key), table.get(point.key)
            if row is None or (listed is not None and listed.done and not row.done):
                row = listed
            if row is not None:
                # What the grid set is what it sets now; in the table it was text.
                rows[point.key] = Row(**row.as_json() | {"values": dict(point.values)}).tried(log.begun[point.key])
        return rows, log

    def missing(self, *, retry_failed: bool = False) -> list[Point]:
        """The runs to be made, in the order of the grid."""
        rows, _ = self.outcomes()
        return [
            point
            for point in self.plan.points
            if (row := rows.get(point.key)) is None or (retry_failed and not row.done)
        ]

    def run(self, backend: Backend, *, retry_failed: bool = False) -> dict[str, Row]:
        """Run what is missing, keeping the table up to date; returns all outcomes.

        Whatever ends this, what had ended before is recorded: calling it again goes on from there.

        Raises
        ------
        RunFolderInUse
            Another process runs this sweep.
        StoreProblem
            The folder cannot be read or written.
        """
        with Recorder(self.out, "sweep") as recorder:
            rows, log = self.outcomes()
            self._adopt(recorder, log)
            todo = self.missing(retry_failed=retry_failed)
            done = len(self.plan.points) - len(todo)
            rest = f"; {min(backend.width, len(todo))} at a time" if todo else ""
            self.say(f"{len(self.plan.points)} runs, {done} of them done{rest}")
            began_at = shown_at = time.monotonic()
            points, spent = {point.key: point for point in todo}, 0.0
            counted = dict(log.begun)

            def begun(job: Job) -> None:
                counted[job.key] = counted.get(job.key, 0) + 1
                recorder.begun(job.key)

            try:
                with closing(backend.rows([self.job(point) for point in todo], begun)) as ended:
                    for number, told in enumerate(ended, start=1):
                        row = told.tried(counted[told.key])
                        recorder.ended(row)
                        rows[row.key] = row
                        spent += row.seconds
                        left = spent / number * (len(todo) - number) / max(1, min(backend.width, len(todo)))
                        self._tell(row, points[row.key], done + number, left)
                        if time.monotonic() - shown_at >= TABLE_EVERY_S:
                            shown_at = time.monotonic()
                            self._table(rows)
            finally:
                self.write(rows)
        if todo:
            self.say(f"{len(todo)} runs in {seconds_words(time.monotonic() - began_at)}")
        return rows

    def run_one(self, index: int, backend: Backend) -> Row:
        """Run one of the grid, as a task of a job array does, and record it in a log of its own; no tables.

        Raises
        ------
        ConfigError
            There is no such run.
        """
        if not 0 <= index < len(self.plan.points):
            raise ConfigError(
                f"--only {index}: {self.plan.source} has runs 0 to {len(self.plan.points) - 1}; was the file changed "
                "after the script was written?"
            )
        point = self.plan.points[index]
        with Recorder(self.out, f"run-{point.key}") as recorder:
            known, _ = self.outcomes()
            if (row := known.get(point.key)) is not None and row.done:
                self.say(f"{point.name}: done before")
                return row
            (row,) = backend.rows([self.job(point)], lambda job: recorder.begun(job.key))
            recorder.ended(row)
        self._tell(row, point, index + 1, None)
        return row

    def job(self, point: Point) -> Job:
        """What a backend is given."""
        tree = point.experiment.model_dump(mode="json")
        return Job(point.key, dict(point.values), tree, str(self.out.absolute() / "runs" / point.key), self.keep_runs)

    def write(self, rows: Mapping[str, Row]) -> list[Path]:
        """Tables, choices and pictures of what is known; the paths written."""
        written = self._table(rows)
        write_text(self.out / "summary.md", summary_text(self.plan, rows))
        written.append(self.out / "summary.md")
        if self.plan.select is not None:
            best = [
                {
                    **item.fixed,
                    **{f"best {key}": value for key, value in item.chosen.items()},
                    f"{self.plan.select.by}_mean": item.mean,
                    f"{self.plan.select.by}_std": item.std,
                    "seeds": item.seeds,
                    "choices": item.candidates,
                    "epsilon_per_run": item.epsilon,
                    "epsilon_of_search": item.search.epsilon,
                    "delta_of_search": item.search.delta,
                    "runs_of_search": item.search.runs,
                }
                for item in best_of(self.plan, rows)
            ]
            if best:
                write_csv(self.out / "best.csv", best, list(best[0]))
                written.append(self.out / "best.csv")
        return written + draw(self.plan, rows, self.out / "plots")

    def failures(self, rows: Mapping[str, Row]) -> list[tuple[Point, Row]]:
        """The runs that gave nothing."""
        found = ((point, rows.get(point.key)) for point in self.plan.points)
        return [(point, row) for point, row in found if row is not None and not row.done]

    def _table(self, rows: Mapping[str, Row]) -> list[Path]:
        records, columns = records_of(self.plan.points, rows), columns_of(self.plan.keys)
        write_csv(self.out / TABLE, records, columns)
        written = [self.out / TABLE]
        if write_parquet(self.out / "table.parquet", records, columns):
            written.append(self.out / "table.parquet")
        return written

    def _adopt(self, recorder: Recorder, log: Recorded) -> None:
        """Rows that only the table has go to the log, so that a changed grid loses none of them."""
        for key, row in read_table(self.out / TABLE).items():
            if key not in log.rows:
                recorder.ended(row)

    def _tell(self, row: Row, point: Point, number: int, left_s: float | None) -> None:
        accuracy = row.results.get("final_accuracy")
        result = row.status if accuracy is None else f"{accuracy:.1%}"
        if row.status not in ("completed", "error"):
            result += f" ({row.status})"
        line = f"[{number}/{len(self.plan.points)}] {point.name}: {result}, {seconds_words(row.seconds)}"
        if left_s:
            line += f"; about {seconds_words(left_s)} left"
        self.say(line)


def described(failures: Sequence[tuple[Point, Row]]) -> str:
    """The runs that gave nothing, for people."""
    lines = [f"  {point.name} (exit code {row.exit_code}): {row.error}" for point, row in failures]
    return "\n".join([f"{len(failures)} runs gave nothing; --retry-failed runs them again:", *lines])


def values_of(point: Point) -> str:
    """What a run sets, a line."""
    return "  ".join(f"{key}={shown(value)}" for key, value in point.values.items())

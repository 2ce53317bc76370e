"""One run of a sweep, wherever it is executed: a function of plain values."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.sweep.results import ERROR, Row, measures_of

__all__ = ["Job", "run_as_text", "run_job"]

LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Job:
    """What is to be run, as JSON values only: it travels to other processes and machines.

    Attributes
    ----------
    experiment
        The effective configuration.
    run_dir
        Where; emptied first, of what an interrupted attempt left.
    keep
        Whether the run folder stays when the run has ended.
    """

    key: str
    values: Mapping[str, Any]
    experiment: Mapping[str, Any] = field(repr=False)
    run_dir: str
    keep: bool = False

    def as_text(self) -> str:
        """For another process: :func:`run_as_text` takes it."""
        return json.dumps(asdict(self))


def run_as_text(job: str) -> str:
    """:func:`run_job` from text to text: what crosses a process's border is JSON."""
    return json.dumps(run_job(Job(**json.loads(job))).as_json())


def run_job(job: Job) -> Row:
    """Simulate; whatever goes wrong is in the row."""
    from common.config import experiment_from
    from common.errors import ByzULDPError

    began_at, run_dir = time.monotonic(), Path(job.run_dir)
    try:
        from deploy.simulate.run import run_simulation

        if run_dir.exists():
            shutil.rmtree(run_dir)
        summary = run_simulation(experiment_from(dict(job.experiment)), run_dir)
        row = Row(job.key, job.values, summary["status"], measures_of(summary), error=_said(summary))
    except ByzULDPError as problem:
        row = Row(job.key, job.values, ERROR, error=str(problem)[:LONGEST_ERROR], exit_code=problem.exit_code)
    except Exception as problem:  # a defect, or a user's own module: the other runs go on
        last = traceback.extract_tb(problem.__traceback__)[-1]
        text = f"{type(problem).__name__}: {problem} ({Path(last.filename).name}, line {last.lineno})"
        row = Row(job.key, job.values, ERROR, error=text[:LONGEST_ERROR], exit_code=1)
    if not job.keep:
        shutil.rmtree(run_dir, ignore_errors=True)
    return Row(**row.as_json() | {"seconds": round(time.monotonic() - began_at, 3)})


def _said(summary: Mapping[str, Any]) -> str:
    return "" if summary["status"] == "completed" else str(summary["message"])

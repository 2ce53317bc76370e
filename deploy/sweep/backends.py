"""Who executes the runs of a sweep: one small interface, and the simplest that has it.

Others are :mod:`deploy.sweep.pool` (this machine's cores) and :mod:`deploy.sweep.on_ray` (a cluster).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from deploy.sweep.job import Job, run_job
from deploy.sweep.results import Row

__all__ = ["Backend", "InThisProcess"]


class Backend(Protocol):
    """Executes runs, in any order."""

    @property
    def width(self) -> int:
        """How many at a time."""

    def rows(self, jobs: Sequence[Job], begun: Callable[[Job], None]) -> Generator[Row, None, None]:
        """The outcome of each, as it ends.

        Parameters
        ----------
        begun
            Called before a job begins to be executed; once more for one that begins again.

        Notes
        -----
        Closing the iterator ends what is being executed. A job whose process dies has a row that says so.
        """


class InThisProcess:
    """One after the other, here."""

    width = 1

    def rows(self, jobs: Sequence[Job], begun: Callable[[Job], None]) -> Generator[Row, None, None]:
        for job in jobs:
            begun(job)
            yield run_job(job)

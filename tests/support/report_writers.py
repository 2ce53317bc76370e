"""Stand-ins for the process that writes the report at a run's end: each is late, lost or unlucky in its own way."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["dies", "fails", "hangs", "writes"]


def writes(run_dir: Path, _deadline_s: float, answer: Connection) -> None:
    (run_dir / "report.html").write_text("a report")
    answer.send_bytes(b"report.html\n")


def fails(_run_dir: Path, _deadline_s: float, answer: Connection) -> None:
    answer.send_bytes(b"\nthe disk is full")


def dies(_run_dir: Path, _deadline_s: float, _answer: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_run_dir: Path, _deadline_s: float, _answer: Connection) -> None:
    time.sleep(60)

"""Where log records go: to a child's log file, and what matters also to whoever looks at the run.

The library only makes loggers below ``byzuldp``; the entry points, and nobody else, give that one its handlers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["forward_warnings", "log_to_stderr", "tail"]

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LONGEST_MESSAGE = 500
TAIL_BYTES = 16_384


class _Forward(logging.Handler):
    """Hands warnings and worse to ``report``, as events."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._report({"event": "warning", "message": record.getMessage()[:LONGEST_MESSAGE]})
        except Exception:
            self.handleError(record)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write the records of ``byzuldp.*`` to standard error (in a child: its log file). Asking twice changes nothing."""
    logger = logging.getLogger("byzuldp")
    logger.setLevel(level)
    if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    logger.propagate = False


def forward_warnings(report: Callable[[dict[str, Any]], None]) -> None:
    """Also send what is a warning or worse as ``{"event": "warning", "message": …}``."""
    logging.getLogger("byzuldp").addHandler(_Forward(report))


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])

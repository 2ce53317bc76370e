"""Ctrl-C and SIGTERM: the first asks a run to end in good order, the second ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stopped_by_signals"]


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first of these signals sets; for the main thread."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def asked(_number: int, _frame: object) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, asked)
    try:
        yield stop
    finally:
        restore()

"""Timeouts of many waits with one timer: for a server that has a thousand calls open and hardly one that is late.

:func:`asyncio.timeout` sets a timer of its own for each wait, which costs more than the rest of a short one. Here waits
that end at about the same time share a bucket, and the event loop is asked to wake up once for each: never early, and
at most :data:`GRAIN_S` late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

__all__ = ["GRAIN_S", "Timeout", "Timeouts"]

GRAIN_S = 0.05


class Timeout:
    """One wait, as a ``with`` block inside a coroutine; made by :meth:`Timeouts.within`.

    Raises
    ------
    TimeoutError
        From the block, when the time is over.
    """

    __slots__ = ("_all", "_bucket", "_cancelling", "_expired", "_more", "_seconds", "_task")

    def __init__(self, all_of_them: Timeouts, seconds: float, more: Callable[[], float] | None) -> None:
        self._all, self._seconds, self._more = all_of_them, seconds, more
        self._expired = False

    def __enter__(self) -> Timeout:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - who waits is a task
        self._task, self._cancelling = task, task.cancelling()
        self._bucket = self._all.enter(self, self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if not self._expired:
            self._bucket.discard(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from problem

    def expire(self) -> None:
        """The time is over, unless there is more of it."""
        if self._more is not None and (seconds := self._more()) > 0:
            self._bucket = self._all.enter(self, seconds)
            return
        self._expired = True
        self._task.cancel()


class Timeouts:
    """All waits of one event loop that share timers."""

    def __init__(self) -> None:
        self._buckets: dict[int, set[Timeout]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float, more: Callable[[], float] | None = None) -> Timeout:
        """``with timeouts.within(3.0): await …``

        Parameters
        ----------
        more
            Asked when the time is over: how many seconds longer it may be. What cannot be waited for a second time,
            such as a message, is so never given up too early.
        """
        return Timeout(self, seconds, more)

    def enter(self, timeout: Timeout, seconds: float) -> set[Timeout]:
        """Take a wait in; returns the bucket which it leaves when it is over."""
        number = math.ceil((asyncio.get_running_loop().time() + seconds) / GRAIN_S)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = set()
            if self._timer is None or number * GRAIN_S < self._timer.when():
                self._schedule()
        bucket.add(timeout)
        return bucket

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buckets:
            self._timer = asyncio.get_running_loop().call_at(min(self._buckets) * GRAIN_S, self._sweep)

    def _sweep(self) -> None:
        """Expire what is due. A bucket that has become empty costs one waking."""
        now = asyncio.get_running_loop().time()
        for number in [number for number in self._buckets if number * GRAIN_S <= now]:
            for timeout in self._buckets.pop(number):
                timeout.expire()
        self._schedule()

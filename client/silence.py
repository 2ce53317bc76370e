"""A wait that ends when the other side has been silent for too long, by whichever way it could have been heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["unless_silent"]


@asynccontextmanager
async def unless_silent(silence_s: float | None, heard_at: Callable[[], float]) -> AsyncIterator[None]:
    """``async with unless_silent(15.0, lambda: self.heard_at): await …``

    A message that is waited for cannot be waited for a second time, so what else has been heard is asked for before the
    wait is given up, not after.

    Parameters
    ----------
    silence_s
        How long the other side may be silent; None: for ever.
    heard_at
        When it was last heard of, by the event loop's clock.

    Raises
    ------
    TimeoutError
        It has been silent for so long.
    """
    if silence_s is None:
        yield
        return
    async with asyncio.timeout(None) as patience:
        watch = _Watch(patience, silence_s, heard_at)
        try:
            yield
        finally:
            watch.timer.cancel()


class _Watch:
    def __init__(self, patience: asyncio.Timeout, silence_s: float, heard_at: Callable[[], float]) -> None:
        self._patience, self._silence_s, self._heard_at = patience, silence_s, heard_at
        self._loop = asyncio.get_running_loop()
        self.timer = self._loop.call_later(silence_s, self._look)

    def _look(self) -> None:
        due = self._heard_at() + self._silence_s
        if due > self._loop.time():
            self.timer = self._loop.call_at(due, self._look)
        else:
            self._patience.reschedule(self._loop.time())

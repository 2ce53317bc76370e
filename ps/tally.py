"""Counting refusals, and writing the counts down now and then: a flood of them must not cost a write each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ps.records import RefusalCount

__all__ = ["Tally"]

WRITE_EVERY_S = 1.0
"""Between two writes, but for those that come with a round's record. 0: each is written at once."""


class Tally:
    """Refusals counted since the last write, by kind and identity: as many as there are of those, whatever happens.

    The first is written at once, so that an operator sees what is happening; those that follow, together.

    Parameters
    ----------
    write
        Adds counts to those that are written already.
    """

    def __init__(self, write: Callable[[Sequence[RefusalCount]], None]) -> None:
        self._write = write
        self._counts: dict[tuple[str, int | None], RefusalCount] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: str, client_id: int | None, round_id: int) -> None:
        """One more."""
        before = self._counts.get((kind, client_id))
        first, count = (round_id, 0) if before is None else (before.first_round, before.count)
        self._counts[kind, client_id] = RefusalCount(kind, client_id, count + 1, first, round_id)
        if self._timer is None:
            self._flush_and_wait()

    def flush(self) -> None:
        """Write what is not written."""
        counts, self._counts = list(self._counts.values()), {}
        if counts:
            self._write(counts)

    def close(self) -> None:
        """Write the rest, and no more."""
        if self._timer is not None:
            self._timer.cancel()
        self.flush()

    def _flush_and_wait(self) -> None:
        self._timer = None
        if self._counts and WRITE_EVERY_S > 0:
            self._timer = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._flush_and_wait)
        self.flush()

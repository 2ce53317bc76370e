"""Where a round's time goes: segments of the critical path, and spans beside it.

A round lasts from the moment θ_t is available to the moment θ_{t+1} is. Its segments follow one another without a gap:
each ends where the next begins, so they add up to its latency by construction. Times are those of
:func:`time.monotonic`, which is the event loop's clock too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ps.spans import Packed, Span, packed

__all__ = ["SEGMENTS", "RoundTiming"]

SEGMENTS = (
    "open",
    "first",
    "collect",
    "grace",
    "close",
    "noise",
    "transfer",
    "aggregate",
    "step",
    "commit",
    "hold",
    "publish",
)
"""In order: until clients may answer; until the first momentum is complete; until the pace is reached, which is when
all but f of those present have answered; the wait for the rest; until the round's thread begins; the wait for the
noise; host to device; the rule, server momentum and release; the model step; the durable commit; the wait for the
public schedule; until the next model is available."""


class RoundTiming:
    """The times of one round, as they happen.

    Parameters
    ----------
    round_id
        The round.
    available_at
        When θ_t became available.
    """

    __slots__ = ("_ends", "_last", "_spans", "available_at", "round_id")

    def __init__(self, round_id: int, available_at: float) -> None:
        self.round_id, self.available_at, self._last = round_id, available_at, available_at
        self._ends: list[tuple[str, float]] = []
        self._spans: dict[tuple[str, int | None], bytes] = {}

    def ends(self, segment: str, at: float | None = None) -> None:
        """A segment ends, and the next begins; at once, or at a time that has been noted.

        What is said to have ended before the segment ahead of it takes no time.
        """
        if at is None:
            at = time.monotonic()
        if at > self._last:
            self._last = at
        self._ends.append((segment, self._last))

    def span(self, name: str, client_id: int | None, began_at: float, seconds: float, num_bytes: int = 0) -> None:
        """Something took time beside all that; see :data:`ps.spans.NAMES`.

        Of one kind each client has one a round, the latest: a peer that asks again and again must not fill the record.
        """
        self._spans[name, client_id] = packed(name, client_id, began_at - self.available_at, seconds, num_bytes)

    @property
    def latency_s(self) -> float:
        """From θ_t available to the end of the last segment so far."""
        return self._last - self.available_at

    @property
    def segments(self) -> dict[str, float]:
        """Seconds of each segment so far, in order."""
        seconds: dict[str, float] = {}
        last = self.available_at
        for name, at in self._ends:
            seconds[name] = seconds.get(name, 0.0) + at - last
            last = at
        return seconds

    @property
    def spans(self) -> Sequence[Span]:
        return Packed(b"".join(self._spans.values()))

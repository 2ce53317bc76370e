"""Identities that break the protocol again and again, or join without end. Sans-I/O.

A *strike* is a message that no fault of a network makes out of an honest client's: :data:`BREACHES`. It is counted
only once it is shown who the sender is, so nobody gets another one suspended. What a momentum says never counts, were
it NaN: absence must not depend on data.

All of it is keyed by identity, never by incarnation, and forgotten when the server starts anew.
"""

from __future__ import annotations

import math
from collections import deque

from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["BREACHES", "Strikes"]

BREACHES = frozenset((pb.MALFORMED, pb.WRONG_SCHEMA, pb.TOO_LARGE, pb.CHECKSUM, pb.EQUIVOCATION, pb.FUTURE_ROUND))
"""Refusals that are strikes. Not among them is what happens to the honest: broken streams, late or stale answers, a
row or a call too many, repetitions."""


class Strikes:
    """Strikes, suspensions and joins of each identity.

    Parameters
    ----------
    strikes, window_s, suspension_s
        So many strikes within so long suspend an identity for so long; 0: none does.
    max_joins, join_every_s
        An identity may join so often at once, and after that once in so long.
    """

    def __init__(
        self,
        *,
        strikes: int = 0,
        window_s: float = 60.0,
        suspension_s: float = 30.0,
        max_joins: float = math.inf,
        join_every_s: float = 2.0,
    ) -> None:
        self._limit, self._window_s, self._suspension_s = strikes, window_s, suspension_s
        self._max_joins, self._join_every_s = max_joins, join_every_s
        self._struck_at: dict[int, deque[float]] = {}
        self._suspended_until: dict[int, float] = {}
        self._joins: dict[int, tuple[float, float]] = {}  # how many were left, and when that was

    def strike(self, client_id: int, now: float) -> bool:
        """One more; True if the identity is suspended from now on. During a suspension none is counted."""
        if self._limit == 0 or self.suspended_s(client_id, now) > 0:
            return False
        struck_at = self._struck_at.setdefault(client_id, deque(maxlen=self._limit))
        struck_at.append(now)
        if len(struck_at) < self._limit or now - struck_at[0] > self._window_s:
            return False
        self._suspended_until[client_id] = now + self._suspension_s
        del self._struck_at[client_id]
        return True

    def suspended_s(self, client_id: int, now: float) -> float:
        """Seconds until a suspended identity may join again; 0 if it may."""
        return max(0.0, self._suspended_until.get(client_id, 0.0) - now)

    def join(self, client_id: int, now: float) -> float:
        """It joins: 0 if it may; else the seconds until it may, and then this did not count."""
        left, at = self._joins.get(client_id, (self._max_joins, now))
        left = min(self._max_joins, left + (now - at) / self._join_every_s)
        if left < 1.0:
            return (1.0 - left) * self._join_every_s
        self._joins[client_id] = left - 1.0, now
        return 0.0

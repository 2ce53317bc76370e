"""For whom a round still waits once the pace is reached, and what that costs whom. Sans-I/O.

The grace is the most that a round waits then (see :mod:`ps.rounds`). It is waited out only for members that are worth
it. Every identity has a *standing* and a *credit* in seconds; an identity, not an incarnation, so that joining anew
buys nothing.

- In good standing is who has answered one of the last three rounds that waited for it, or has not been waited for in
  vain three times yet. It has a free share of every round: it is waited for until ``share`` times T after the pace,
  T being the time that the pace took.
- Waiting beyond that, or for one without standing, is charged to the credit of whoever is still missing, until it
  answers, is gone, or the round closes. It happens only if the credit covers all of it, up to the end of the grace.
  That is decided when the pace is reached, and again when somebody comes or goes, because that moves the pace; who was
  turned down once has its free share alone in that round.
- Credit begins at ``patience_s``. A round adds ``refill / f`` times T to each that is below ``patience_s``, or below
  the round's grace where that is longer. So one that is silent is waited for now and then, in case it is back.

Who answers in time is in good standing again. What this guarantees is said, and proved, in
:class:`ps.round_policy.RoundPolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Patience"]

MISSES = 3
"""Rounds that waited for a member in vain, one after the other, until it has no standing."""


@dataclass(slots=True)
class _Watch:
    """The wait that is on. Times are absolute."""

    reached_at: float
    free_until: float
    grace_until: float
    since: float  # everything before is charged already
    on_credit: dict[int, float]  # who is waited for beyond its free share, and from when on that costs
    free: list[int]  # who is waited for until free_until


class Patience:
    """The standing and the credit of the identities ``0 … num_clients − 1``, and the wait of the open round.

    Parameters
    ----------
    patience_s
        Seconds of waiting that an identity may cost before it is waited for no more; infinite: each grace is waited
        out.
    share, refill
        Of a round's T: what is free, and what is added to the credits of f identities together.

    Notes
    -----
    An answer costs O(1) amortised, a change of the live members O(f), the closing O(n).
    """

    def __init__(
        self, num_clients: int, num_byzantine: int, *, patience_s: float, share: float = 0.4, refill: float = 0.1
    ) -> None:
        self._patience_s, self._share, self._refill = patience_s, share, refill / max(num_byzantine, 1)
        self._credit = [patience_s] * num_clients
        self._missed = [0] * num_clients
        self._turned_down: set[int] = set()  # in the open round
        self._watch: _Watch | None = None

    def credit(self, client_id: int) -> float:
        """Seconds that an identity may still be waited for, as of the last change."""
        return self._credit[client_id]

    def in_good_standing(self, client_id: int) -> bool:
        return self._missed[client_id] < MISSES

    def watch(self, owing: Collection[int], *, reached_at: float, took: float, grace_s: float, now: float) -> None:
        """The pace was reached at ``reached_at``, after ``took``, and ``owing`` are live and have not answered.

        Nothing happens while that is known already.
        """
        if self._watch is not None:
            if self._watch.reached_at == reached_at:
                return
            self.interrupt(now)
        free_until, grace_until = reached_at + min(grace_s, self._share * took), reached_at + grace_s
        watch = self._watch = _Watch(reached_at, free_until, grace_until, now, {}, [])
        for client_id in owing:
            costs_from = reached_at
            if self.in_good_standing(client_id):
                watch.free.append(client_id)
                costs_from = free_until
            if client_id in self._turned_down:
                continue
            if self._credit[client_id] >= grace_until - max(now, costs_from):
                watch.on_credit[client_id] = costs_from
            else:
                self._turned_down.add(client_id)

    def until(self, owing: Collection[int]) -> float:
        """When the wait is over, as things are; infinite while the pace is not reached."""
        watch = self._watch
        if watch is None:
            return math.inf
        if watch.on_credit:
            return watch.grace_until
        while watch.free and watch.free[-1] not in owing:
            watch.free.pop()
        return watch.free_until if watch.free else watch.reached_at

    def answered(self, client_id: int, now: float) -> None:
        """An answer is there: it is charged what it was waited for, and is in good standing."""
        self._missed[client_id] = 0
        if self._watch is not None:
            self._charge(client_id, self._watch, now)
            self._watch.on_credit.pop(client_id, None)

    def interrupt(self, now: float) -> None:
        """Somebody comes or goes: what was waited so far is charged, and :meth:`watch` looks at everybody anew."""
        watch, self._watch = self._watch, None
        if watch is not None:
            for client_id in watch.on_credit:
                self._charge(client_id, watch, now)

    def closed(self, owing: Collection[int], *, took: float, grace_s: float, now: float) -> None:
        """The round closes without ``owing``. The pace took ``took``; zero when it was never reached."""
        watch = self._watch
        self.interrupt(now)
        if watch is not None and now >= watch.free_until:
            for client_id in owing:
                self._missed[client_id] += 1
        self._turned_down.clear()
        full, more = max(self._patience_s, grace_s), self._refill * took
        self._credit = [credit + more if credit < full else credit for credit in self._credit]

    def _charge(self, client_id: int, watch: _Watch, now: float) -> None:
        costs_from = watch.on_credit.get(client_id)
        if costs_from is not None:
            # A timer that comes late is not theirs to pay.
            waited_s = min(now, watch.grace_until) - max(costs_from, watch.since)
            self._credit[client_id] -= max(0.0, waited_s)

"""A look at who is in, from another thread: the parameter server's own loop makes the copy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ps.roster import Member

__all__ = ["Look", "Members", "rows_of"]

ANSWER_S = 1.0
MOST_ROWS = 200


class _Roster(Protocol):
    @property
    def members(self) -> Mapping[int, Member]: ...
    @property
    def joined_ever(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Look:
    """Who was in at some moment of the parameter server's clock."""

    members: Sequence[Member]
    joined_ever: frozenset[int]
    now: float

    @property
    def live(self) -> int:
        return sum(member.alive for member in self.members)


class Members:
    """Asks a running loop for its roster.

    Parameters
    ----------
    roster
        Touched on ``loop`` alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: _Roster) -> None:
        self._loop, self._roster = loop, roster

    async def look(self) -> Look | None:
        """A copy; None when that loop is gone, or busy for longer than :data:`ANSWER_S`."""
        answer: Future[Look] = Future()

        def copy() -> None:  # members are immutable, so the copy is of references: microseconds for thousands
            if answer.set_running_or_notify_cancel():
                answer.set_result(
                    Look(tuple(self._roster.members.values()), self._roster.joined_ever, self._loop.time())
                )

        try:
            self._loop.call_soon_threadsafe(copy)
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_S)
        except (RuntimeError, TimeoutError):
            return None


def rows_of(
    look: Look,
    clients: int,
    *,
    suspended: Mapping[int, float],
    missed: Mapping[int, int],
    refusals: Mapping[int, int],
) -> tuple[list[dict[str, Any]], int]:
    """One row for each identity, those in trouble first, and how many rows were left out.

    Parameters
    ----------
    suspended
        Seconds that are left, of those that are out.
    missed
        Of the last rounds, how many an identity did not answer.
    refusals
        Of each identity, so far.
    """
    members = {member.client_id: member for member in look.members}

    def state(client_id: int) -> str:
        member = members.get(client_id)
        if member is not None:
            return "live" if member.alive else "dead"
        if suspended.get(client_id, 0.0) > 0:
            return "suspended"
        return "left" if client_id in look.joined_ever else "never joined"

    order = sorted(
        range(clients),
        key=lambda client_id: (state(client_id) == "live", -missed.get(client_id, 0), client_id),
    )
    shown = sorted(order[:MOST_ROWS]) if clients <= MOST_ROWS else order[:MOST_ROWS]
    rows = [
        {
            "client": client_id,
            "state": state(client_id),
            "seen_s": max(0.0, look.now - members[client_id].last_seen) if client_id in members else None,
            "lives": members[client_id].incarnations if client_id in members else None,
            "missed": missed.get(client_id, 0),
            "refused": refusals.get(client_id, 0),
        }
        for client_id in shown
    ]
    return rows, clients - len(rows)

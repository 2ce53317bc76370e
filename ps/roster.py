"""Who is in: identity, incarnation, liveness. Sans-I/O: events and the time come in as arguments.

An *identity* is one place on the public roster, with one vote. An *incarnation* is one life of it: at most one is
current, and a newer one evicts the older. A member is *live* while it is heard of; one that falls silent is dead but
still a member, and its next heartbeat revives it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from common.errors import ConfigError

__all__ = ["Member", "Roster", "Standing"]

_REMEMBERED = 64  # former incarnations of an identity
_TARDY = 0.25  # of the reconnect grace: a tick later than that shows that the server was stopped


class Standing(Enum):
    """What an (identity, incarnation) pair is to the PS."""

    CURRENT = "current"  # the one incarnation that speaks for its identity, live or dead
    SUPERSEDED = "superseded"  # it was current, and another incarnation of the same identity is now
    NOT_A_MEMBER = "not_a_member"  # on the roster, but it never joined, has left, or was current long ago
    UNKNOWN_CLIENT = "unknown_client"  # not on the roster


@dataclass(frozen=True, slots=True)
class Member:
    """What the PS knows of an identity that has joined and not left. Times are the caller's clock, in seconds."""

    client_id: int
    incarnation: bytes
    joined_at: float
    last_seen: float
    alive: bool
    incarnations: int
    """Lives this identity has had, the current one included."""


class Roster:
    """The identities that may take part, and which of them are there.

    Parameters
    ----------
    identities
        The public roster: distinct client ids.
    liveness_s
        Seconds without a heartbeat after which a member is dead.
    reconnect_grace_s
        Seconds a member has to come back after its stream broke; then it is dead, however recent its last heartbeat.

    Raises
    ------
    ConfigError
        No identities, one given twice, or a duration that is not positive and finite.

    Notes
    -----
    Each event is O(1): since time does not go backwards, the members stay ordered by when they were last heard of,
    and :meth:`tick` looks only at the first ones. ``live`` is built anew, O(n), after it changed.

    Silence counts only while the server listens. A tick that comes much later than it was asked for, by a quarter of
    the grace, shows that the server itself was stopped: whoever would be dead has the grace from then on to be heard.
    """

    def __init__(self, identities: Sequence[int], *, liveness_s: float, reconnect_grace_s: float = 2.0) -> None:
        self._identities = frozenset(identities)
        if not self._identities:
            raise ConfigError("the roster is empty: expected at least one identity")
        if len(self._identities) != len(identities):
            raise ConfigError("the roster names an identity twice: expected distinct client ids")
        for name, value in (("liveness_s", liveness_s), ("reconnect_grace_s", reconnect_grace_s)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} = {value!r}: expected a positive, finite number of seconds")
        self._liveness_s = liveness_s
        self._reconnect_grace_s = reconnect_grace_s
        self._members: dict[int, Member] = {}
        self._lives: dict[int, int] = {}
        self._former: dict[int, deque[bytes]] = {}
        self._heard_at: OrderedDict[int, float] = OrderedDict()  # the live members, longest silent first
        self._lost_at: OrderedDict[int, float] = OrderedDict()  # those of them without a stream, longest first
        self._live: frozenset[int] | None = frozenset()

    @property
    def live(self) -> frozenset[int]:
        """The identities whose current incarnation is alive."""
        if self._live is None:
            self._live = frozenset(self._heard_at)
        return self._live

    @property
    def members(self) -> Mapping[int, Member]:
        """All that have joined and not left, dead ones included; a read-only view that follows the roster."""
        return MappingProxyType(self._members)

    @property
    def joined_ever(self) -> frozenset[int]:
        """The identities that have joined at least once, whatever became of them."""
        return frozenset(self._lives)

    def join(self, client_id: int, incarnation: bytes, now: float) -> bytes | None:
        """A client joins, for the first time or again; it is live from now on.

        Returns
        -------
        bytes or None
            The incarnation this one evicts, live or dead. None when there was none, or when a retried call names
            the current one again.

        Raises
        ------
        KeyError
            The identity is not on the roster.
        """
        if client_id not in self._identities:
            raise KeyError(f"client {client_id} is not one of the {len(self._identities)} identities on the roster")
        known = self._members.get(client_id)
        if known is not None and known.incarnation == incarnation:
            self._hear(known, now)
            return None
        lives = self._lives[client_id] = self._lives.get(client_id, 0) + 1
        self._hear(Member(client_id, incarnation, now, now, True, lives), now)
        if known is None:
            return None
        self._former.setdefault(client_id, deque(maxlen=_REMEMBERED)).append(known.incarnation)
        return known.incarnation

    def leave(self, client_id: int, incarnation: bytes, now: float) -> bool:  # noqa: ARG002 (every event has its time)
        """A client says goodbye; False when that incarnation is not the current one, and then nothing changes."""
        if self._current(client_id, incarnation) is None:
            return False
        del self._members[client_id]
        self._forget(client_id)
        return True

    def heartbeat(self, client_id: int, incarnation: bytes, now: float) -> bool:
        """A sign of life, which also revives a dead member; False when that incarnation is not the current one."""
        member = self._current(client_id, incarnation)
        if member is None:
            return False
        self._hear(member, now)
        return True

    def lost(self, client_id: int, incarnation: bytes, now: float) -> bool:
        """The stream of a client broke: unless it is heard of within the grace, it is dead.

        False when that incarnation is not the current one. A second loss does not lengthen the grace of the first.
        """
        if self._current(client_id, incarnation) is None:
            return False
        if client_id in self._heard_at:
            self._lost_at.setdefault(client_id, now)
        return True

    def tick(self, now: float) -> list[int]:
        """The identities that are newly dead, sorted."""
        if now - self._due() > _TARDY * self._reconnect_grace_s:
            self._bear_with(self._silent(now), now)
        dead = self._silent(now)
        for client_id in dead:
            self._members[client_id] = replace(self._members[client_id], alive=False)
            self._forget(client_id)
        return sorted(dead)

    def next_tick(self, now: float) -> float | None:
        """When :meth:`tick` must be called next (absolute time, not before ``now``); None while nobody is live."""
        return max(self._due(), now) if self._heard_at else None

    def _due(self) -> float:
        """When the next member is dead, if nothing is heard of it; infinite while nobody is live."""
        heard = next(iter(self._heard_at.values()), math.inf)
        lost = next(iter(self._lost_at.values()), math.inf)
        return min(heard + self._liveness_s, lost + self._reconnect_grace_s)

    def _silent(self, now: float) -> list[int]:
        """Who has been silent, or without a stream, for too long."""
        silent = []
        for client_id, since in self._heard_at.items():
            if now < since + self._liveness_s:
                break
            silent.append(client_id)
        for client_id, since in self._lost_at.items():
            if now < since + self._reconnect_grace_s:
                break
            if now < self._heard_at[client_id] + self._liveness_s:  # not among the others already
                silent.append(client_id)
        return silent

    def _bear_with(self, silent: list[int], now: float) -> None:
        """As if they were heard now and lost their streams at once."""
        for client_id in silent:
            self._heard_at[client_id] = now
            self._heard_at.move_to_end(client_id)
            self._lost_at.pop(client_id, None)
            self._lost_at[client_id] = now

    def standing(self, client_id: int, incarnation: bytes) -> Standing:
        """Whether an incarnation may speak for its identity, and if not, why.

        Who never held it learns nothing of it: a made-up incarnation gets one answer, whether the identity has joined
        or not.
        """
        if client_id not in self._identities:
            return Standing.UNKNOWN_CLIENT
        if self._current(client_id, incarnation) is not None:
            return Standing.CURRENT
        if client_id in self._members and incarnation in self._former.get(client_id, ()):
            return Standing.SUPERSEDED
        return Standing.NOT_A_MEMBER

    def _current(self, client_id: int, incarnation: bytes) -> Member | None:
        member = self._members.get(client_id)
        return member if member is not None and member.incarnation == incarnation else None

    def _hear(self, member: Member, now: float) -> None:
        client_id = member.client_id
        self._members[client_id] = Member(
            client_id, member.incarnation, member.joined_at, now, True, member.incarnations
        )  # a third of the time that dataclasses.replace takes, for what happens most often
        if client_id not in self._heard_at:
            self._live = None
        self._heard_at[client_id] = now
        self._heard_at.move_to_end(client_id)
        self._lost_at.pop(client_id, None)

    def _forget(self, client_id: int) -> None:
        self._heard_at.pop(client_id, None)
        self._lost_at.pop(client_id, None)
        self._live = None

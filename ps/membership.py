"""Who is in: joining, attending, leaving, and whether a caller is who it says it is.

The decisions are the roster's and the gate's; this is where tokens are checked, streams are kept, and members are told
things.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from common.rpc import PROTOCOL_VERSION
from common.rpc.refusals import Refused
from common.rpc.texts import shown
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.identity import Gate, Peer
from ps.roster import Roster, Standing
from ps.strikes import Strikes

__all__ = ["Attendance", "Joining", "Membership"]

log = logging.getLogger("byzuldp.ps.membership")

INCARNATION_BYTES = 16
WAITING_EVENTS = 256


@dataclass(eq=False)
class Attendance:
    """One client process's stream: the identities it holds, and the events it still has to be told."""

    peer: Peer
    callers: dict[int, bytes] = field(default_factory=dict)
    answered_at: float = -math.inf
    """When a call of one of them was answered last."""
    events: asyncio.Queue[pb.AttendEvent] = field(default_factory=lambda: asyncio.Queue(WAITING_EVENTS))

    def tell(self, event: pb.AttendEvent) -> None:
        """Queue an event; a reader that is too far behind misses the oldest, never the run's end."""
        if self.events.full():
            self.events.get_nowait()
        self.events.put_nowait(event)


@dataclass(frozen=True)
class Joining:
    """An identity has joined; ``taken_over`` says from whom, when that was another process that held it."""

    incarnation: bytes
    taken_over: str = ""


class Membership:
    """The members of one run.

    Parameters
    ----------
    roster
        Decides who is current, superseded, dead.
    run_id, fingerprint, schema_hash
        What a client must agree on before any tensor travels.
    token_hashes
        SHA-256 of each identity's join token: the public roster.
    gate
        Which connection may speak for which identity.
    clock
        Seconds, monotonic.
    live_changed
        Called after every change of who is live.
    strikes
        Who is suspended, and who has joined too often; by default nobody is.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        run_id: str,
        fingerprint: str,
        schema_hash: bytes,
        token_hashes: Mapping[int, bytes],
        gate: Gate,
        clock: Callable[[], float],
        live_changed: Callable[[], None],
        strikes: Strikes | None = None,
    ) -> None:
        self.roster, self.schema_hash, self.gate = roster, schema_hash, gate
        self.over: pb.RunFinished | None = None
        self._run_id, self._fingerprint, self._token_hashes = run_id, fingerprint, token_hashes
        self._clock, self._live_changed = clock, live_changed
        self._attendances: set[Attendance] = set()
        self._attending: dict[int, Attendance] = {}  # the latest stream of each identity
        self._joined_from: dict[int, Peer] = {}
        self._strikes = Strikes() if strikes is None else strikes
        self._suspended: dict[int, bytes] = {}  # the incarnation that an identity had when it was suspended last
        self._unheard = set(token_hashes)  # identities that have neither joined nor heard that the run is over

    def join(self, request: pb.JoinRequest, peer: Peer) -> Joining:
        """Make an identity a member, in a new incarnation. An older one is told that it is out.

        Raises
        ------
        Refused
            Another protocol version, run, configuration or schema; an unknown identity; a wrong certificate or token;
            a run that is over; an identity that is suspended, or has joined too often.
        """
        client_id = request.client_id
        if request.protocol_version != PROTOCOL_VERSION:
            raise Refused(
                pb.PROTOCOL_VERSION,
                f"this PS speaks protocol version {PROTOCOL_VERSION}, the client {request.protocol_version}",
            )
        if request.run_id not in ("", self._run_id):
            raise Refused(pb.WRONG_RUN, f"this PS holds run {self._run_id}, not {shown(request.run_id)}")
        if client_id not in self._token_hashes:
            raise Refused(
                pb.UNKNOWN_CLIENT, f"client {client_id} is not on the roster of 0 to {len(self._token_hashes) - 1}"
            )
        self.gate.admit(peer, client_id)
        # A certificate is credential enough; a token that comes with it has to be right all the same.
        token_needed = bool(request.token) or not self.gate.certified
        right = hmac.compare_digest(self._token_hashes[client_id], sha256(request.token.encode()).digest())
        if token_needed and not right:
            raise Refused(pb.BAD_TOKEN, f"the join token is not that of client {client_id}")
        self._unheard.discard(client_id)
        self._refuse_when_over()
        self._refuse_when_suspended(client_id)
        if request.fingerprint != self._fingerprint:
            raise Refused(pb.CONFIGURATION, "the client's public configuration differs from this run's")
        if request.schema_hash != self.schema_hash:
            raise Refused(pb.WRONG_SCHEMA, "the client's model has other parameters, shapes or dtype")
        if (wait_s := self._strikes.join(client_id, self._clock())) > 0:
            raise Refused(
                pb.TOO_MANY_CALLS,
                f"client {client_id} has joined too often; again in {wait_s:.1f} s (network.max_joins, "
                "network.join_every_s)",
            )
        joining = Joining(secrets.token_bytes(INCARNATION_BYTES), self._taken_over(request, peer))
        if self.roster.join(client_id, joining.incarnation, self._clock()) is not None:
            self._evict(client_id)
        self._joined_from[client_id] = peer
        self._live_changed()
        return joining

    def _taken_over(self, request: pb.JoinRequest, peer: Peer) -> str:
        """What to say of an identity's older incarnation, unless the process that held it has come back."""
        member = self.roster.members.get(request.client_id)
        if member is None or hmac.compare_digest(member.incarnation, request.previous):
            return ""
        state = "alive" if member.alive else "dead"
        return (
            f"{self.gate.name_of(request.client_id)} has joined from {peer}; its older incarnation is out, which was "
            f"{state}, heard of {self._clock() - member.last_seen:.1f} s ago, and had joined from "
            f"{self._joined_from.get(request.client_id, Peer())}. If nobody has started it again, its credential is in "
            "other hands"
        )

    def _evict(self, client_id: int) -> None:
        for attendance in self._attendances:
            if attendance.callers.pop(client_id, None) is not None:
                attendance.tell(pb.AttendEvent(evicted=pb.Evicted(client_id=client_id)))

    def strike(self, client_id: int) -> float:
        """A member has broken the protocol. Seconds for which it is suspended, and out, from now on; 0: it is not."""
        now = self._clock()
        if not self._strikes.strike(client_id, now):
            return 0.0
        member = self.roster.members.get(client_id)
        if member is not None:
            self._suspended[client_id] = member.incarnation
            self.roster.leave(client_id, member.incarnation, now)
        refusal = self._suspension(client_id).as_message()
        for attendance in self._attendances:
            if attendance.callers.pop(client_id, None) is not None:
                attendance.tell(pb.AttendEvent(refusal=refusal))
        self._live_changed()
        return self._strikes.suspended_s(client_id, now)

    def _suspension(self, client_id: int) -> Refused:
        left_s = self._strikes.suspended_s(client_id, self._clock())
        return Refused(
            pb.SUSPENDED,
            f"client {client_id} has broken the protocol too often (network.strikes), and is out for {left_s:.1f} s "
            "more; then it may join again",
        )

    def _refuse_when_suspended(self, client_id: int) -> None:
        if self._strikes.suspended_s(client_id, self._clock()) > 0:
            raise self._suspension(client_id)

    def check(self, caller: pb.Caller, peer: Peer, *, even_when_over: bool = False) -> None:
        """Is this the living incarnation of a member of this run, and does it speak for itself?

        Raises
        ------
        Refused
            Wrong certificate, wrong run, unknown identity, not a member, superseded, suspended; the run is over.
        """
        client_id = caller.client_id
        self.gate.admit(peer, client_id)
        if caller.run_id != self._run_id:
            raise Refused(pb.WRONG_RUN, f"this PS holds run {self._run_id}, not {shown(caller.run_id)}")
        match self.roster.standing(client_id, caller.incarnation):
            case Standing.UNKNOWN_CLIENT:
                raise Refused(pb.UNKNOWN_CLIENT, f"client {client_id} is not on the roster")
            case Standing.NOT_A_MEMBER:
                if self._suspended.get(client_id) == caller.incarnation:  # nobody else is told
                    self._refuse_when_suspended(client_id)
                raise Refused(pb.NOT_A_MEMBER, f"client {client_id} has not joined; join first")
            case Standing.SUPERSEDED:
                raise Refused(pb.SUPERSEDED, f"a newer incarnation of client {client_id} has joined; this one is out")
            case Standing.CURRENT:
                if not even_when_over:
                    self._refuse_when_over()

    def attend(self, callers: Sequence[pb.Caller], peer: Peer) -> Attendance:
        """Open a process's stream.

        Raises
        ------
        Refused
            There are no callers, or one of them is not a member; see :meth:`check`.
        """
        if not 0 < len(callers) <= len(self._token_hashes):
            raise Refused(pb.MALFORMED, f"an Attend stream names the identities attending, not {len(callers)} of them")
        for caller in callers:
            self.check(caller, peer, even_when_over=True)
        attendance = Attendance(peer, {caller.client_id: caller.incarnation for caller in callers})
        self._attendances.add(attendance)
        self._attending.update(dict.fromkeys(attendance.callers, attendance))
        self.heartbeat(attendance)
        if self.over is not None:
            attendance.tell(pb.AttendEvent(run_finished=self.over))
        return attendance

    def heartbeat(self, attendance: Attendance) -> None:
        """A sign of life of every identity a process holds.

        Raises
        ------
        Refused
            One of them may not take part any more; it is no member from now on.
        """
        now, before = self._clock(), self.roster.live
        for client_id, incarnation in attendance.callers.items():
            try:
                self.gate.admit(attendance.peer, client_id)
            except Refused:
                self.roster.leave(client_id, incarnation, now)
                self._live_changed()
                raise
        for client_id, incarnation in attendance.callers.items():
            self.roster.heartbeat(client_id, incarnation, now)
        if self.roster.live is not before:  # rebuilt, hence changed: comparing them would cost O(n) a heartbeat
            self._live_changed()

    def seen(self, client_id: int) -> None:
        """A member's momentum is a sign of life too."""
        member, before = self.roster.members.get(client_id), self.roster.live  # None: it has left since
        if member is not None:
            self.roster.heartbeat(client_id, member.incarnation, self._clock())
        if self.roster.live is not before:
            self._live_changed()

    def answered(self, client_id: int | None) -> None:
        """A call of a member was answered: its process knows that this server is there."""
        attendance = None if client_id is None else self._attending.get(client_id)
        if attendance is not None:
            attendance.answered_at = self._clock()

    def answered_s_ago(self, attendance: Attendance) -> float:
        """How long ago a process got its last answer; infinite if it got none since it attends."""
        return self._clock() - attendance.answered_at

    def heard_s_ago(self, attendance: Attendance) -> float:
        """How long ago something was heard of a process: a heartbeat, or a momentum of one of its members."""
        members = self.roster.members
        heard = (members[client_id].last_seen for client_id in attendance.callers if client_id in members)
        return self._clock() - max(heard, default=-math.inf)

    def detach(self, attendance: Attendance) -> None:
        """A process's stream ended; its members are dead unless they come back soon."""
        self._attendances.discard(attendance)
        for client_id in attendance.callers:
            if self._attending.get(client_id) is attendance:
                del self._attending[client_id]
        for client_id, incarnation in attendance.callers.items():
            self.roster.lost(client_id, incarnation, self._clock())
        self._live_changed()  # not yet, but the next tick is due earlier now

    def leave(self, caller: pb.Caller, peer: Peer) -> None:
        """A member goes, in good order.

        Raises
        ------
        Refused
            See :meth:`check`.
        """
        self.check(caller, peer, even_when_over=True)
        self.roster.leave(caller.client_id, caller.incarnation, self._clock())
        for attendance in self._attendances:
            attendance.callers.pop(caller.client_id, None)
        self._live_changed()

    def finish(self, status: str, message: str, *, releases: int) -> None:
        """The run is over, after so many releases: every process is told, and nobody joins any more."""
        self.over = pb.RunFinished(status=status, message=message, releases=releases)
        for attendance in self._attendances:
            attendance.tell(pb.AttendEvent(run_finished=self.over))

    async def all_left(self, deadline_s: float) -> bool:
        """Wait until nobody is left; False if somebody was when the time was over.

        A server that was killed after the last commit, and found nothing left to do, waits for those who will come
        back to it: they have not heard of the end.
        """
        until = self._clock() + deadline_s
        nobody_came = len(self._unheard) == len(self._token_hashes)
        while (self.roster.live or (nobody_came and self._unheard)) and self._clock() < until:
            await asyncio.sleep(0.02)
            self.roster.tick(self._clock())  # a process that is gone cannot leave
        return not self.roster.live

    def known(self, client_id: int | None) -> int | None:
        """The id if it is on the roster: what a stranger claims to be is not worth a record of its own."""
        return client_id if client_id in self._token_hashes else None

    def _refuse_when_over(self) -> None:
        if self.over is not None:
            raise Refused(pb.RUN_IS_OVER, f"the run has ended: {self.over.status}: {self.over.message}")

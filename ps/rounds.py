"""The life of a round: wait for clients, open, collect, close, publish, end. Sans-I/O.

Events and the time come in as arguments, actions go out as values; nothing here sleeps, reads a clock or touches a
socket or a file. So a run's whole life can be played at any speed, from a seed. Times are absolute seconds of the
caller's clock, which never goes backwards.

A round closes when the first of these holds, ``q`` being the quorum, ``f`` the number of Byzantine identities and
``P`` the members present, that is live or with an answer to this round:

1. at least ``q`` have answered, and every other member is known to be gone;
2. ``max(P − f, q)`` have answered, and the rest is waited for no more: the grace since then is over, which is
   ``grace_factor`` times the time they took, and at least ``grace_floor_s``; or nobody is left who is worth so much
   patience (see :mod:`ps.patience`);
3. the deadline has passed, and at least ``q`` have answered, or as soon as they have.

P follows who is there: a death lowers the number at once (the grace then counts from the answer that was enough, and
may be over), a member that joins raises it. What this guarantees is said, and proved, in
:class:`ps.round_policy.RoundPolicy`.

The first round opens likewise: when all ``n`` have joined; or ``max(n − f, q)`` have, and a grace since then is over;
or at the join deadline, with at least ``q``. (Nobody is known to be dead yet, so here n stands for P.)

Below the quorum the run waits ``quorum_deadline_s`` beyond the deadline, visibly, and then ends as ``quorum_lost``. A
server that was itself stopped for a while cannot have been reached: a timer that comes ``tardy_s`` late, or more,
begins that wait anew.

With a public schedule (``period_s``) none of this depends on who joins or answers: the first round opens
``join_deadline_s`` after the start, a round closes when its time has come, with whatever arrived, and θ of the next is
published when the period is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ps.patience import Patience
from ps.round_policy import RoundPolicy

__all__ = ["Action", "CloseReason", "CloseRound", "EndRun", "OpenRound", "Phase", "Rounds", "Wait"]

CloseReason = Literal[
    "all_answered", "rest_gone", "grace_over", "patience_over", "deadline", "quorum_reached", "schedule"
]


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Let clients answer θ of ``round_id``; the deadline is an absolute time."""

    round_id: int
    deadline: float


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Take no more answers, aggregate those of ``answered``, commit, publish, then say so by ``published``."""

    round_id: int
    answered: tuple[int, ...]
    """Ids, sorted."""
    late: tuple[int, ...]
    """The other ids of the roster, sorted."""
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Wait:
    """Show that the run is waiting: ``have`` of ``of`` are there and ``need`` (in all) are needed.

    At ``until`` (absolute time) the wait ends: a start goes ahead if it can, anything else is given up.
    """

    message: str
    have: int
    need: int
    of: int
    until: float


@dataclass(frozen=True, slots=True)
class EndRun:
    """Tell the clients, keep the state, stop. No action follows this one."""

    status: str
    message: str


Action = OpenRound | CloseRound | Wait | EndRun


class Phase(Enum):
    """Where the run is."""

    JOINING = "joining"
    COLLECTING = "collecting"
    CLOSING = "closing"
    ENDED = "ended"


class Rounds:
    """The state machine of a run. The identities are ``0 … num_clients − 1``.

    Parameters
    ----------
    policy
        When rounds open, close and give up.
    start_round
        The first round to open; above 0 when a run is resumed.

    Notes
    -----
    Every method that takes ``now`` is an event and returns the actions it causes, in order. An event is applied
    before the clock is looked at: an answer that is here counts, even when the timer that would have closed the
    round, or ended the run, comes late. An answer costs O(1), opening and closing a round O(n) and O(n log n).

    Standing and credit (:mod:`ps.patience`) live as long as this object: a server that starts anew begins with none
    lost.
    """

    def __init__(self, policy: RoundPolicy, *, start_round: int = 0) -> None:
        if not 0 <= start_round <= policy.rounds:
            raise ValueError(f"start_round = {start_round}: expected 0 to {policy.rounds}, the number of rounds")
        self.policy = policy
        self._patience = Patience(
            policy.num_clients,
            policy.num_byzantine,
            patience_s=policy.patience_s,
            share=policy.patience_share,
            refill=policy.patience_refill,
        )
        self._phase = Phase.JOINING
        self._round_id = start_round
        self._started = False
        self._live: frozenset[int] = frozenset()
        self._answered: set[int] = set()
        self._answered_at: list[float] = []  # in order; the k-th is when k had answered
        self._owing: set[int] = set()  # live, and has not answered the open round
        self._opened_at = 0.0  # the round; before the first one, the wait for clients
        self._enough_since: float | None = None  # before the first round: max(n − f, q) have joined and stayed
        self._deadline = self._give_up = math.inf
        self._overdue = False
        self._told: tuple[int, float, bool] | None = None  # the situation the last Wait described
        self._stopping: EndRun | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def round_id(self) -> int:
        """The round that is open or closing; before and after, the one whose θ is available."""
        return self._round_id

    @property
    def answered(self) -> frozenset[int]:
        """Who has answered the round that is open or closing."""
        return frozenset(self._answered)

    @property
    def pace_reached_at(self) -> float | None:
        """When the answer came that made the pace of the round that is open or closing; None: it has not."""
        return None if self.policy.period_s is not None else self._reached_at()

    @property
    def publish_at(self) -> float | None:
        """On a public schedule: when θ of the next round is to be published, not earlier; None: as soon as it can."""
        return None if self.policy.period_s is None else self._opened_at + self.policy.period_s

    @property
    def missing(self) -> tuple[int, ...]:
        """Whom the run waits for, sorted: those not live while joining, those without an answer afterwards."""
        there = self._live if self._phase is Phase.JOINING else self._answered
        return tuple(i for i in range(self.policy.num_clients) if i not in there)

    def started(self, now: float) -> list[Action]:
        """The PS is listening: the wait for clients begins. Its second call changes nothing."""
        if self._started or self._phase is Phase.ENDED:
            return []
        self._started, self._opened_at = True, now
        if self._round_id == self.policy.rounds:
            return [self._completed()]
        self._wait_until(now + self.policy.join_deadline_s)
        return self._settle(now)

    def live_changed(self, live: frozenset[int], now: float) -> list[Action]:
        """The set of live members changed: someone joined, left, died or revived.

        Raises
        ------
        ValueError
            An id is not on the roster.
        """
        for client_id in live - self._live:
            if not 0 <= client_id < self.policy.num_clients:
                raise ValueError(f"client {client_id} is live: expected ids of 0 to {self.policy.num_clients - 1}")
            if client_id not in self._answered:
                self._owing.add(client_id)
        if self._phase is Phase.COLLECTING:
            self._patience.interrupt(now)
        self._owing -= self._live - live
        self._live = live
        return self._settle(now)

    def momentum_complete(self, client_id: int, round_id: int, now: float) -> list[Action]:
        """A complete, checked momentum is in the inbox.

        It counts once, for the open round only; whether the member is live does not matter. Anything else is ignored.
        """
        if (
            self._phase is Phase.COLLECTING
            and round_id == self._round_id
            and 0 <= client_id < self.policy.num_clients
            and client_id not in self._answered
        ):
            self._answered.add(client_id)
            self._answered_at.append(now)
            self._owing.discard(client_id)
            self._patience.answered(client_id, now)
        return self._settle(now)

    def published(self, round_id: int, now: float) -> list[Action]:
        """θ of ``round_id`` is committed and available: its round opens, or the run ends.

        Raises
        ------
        ValueError
            No round was closing, or it is not the one after that round.
        """
        if self._phase is Phase.ENDED:
            return []
        if self._phase is not Phase.CLOSING or round_id != self._round_id + 1:
            raise ValueError(
                f"round {round_id} was published while round {self._round_id} was {self._phase.value}: "
                f"expected the round after one that is closing"
            )
        self._round_id = round_id
        failed = self._stopping is not None and self._stopping.status == "failed"
        if round_id == self.policy.rounds and not failed:
            return [self._completed()]  # the stop came too late to cost anything: nothing is left to resume
        if self._stopping is not None:
            return [self._end(self._stopping)]
        return self._open(now)

    def stop(self, status: str, message: str, now: float, *, at_once: bool = False) -> list[Action]:
        """End the run in good order, with this status.

        While a round is closing the end comes with the following ``published``: what was committed is published
        first. ``at_once`` is for when that will never come, because the aggregation or the commit failed. The first
        reason stands, unless a later one is a failure.
        """
        del now  # every event has its time; this one needs none
        if self._phase is Phase.ENDED:
            return []
        if self._stopping is None or status == "failed":
            self._stopping = EndRun(status, message)
        if self._phase is Phase.CLOSING and not at_once:
            return []
        return [self._end(self._stopping)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._settle(now)

    def next_tick(self, now: float) -> float | None:
        """When :meth:`tick` must be called next (absolute time, not before ``now``); None: only events matter."""
        if not self._collecting_or_joining():
            return None
        return max(min(self._give_up if self._overdue else self._deadline, self._wait_over()), now)

    def waiting(self, now: float) -> Wait | None:
        """The wait that is on, worded for ``now`` (so that a display can count down); None when all goes well."""
        situation = self._situation()
        if situation is None:
            return None
        have, until = situation
        n, need, left = self.policy.num_clients, self.policy.quorum, _seconds(until - now)
        if self._phase is Phase.COLLECTING:
            message = f"round {self._round_id}: {have} of {n} answered, need {need - have} more of {self._whom()}"
        elif self._overdue:
            message = f"{have} of {n} clients have joined, need {need - have} more of {self._whom()}"
        else:
            rest = f", waiting for {n - have} more; starts with at least {need}"
            rest = rest if self.policy.period_s is None else "; the schedule starts"
            return Wait(f"{have} of {n} clients have joined{rest} in {left}", have, need, n, until)
        return Wait(f"{message}; gives up in {left}", have, need, n, until)

    def _whom(self) -> str:
        """Who is missing, in few words."""
        missing = self.missing
        shown, rest = ", ".join(map(str, missing[:5])), len(missing) - 5
        return shown if rest <= 0 else f"{shown} and {rest} other{'s' if rest > 1 else ''}"

    def _situation(self) -> tuple[int, float] | None:
        """How many are there and until when the run waits for more; None when it need not."""
        if not self._collecting_or_joining():
            return None
        if self._phase is Phase.JOINING:
            return len(self._live), self._give_up if self._overdue else min(self._deadline, self._grace_over())
        if self.policy.period_s is not None:
            return None
        have = len(self._answered)
        stuck = have < self.policy.quorum and (self._overdue or not self._owing)
        return (have, self._give_up) if stuck else None

    def _grace_over(self) -> float:
        """When the wait for the rest ends, as things are; infinite while too few are there."""
        if self.policy.period_s is not None:
            return math.inf
        if self._phase is Phase.JOINING:
            since = self._enough_since
            return math.inf if since is None else since + self.policy.start_grace_s(since - self._opened_at)
        reached_at = self._reached_at()
        return math.inf if reached_at is None else reached_at + self.policy.grace_s(reached_at - self._opened_at)

    def _wait_over(self) -> float:
        """When the wait for the rest ends, as things are, by the grace or because nobody is worth it."""
        over = self._grace_over()
        return over if self._phase is Phase.JOINING else min(over, self._patience.until(self._owing))

    def _reached_at(self) -> float | None:
        """When the answer came that makes the pace, as things are; None: it has not."""
        pace = self.policy.pace(len(self._answered) + len(self._owing))
        return self._answered_at[pace - 1] if len(self._answered_at) >= pace else None

    def _collecting_or_joining(self) -> bool:
        return self._phase is Phase.COLLECTING or (self._phase is Phase.JOINING and self._started)

    def _settle(self, now: float) -> list[Action]:
        """What the present situation calls for, the event already applied."""
        if not self._collecting_or_joining():
            return []
        was_overdue = self._overdue
        if now - (self._give_up if was_overdue else self._deadline) > self.policy.tardy_s:
            self._give_up = max(self._give_up, now + self.policy.quorum_deadline_s)
        self._overdue = now >= self._deadline
        if self._phase is Phase.JOINING:
            if self._may_start(now):
                return self._open(now)
        else:
            self._watch(now)
            reason = self._reason_to_close(now, was_overdue)
            if reason is not None:
                self._phase = Phase.CLOSING
                self._settle_credits(now)
                return [CloseRound(self._round_id, tuple(sorted(self._answered)), self.missing, reason)]
        if now >= self._give_up:
            return [self._end(EndRun("quorum_lost", self._too_few()))]
        return self._tell(now)

    def _watch(self, now: float) -> None:
        """Once the pace is reached, look at who is still missing."""
        reached_at = self.pace_reached_at
        if reached_at is not None and self._owing:
            took = reached_at - self._opened_at
            grace_s = self.policy.grace_s(took)
            self._patience.watch(self._owing, reached_at=reached_at, took=took, grace_s=grace_s, now=now)

    def _settle_credits(self, now: float) -> None:
        reached_at = self.pace_reached_at
        took = 0.0 if reached_at is None else reached_at - self._opened_at
        self._patience.closed(self._owing, took=took, grace_s=self.policy.grace_s(took), now=now)

    def _may_start(self, now: float) -> bool:
        if self.policy.period_s is not None:
            return self._overdue
        have = len(self._live)
        if have < self.policy.pace(self.policy.num_clients):
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if have == self.policy.num_clients or now >= self._grace_over():
            return True
        return self._overdue and have >= self.policy.quorum

    def _reason_to_close(self, now: float, was_overdue: bool) -> CloseReason | None:
        if self.policy.period_s is not None:
            return "schedule" if self._overdue else None
        if len(self._answered) < self.policy.quorum:
            return None
        if len(self._answered) == self.policy.num_clients:
            return "all_answered"
        if was_overdue:
            return "quorum_reached"
        if not self._owing:
            return "rest_gone"
        if self._overdue:
            return "deadline"
        if now >= self._grace_over():
            return "grace_over"
        return "patience_over" if now >= self._wait_over() else None

    def _open(self, now: float) -> list[Action]:
        self._phase = Phase.COLLECTING
        self._answered.clear()
        self._answered_at.clear()
        self._owing = set(self._live)
        self._opened_at = now
        self._wait_until(now + self.policy.collect_s)
        return [OpenRound(self._round_id, self._deadline), *self._tell(now)]

    def _wait_until(self, deadline: float) -> None:
        self._deadline, self._give_up = deadline, deadline + self.policy.quorum_deadline_s
        self._overdue, self._told = False, None

    def _tell(self, now: float) -> list[Action]:
        """The wait, when it is not the one told last."""
        situation = self._situation()
        told, self._told = self._told, None if situation is None else (*situation, self._overdue)
        if self._told is None or self._told == told:
            return []
        wait = self.waiting(now)
        return [] if wait is None else [wait]

    def _completed(self) -> EndRun:
        return self._end(EndRun("completed", f"all {self.policy.rounds} rounds are done"))

    def _end(self, end: EndRun) -> EndRun:
        self._phase = Phase.ENDED
        return end

    def _too_few(self) -> str:
        n, have = self.policy.num_clients, self.policy.num_clients - len(self.missing)
        did = "clients joined" if self._phase is Phase.JOINING else "clients answered"
        return (
            f"round {self._round_id}: {have} of {n} {did}, at least {self.policy.quorum} were needed; missing: "
            f"{self._whom()}. Resume the run when they can be reached, or start one with a lower quorum"
        )


def _seconds(duration: float) -> str:
    duration = max(0.0, duration)
    return f"{duration:.1f} s" if duration < 10 else f"{duration:.0f} s"

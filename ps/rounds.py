"""The life of a round: wait for clients, open, collect, close, publish, end. Sans-I/O.

Events and the time come in as arguments, actions go out as values; nothing here sleeps, reads a clock or touches a
socket or a file. So a run's whole life can be played at any speed, from a seed. Times are absolute seconds of the
caller's clock, which never goes backwards.

A round closes when the first of these holds, ``q`` being the quorum, ``n`` the identities, ``f`` the Byzantine ones:

1. at least ``q`` have answered, and every other member is known to be gone;
2. ``max(n − f, q)`` have answered, and the grace since then is over: ``grace_factor`` times the time they took, and
   at least ``grace_floor_s``;
3. the deadline has passed, and at least ``q`` have answered, or as soon as they have.

Below the quorum the run waits ``quorum_deadline_s`` beyond the deadline, visibly, and then ends as ``quorum_lost``.

With a public schedule (``period_s``) none of this depends on who joins or answers: the first round opens
``join_deadline_s`` after the start, a round closes when its time has come, with whatever arrived, and θ of the next is
published when the period is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from common.errors import ConfigError

__all__ = ["Action", "CloseReason", "CloseRound", "EndRun", "OpenRound", "Phase", "RoundPolicy", "Rounds", "Wait"]

CloseReason = Literal["all_answered", "rest_gone", "grace_over", "deadline", "quorum_reached", "schedule"]


@dataclass(frozen=True)
class RoundPolicy:
    """When rounds open, close and give up; fixed for a run. Durations are in seconds.

    Raises
    ------
    ConfigError
        A count that does not fit the others, or a duration that is negative, zero where it bounds a wait, or not
        finite.
    """

    num_clients: int
    num_byzantine: int
    quorum: int
    rounds: int
    join_deadline_s: float
    round_deadline_s: float
    grace_factor: float
    grace_floor_s: float
    quorum_deadline_s: float
    period_s: float | None = None
    """From the opening of a round to the opening of the next, on a public schedule; None closes by answers."""
    margin_s: float = 0.0
    """How much of the period is left to make and publish the round after it closed."""

    def __post_init__(self) -> None:
        n = self.num_clients
        for name, least, most in (
            ("num_clients", 1, None),
            ("num_byzantine", 0, n - 1),
            ("quorum", 1, n),
            ("rounds", 1, None),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                limits = f"at least {least}" if most is None else f"{least} to {most} with {n} clients"
                raise ConfigError(f"{name} = {value!r}: expected {limits}")
        for name in ("join_deadline_s", "round_deadline_s", "quorum_deadline_s", "grace_factor", "grace_floor_s"):
            value = getattr(self, name)
            bounds_a_wait = name.endswith("deadline_s")
            if not (math.isfinite(value) and (value > 0 if bounds_a_wait else value >= 0)):
                raise ConfigError(
                    f"{name} = {value!r}: expected a finite number {'above 0' if bounds_a_wait else 'of at least 0'}"
                )

        if self.period_s is not None and not 0 <= self.margin_s < self.period_s < math.inf:
            raise ConfigError(f"margin_s = {self.margin_s!r}: expected less than the period of {self.period_s!r} s")

    @property
    def collect_s(self) -> float:
        """How long a round collects at most, while the quorum is there."""
        return self.round_deadline_s if self.period_s is None else self.period_s - self.margin_s

    @property
    def pace(self) -> int:
        """``max(n − f, q)``: with so many answers, the round waits for the others no longer than the grace."""
        return max(self.num_clients - self.num_byzantine, self.quorum)

    def longest_s(self, rounds: int) -> float:
        """Seconds after which a run with ``rounds`` rounds to go has ended, the time spent publishing apart."""
        waiting = self.quorum_deadline_s if self.period_s is None else self.margin_s
        return self.join_deadline_s + self.quorum_deadline_s + rounds * (self.collect_s + waiting)

    def warning(self) -> str | None:
        """A sentence when the margin is so small that the Byzantine clients can set the pace, else None."""
        n, f, q = self.num_clients, self.num_byzantine, self.quorum
        if f == 0 or self.period_s is not None:
            return None
        if q > n - f:
            return (
                f"{f} Byzantine clients can set the pace: the quorum is {q}, and only {n - f} of {n} clients are sure "
                f"to answer, so by keeping silent they hold every round until its deadline and then end the run; "
                f"lower the quorum to {n - f} or less, or add clients"
            )
        if n <= 3 * f + 1:
            return (
                f"{n} clients leave no margin for {f} Byzantine ones: when these keep silent, {n - f} answers are left "
                f"of which a robust rule can need {2 * f + 1}, so with any honest client absent too, the silent ones "
                f"set the pace of every round; at least {3 * f + 2} clients are advised"
            )
        return None


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
    round, or ended the run, comes late. Events cost O(1), opening and closing a round O(n) and O(n log n).
    """

    def __init__(self, policy: RoundPolicy, *, start_round: int = 0) -> None:
        if not 0 <= start_round <= policy.rounds:
            raise ValueError(f"start_round = {start_round}: expected 0 to {policy.rounds}, the number of rounds")
        self.policy = policy
        self._phase = Phase.JOINING
        self._round_id = start_round
        self._started = False
        self._live: frozenset[int] = frozenset()
        self._answered: set[int] = set()
        self._owing: set[int] = set()  # live, and has not answered the open round
        self._opened_at = self._deadline = self._give_up = math.inf
        self._grace_over: float | None = None
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
        self._started = True
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
            self._owing.discard(client_id)
            if len(self._answered) == self.policy.pace and self.policy.period_s is None:
                took = now - self._opened_at
                self._grace_over = now + max(self.policy.grace_floor_s, self.policy.grace_factor * took)
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
        due = self._give_up if self._overdue else self._deadline
        if self._grace_over is not None:
            due = min(due, self._grace_over)
        return max(due, now)

    def waiting(self, now: float) -> Wait | None:
        """The wait that is on, worded for ``now`` (so that a display can count down); None when all goes well."""
        situation = self._situation()
        if situation is None:
            return None
        have, until = situation
        n, need, left = self.policy.num_clients, self.policy.quorum, _seconds(until - now)
        if self._phase is Phase.COLLECTING:
            message = f"round {self._round_id}: {have} of {n} answered, need {need - have} more; gives up in {left}"
        elif self._overdue:
            message = f"{have} of {n} clients have joined, need {need - have} more; gives up in {left}"
        else:
            message = (
                f"{have} of {n} clients have joined, waiting for {n - have} more; starts with at least {need} in {left}"
            )
        return Wait(message, have, need, n, until)

    def _situation(self) -> tuple[int, float] | None:
        """How many are there and until when the run waits for more; None when it need not."""
        if not self._collecting_or_joining():
            return None
        if self._phase is Phase.JOINING:
            return len(self._live), self._give_up if self._overdue else self._deadline
        if self.policy.period_s is not None:
            return None
        have = len(self._answered)
        stuck = have < self.policy.quorum and (self._overdue or not self._owing)
        return (have, self._give_up) if stuck else None

    def _collecting_or_joining(self) -> bool:
        return self._phase is Phase.COLLECTING or (self._phase is Phase.JOINING and self._started)

    def _settle(self, now: float) -> list[Action]:
        """What the present situation calls for, the event already applied."""
        if not self._collecting_or_joining():
            return []
        was_overdue, self._overdue = self._overdue, now >= self._deadline
        if self._phase is Phase.JOINING:
            have = len(self._live)
            if self.policy.period_s is not None:
                return self._open(now) if self._overdue else []
            if have == self.policy.num_clients or (self._overdue and have >= self.policy.quorum):
                return self._open(now)
        else:
            reason = self._reason_to_close(now, was_overdue)
            if reason is not None:
                self._phase = Phase.CLOSING
                return [CloseRound(self._round_id, tuple(sorted(self._answered)), self.missing, reason)]
        if now >= self._give_up:
            return [self._end(EndRun("quorum_lost", self._too_few()))]
        return self._tell(now)

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
        if self._grace_over is not None and now >= self._grace_over:
            return "grace_over"
        return None

    def _open(self, now: float) -> list[Action]:
        self._phase = Phase.COLLECTING
        self._answered.clear()
        self._owing = set(self._live)
        self._opened_at = now
        self._grace_over = None
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
        n, need, missing = self.policy.num_clients, self.policy.quorum, self.missing
        did = "clients joined" if self._phase is Phase.JOINING else "clients answered"
        shown = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} others" if len(missing) > 5 else "")
        return (
            f"round {self._round_id}: {n - len(missing)} of {n} {did}, at least {need} were needed; missing: {shown}. "
            f"Resume the run when they can be reached, or start one with a lower quorum"
        )


def _seconds(duration: float) -> str:
    duration = max(0.0, duration)
    return f"{duration:.1f} s" if duration < 10 else f"{duration:.0f} s"

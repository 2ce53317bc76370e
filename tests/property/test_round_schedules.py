"""The life of a run under random schedules: a deterministic simulator of roster, rounds and store.

A schedule is a function of its seed: clients join, fall silent, come back and answer, twice or in the wrong round;
the server crashes at any instant and resumes; timers come on time or late. A referee keeps its own books, from what
it saw happen and the rules as they are documented, and checks every action, and every instant without one.

One seed, with everything that happened:      python tests/property/test_round_schedules.py --first 1234 --count 1
As many as the machine can take:              python tests/property/test_round_schedules.py --count 1000000
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter
from dataclasses import replace
from random import Random
from time import perf_counter

import pytest

from ps.roster import Roster, Standing
from ps.rounds import Action, CloseRound, EndRun, OpenRound, Phase, RoundPolicy, Rounds, Wait

SCHEDULES = 6_000
PACE_OF_TIME = (0.0, 0.0, 0.25, 0.25, 0.5, 1.0, 2.0)  # dyadic, so that equal times are equal


def random_policy(rng: Random) -> RoundPolicy:
    n = rng.randint(1, 7)
    return RoundPolicy(
        num_clients=n,
        num_byzantine=rng.randrange((n + 1) // 2),
        quorum=rng.randint(1, n),
        rounds=rng.randint(1, 4),
        join_deadline_s=rng.choice((2.0, 8.0, 16.0)),
        round_deadline_s=rng.choice((2.0, 6.0, 12.0)),
        grace_factor=rng.choice((0.0, 1.0, 2.0)),
        grace_floor_s=rng.choice((0.0, 0.5, 4.0)),
        quorum_deadline_s=rng.choice((0.5, 4.0, 12.0)),
    )


class RosterReferee:
    """Who must be live, from scratch."""

    def __init__(self, liveness_s: float, grace_s: float) -> None:
        self.liveness_s, self.grace_s = liveness_s, grace_s
        self.current: dict[int, bytes] = {}
        self.heard: dict[int, float] = {}
        self.broken: dict[int, float] = {}
        self.live: set[int] = set()

    def hear(self, client_id: int, incarnation: bytes, now: float) -> None:
        self.current[client_id] = incarnation
        self.heard[client_id] = now
        self.broken.pop(client_id, None)
        self.live.add(client_id)

    def dies_at(self, client_id: int) -> float:
        silent = self.heard[client_id] + self.liveness_s
        return min(silent, self.broken[client_id] + self.grace_s) if client_id in self.broken else silent

    def expire(self, now: float) -> list[int]:
        dead = sorted(i for i in self.live if now >= self.dies_at(i))
        self.live.difference_update(dead)
        return dead


class Referee:
    """The rules of a run, checked against what really happened; it knows nothing of how ``Rounds`` works."""

    def __init__(self, policy: RoundPolicy, committed: int, now: float) -> None:
        self.policy = policy
        self.round_id = committed
        self.state = "joining"
        self.live: frozenset[int] = frozenset()
        self.answers: dict[int, float] = {}
        self.opened_at = self.began_at = now
        self.deadline = now + policy.join_deadline_s
        self.closing_since = 0.0
        self.closing_took = 0.0
        self.stop: str | None = None
        self.wait: Wait | None = None
        self.status: str | None = None

    # what happened

    def answered(self, client_id: int, round_id: int, now: float) -> None:
        if self.state == "open" and round_id == self.round_id:
            self.answers.setdefault(client_id, now)

    def published(self, now: float) -> None:
        assert self.state == "closing", f"published while {self.state}"
        self.round_id += 1
        self.closing_took += now - self.closing_since
        self.state = "published"

    # what follows from it

    @property
    def give_up(self) -> float:
        return self.deadline + self.policy.quorum_deadline_s

    def closes_at(self) -> float:
        """When the open round must close, if nothing more happens; infinite below the quorum."""
        if len(self.answers) < self.policy.quorum:
            return math.inf
        if self.live <= self.answers.keys():
            return -math.inf
        pace = max(self.policy.num_clients - self.policy.num_byzantine, self.policy.quorum)
        if len(self.answers) < pace:
            return self.deadline
        reached = sorted(self.answers.values())[pace - 1]
        grace = max(self.policy.grace_floor_s, self.policy.grace_factor * (reached - self.opened_at))
        return min(self.deadline, reached + grace)

    def opens_at(self) -> float:
        if len(self.live) == self.policy.num_clients:
            return -math.inf
        return self.deadline if len(self.live) >= self.policy.quorum else math.inf

    def acts_by(self) -> float:
        """No later than this something must be done, whatever happens."""
        if self.state == "joining":
            return min(self.opens_at(), self.give_up)
        return min(self.closes_at(), self.give_up) if self.state == "open" else math.inf

    # what was done about it

    def check(self, actions: list[Action], now: float) -> None:
        for action in actions:
            assert self.state != "ended", f"{action} after the end"
            getattr(self, f"on_{type(action).__name__}")(action, now)
        if self.state in ("joining", "open"):
            assert self.stop is None, "went on after a stop"
            due = self.acts_by()
            assert now < due, f"{self.state} at {now}, something was due at {due}"
            if now >= self.deadline or (
                self.state == "open" and self.below_quorum() and self.live <= self.answers.keys()
            ):
                there = len(self.live if self.state == "joining" else self.answers)
                assert self.wait is not None, "an invisible wait"
                assert (self.wait.have, self.wait.until) == (there, self.give_up), f"an outdated {self.wait}"
        assert self.state != "published", "nothing follows from a published round"

    def below_quorum(self) -> bool:
        return len(self.answers) < self.policy.quorum

    def on_OpenRound(self, action: OpenRound, now: float) -> None:  # noqa: N802
        assert self.state in ("joining", "published"), f"{action} while one is {self.state}"
        assert self.state == "published" or now >= self.opens_at(), f"{action} too early"
        assert self.stop is None, f"{action} after a stop"
        assert action.round_id == self.round_id < self.policy.rounds, f"{action}: expected round {self.round_id}"
        assert action.deadline == now + self.policy.round_deadline_s
        self.state, self.answers, self.opened_at, self.deadline = "open", {}, now, action.deadline
        self.wait = None

    def on_CloseRound(self, action: CloseRound, now: float) -> None:  # noqa: N802
        assert self.state == "open", f"{action} while {self.state}"
        assert action.round_id == self.round_id
        assert action.answered == tuple(sorted(self.answers)), f"{action}: answers are {sorted(self.answers)}"
        assert action.late == tuple(i for i in range(self.policy.num_clients) if i not in self.answers)
        assert len(action.answered) >= self.policy.quorum, f"{action} below the quorum"
        assert now >= self.closes_at(), f"{action} before {self.closes_at()}"
        self.state, self.closing_since = "closing", now

    def on_Wait(self, action: Wait, now: float) -> None:  # noqa: N802
        assert (action.need, action.of) == (self.policy.quorum, self.policy.num_clients)
        if self.state == "joining":
            assert action.have == len(self.live)
            assert action.until == (self.deadline if now < self.deadline else self.give_up)
        else:
            assert self.state == "open"
            assert self.below_quorum()
            assert now >= self.deadline or self.live <= self.answers.keys(), "a wait while all is well"
            assert (action.have, action.until) == (len(self.answers), self.give_up)
        assert now < action.until
        self.wait = action

    def on_EndRun(self, action: EndRun, now: float) -> None:  # noqa: N802
        if action.status == "completed":
            assert self.round_id == self.policy.rounds
            assert self.state in ("published", "joining")
        elif action.status == "quorum_lost":
            assert self.state in ("open", "joining")
            there = self.answers if self.state == "open" else self.live
            assert len(there) < self.policy.quorum, "quorum lost with a quorum"
            assert now >= self.give_up, f"gave up before {self.give_up}"
        else:
            assert action.status == self.stop, f"{action}: nobody asked"
            assert self.state != "closing", "ended before what was committed was published"
        self.state, self.status = "ended", action.status


class Simulation:
    """One schedule. ``trace`` receives what happens, when given."""

    rounds_type: type[Rounds] = Rounds
    roster_type: type[Roster] = Roster

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.rng = rng = Random(seed)
        self.trace = trace
        self.policy = random_policy(rng)
        self.liveness_s, self.grace_s = rng.choice((3.0, 10.0, 30.0)), rng.choice((0.5, 2.0))
        self.punctual = rng.random() < 0.75
        self.crash_rate, self.stop_rate = rng.choice((0.0, 0.0, 0.02)), rng.choice((0.0, 0.0, 0.01))
        self.answer_rate, self.quiet = rng.choice((0.3, 0.6)), rng.random() < 0.2
        self.now = float(rng.randrange(100))
        self.committed = 0
        self.lives = 0
        self.seen: Counter[str] = Counter()
        self.say("%s, liveness %s, grace %s, punctual %s", self.policy, self.liveness_s, self.grace_s, self.punctual)
        self.start()

    def say(self, words: str, *values: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.2f}  {words % values}")

    def start(self) -> None:
        """A server starts, and knows only what was committed."""
        n = self.policy.num_clients
        self.resumed_at = self.committed
        self.say("start at round %s", self.committed)
        self.roster = self.roster_type(range(n), liveness_s=self.liveness_s, reconnect_grace_s=self.grace_s)
        self.rounds = self.rounds_type(self.policy, start_round=self.committed)
        self.members = RosterReferee(self.liveness_s, self.grace_s)
        self.referee = Referee(self.policy, self.committed, self.now)
        self.publish_at: float | None = None
        self.old: dict[int, bytes] = {}
        self.act(self.rounds.started(self.now))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            self.say("    -> %s", action)
        self.referee.check(actions, self.now)
        for action in actions:
            if isinstance(action, CloseRound):
                self.seen[action.reason] += 1
                self.publish_at = self.now + self.rng.choice((0.0, 0.5, 3.0))

    def run(self) -> str:
        """Play to the end and a little beyond; the status of the run."""
        while self.referee.state != "ended":
            self.step()
        status = self.referee.status
        assert status is not None
        took = self.now - self.referee.began_at
        if self.punctual:
            longest = self.policy.longest_s(self.policy.rounds - self.resumed_at) + self.referee.closing_took
            assert took <= longest, f"the run took {took} s: at most {longest} s"
        for _ in range(3):
            self.now += 50.0
            self.event()
            self.act(self.rounds.tick(self.now))
            assert self.rounds.next_tick(self.now) is None
        self.seen[status] += 1
        return status

    def step(self) -> None:
        target = self.now + PACE_OF_TIME[int(self.rng.random() * len(PACE_OF_TIME))]
        if self.punctual:
            ties_first = self.rng.random() < 0.5
            while True:
                due = self.due()
                if due > target or (due == target and not ties_first):
                    break
                self.now = due
                self.fire()
                if self.referee.state == "ended":
                    return
            assert self.referee.acts_by() >= target, f"no tick was asked for at {self.referee.acts_by()}"
            for client_id in self.members.live:
                assert self.members.dies_at(client_id) >= target, f"no tick was asked for the death of {client_id}"
        self.now = target
        self.event()
        if not self.punctual and self.rng.random() < 0.3:
            self.fire()

    def due(self) -> float:
        due = math.inf
        for time in (self.rounds.next_tick(self.now), self.roster.next_tick(self.now), self.publish_at):
            if time is not None and time < due:
                due = time
        assert due >= self.now
        return due

    def fire(self) -> None:
        """The timers that are due."""
        if self.publish_at is not None and self.now >= self.publish_at:
            self.publish_at = None
            self.committed += 1
            if self.rng.random() < 10 * self.crash_rate:
                self.crash("between commit and publish")
                return
            self.say("publish %s", self.committed)
            self.referee.published(self.now)
            self.act(self.rounds.published(self.committed, self.now))
        dead = self.roster.tick(self.now)
        assert dead == self.members.expire(self.now), f"newly dead: {dead}"
        self.live_may_have_changed()
        self.act(self.rounds.tick(self.now))

    def crash(self, when: str) -> None:
        self.lives += 1
        self.seen[f"crash {when}"] += 1
        self.say("crash %s", when)
        self.now += self.rng.choice((0.0, 5.0))
        self.start()

    def live_may_have_changed(self) -> None:
        live = self.roster.live
        assert live == self.members.live, f"live are {sorted(live)}: expected {sorted(self.members.live)}"
        if live != self.referee.live:
            self.say("live: %s", live)
            self.referee.live = live
            self.act(self.rounds.live_changed(live, self.now))

    def event(self) -> None:
        rng, now = self.rng, self.now
        if self.crash_rate and self.lives < 3 and rng.random() < self.crash_rate and self.referee.state != "ended":
            self.crash(f"while {self.referee.state}")
            return
        if self.stop_rate and rng.random() < self.stop_rate:
            self.say("stop")
            if self.referee.state != "ended":
                self.referee.stop = "interrupted"
                self.seen[f"stop while {self.referee.state}"] += 1
            self.act(self.rounds.stop("interrupted", "Ctrl-C", now))
            return
        client_id = int(rng.random() * self.policy.num_clients)
        kind = rng.random()
        if kind < self.answer_rate:
            if self.quiet and client_id < self.policy.num_byzantine:
                return
            round_id = self.referee.round_id + (rng.choice((-1, 1)) if rng.random() < 0.1 else 0)
            self.say("%s answers %s", client_id, round_id)
            self.referee.answered(client_id, round_id, now)
            self.act(self.rounds.momentum_complete(client_id, round_id, now))
        else:
            self.member_event(client_id, (kind - self.answer_rate) / (1.0 - self.answer_rate))
            self.live_may_have_changed()

    def member_event(self, client_id: int, kind: float) -> None:
        roster, members, now = self.roster, self.members, self.now
        current = members.current.get(client_id)
        if current is None or kind < 0.1:
            new = self.rng.randbytes(4)
            self.say("%s joins", client_id)
            assert roster.join(client_id, new, now) == current
            if current is not None:
                self.old[client_id] = current
            members.hear(client_id, new, now)
            return
        stale = client_id in self.old and self.rng.random() < 0.1
        incarnation = self.old[client_id] if stale else current
        assert roster.standing(client_id, incarnation) is (Standing.SUPERSEDED if stale else Standing.CURRENT)
        if kind < 0.85:
            self.say("%s beats%s", client_id, ", superseded" if stale else "")
            assert roster.heartbeat(client_id, incarnation, now) is not stale
            if not stale:
                members.hear(client_id, current, now)
        elif kind < 0.95:
            self.say("%s is lost%s", client_id, ", superseded" if stale else "")
            assert roster.lost(client_id, incarnation, now) is not stale
            if not stale and client_id in members.live:
                members.broken.setdefault(client_id, now)
        else:
            self.say("%s leaves%s", client_id, ", superseded" if stale else "")
            assert roster.leave(client_id, incarnation, now) is not stale
            if not stale:
                del members.current[client_id]
                members.live.discard(client_id)
                members.broken.pop(client_id, None)


def simulate(seed: int, simulation: type[Simulation] = Simulation) -> Counter[str]:
    """Play one schedule and count what it met; a failure names its seed and tells what happened."""
    try:
        played = simulation(seed)
        played.run()
    except Exception as problem:
        raise AssertionError(f"seed {seed}: {type(problem).__name__}: {problem}\n{tell(seed, simulation)}") from problem
    return played.seen


def tell(seed: int, simulation: type[Simulation] = Simulation, last: int = 40) -> str:
    """The story of a schedule: its first line and the last ones."""
    trace: list[str] = []
    with contextlib.suppress(Exception):  # the failure whose story this is
        simulation(seed, trace).run()
    return "\n".join([trace[0], *trace[1:][-last:]])


def play_all(seeds: range, simulation: type[Simulation] = Simulation) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(simulate(seed, simulation))
    return seen


def test_every_schedule_keeps_to_the_rules_and_ends():
    seen = play_all(range(SCHEDULES))
    # All that the simulator is for was met, and often, or its silence would mean little.
    for thing in (
        *("completed", "quorum_lost", "interrupted"),
        *("all_answered", "rest_gone", "grace_over", "deadline", "quorum_reached"),
        *("crash between commit and publish", "crash while joining", "crash while open", "crash while closing"),
        *("stop while joining", "stop while open", "stop while closing"),
    ):
        assert seen[thing] >= SCHEDULES // 200, f"{thing}: {seen[thing]} times in {seen}"


def test_a_schedule_is_a_function_of_its_seed():
    for seed in range(50):
        assert tell(seed, last=10_000) == tell(seed, last=10_000)
    assert tell(0) != tell(1)


# Bugs that one could have written. The simulator is worth what it finds of them.


class ClosesBelowQuorum(Rounds):
    def __init__(self, policy, **kwargs):
        super().__init__(replace(policy, quorum=max(1, policy.quorum - 1)), **kwargs)


class ForgetsTheGrace(Rounds):
    def momentum_complete(self, client_id, round_id, now):
        actions = super().momentum_complete(client_id, round_id, now)
        self._grace_over = None
        return actions


class LetsTheGraceStartAnew(Rounds):
    def momentum_complete(self, client_id, round_id, now):
        actions = super().momentum_complete(client_id, round_id, now)
        if self._grace_over is not None:
            self._grace_over = now + max(self.policy.grace_floor_s, self.policy.grace_factor * (now - self._opened_at))
        return actions


class TakesAnswersToOtherRounds(Rounds):
    def momentum_complete(self, client_id, round_id, now):  # noqa: ARG002
        return super().momentum_complete(client_id, self.round_id, now)


class TakesAnswersWhileClosing(Rounds):
    def momentum_complete(self, client_id, round_id, now):
        actions = super().momentum_complete(client_id, round_id, now)
        if self.phase is Phase.CLOSING and not actions:
            return [CloseRound(round_id, tuple(sorted({*self.answered, client_id})), self.missing, "deadline")]
        return actions


class NeverGivesUp(Rounds):
    def _wait_until(self, deadline):
        super()._wait_until(deadline)
        self._give_up = deadline + 1e6


class KeepsTheAnswersOfTheRoundBefore(Rounds):
    def _open(self, now):
        before = set(self._answered)
        actions = super()._open(now)
        self._answered |= before
        return actions


class WaitsForTheDead(Rounds):
    def live_changed(self, live, now):
        self._live |= live
        return super().live_changed(self._live | live, now)


class WaitsAgainForOneThatRevived(Rounds):
    def live_changed(self, live, now):
        if self.phase is Phase.COLLECTING:
            self._owing |= live - self._live
        return super().live_changed(live, now)


class StartsFromTheBeginning(Rounds):
    def __init__(self, policy, *, start_round=0):  # noqa: ARG002
        super().__init__(policy)


class EndsBeforeWhatIsCommittedIsPublished(Rounds):
    def stop(self, status, message, now, *, at_once=False):  # noqa: ARG002
        return super().stop(status, message, now, at_once=True)


class ForgetsToStop(Rounds):
    def published(self, round_id, now):
        self._stopping = None
        return super().published(round_id, now)


class WaitsInSilence(Rounds):
    def tick(self, now):
        return [action for action in super().tick(now) if not isinstance(action, Wait)]


class AsksForNoTickAtTheEndOfTheGrace(Rounds):
    def next_tick(self, now):
        grace_over, self._grace_over = self._grace_over, None
        due = super().next_tick(now)
        self._grace_over = grace_over
        return due


class GoesOnAfterTheEnd(Rounds):
    def _end(self, end):
        return end


class ForgetsTheReconnection(Roster):
    def heartbeat(self, client_id, incarnation, now):
        since = self._lost_at.get(client_id)
        known = super().heartbeat(client_id, incarnation, now)
        if since is not None and known:
            self._lost_at[client_id] = since
        return known


class HearsTheSuperseded(Roster):
    def _current(self, client_id, incarnation):  # noqa: ARG002
        return self._members.get(client_id)


class LetsTheDeadLive(Roster):
    def tick(self, now):
        return super().tick(now - 0.25)


class NeverRevives(Roster):
    def _hear(self, member, now):
        if member.client_id in self._heard_at or member.last_seen == now:
            super()._hear(member, now)


@pytest.mark.parametrize(
    "planted",
    [
        *(ClosesBelowQuorum, ForgetsTheGrace, LetsTheGraceStartAnew, TakesAnswersToOtherRounds, NeverGivesUp),
        *(TakesAnswersWhileClosing, KeepsTheAnswersOfTheRoundBefore, WaitsForTheDead, WaitsAgainForOneThatRevived),
        *(StartsFromTheBeginning, EndsBeforeWhatIsCommittedIsPublished, ForgetsToStop, WaitsInSilence),
        *(AsksForNoTickAtTheEndOfTheGrace, GoesOnAfterTheEnd),
        *(ForgetsTheReconnection, HearsTheSuperseded, LetsTheDeadLive, NeverRevives),
    ],
)
def test_the_simulator_finds_a_planted_bug(planted):
    part = "rounds_type" if issubclass(planted, Rounds) else "roster_type"
    with pytest.raises(AssertionError, match=r"seed \d+: AssertionError"):
        play_all(range(1000), type("WithABug", (Simulation,), {part: planted}))


# Drivers: one that looks every quarter of a second, one that looks only when it was told to.


def play(policy: RoundPolicy, script: list[tuple[float, str, int]], every: float | None) -> list[tuple[float, Action]]:
    """What happens, and when, under a script of events; ``every`` None ticks only when ``next_tick`` says so."""
    rounds = Rounds(policy)
    roster = Roster(range(policy.num_clients), liveness_s=8.0, reconnect_grace_s=1.5)
    log: list[tuple[float, Action]] = []
    publish: tuple[float, int] | None = None

    def act(actions: list[Action], now: float) -> None:
        nonlocal publish
        for action in actions:
            log.append((now, action))
            if isinstance(action, CloseRound):
                publish = (now + 0.5, action.round_id + 1)

    def look(now: float) -> None:
        nonlocal publish
        if publish is not None and now >= publish[0]:
            (_, round_id), publish = publish, None
            act(rounds.published(round_id, now), now)
        if roster.tick(now):
            act(rounds.live_changed(roster.live, now), now)
        act(rounds.tick(now), now)

    def due(now: float) -> float:
        if every is not None:
            return now + every
        times = (rounds.next_tick(now), roster.next_tick(now), publish and publish[0])
        return min((time for time in times if time is not None), default=math.inf)

    now = 0.0
    act(rounds.started(now), now)
    for time, kind, client_id in script:
        while (tick := due(now)) <= time:
            now = tick
            look(now)
        if every is None:
            now = time
        match kind:
            case "join":
                roster.join(client_id, b"a", time)
            case "beat":
                roster.heartbeat(client_id, b"a", time)
            case "lost":
                roster.lost(client_id, b"a", time)
            case "leave":
                roster.leave(client_id, b"a", time)
            case _:
                act(rounds.momentum_complete(client_id, rounds.round_id, time), time)
        if roster.live != rounds._live:
            act(rounds.live_changed(roster.live, time), time)
    while rounds.phase is not Phase.ENDED:
        now = due(now)
        look(now)
    return log


def test_ticking_only_when_asked_to_is_the_same_as_ticking_all_the_time():
    kinds = ("join", "beat", "beat", "beat", "lost", "leave", "answer", "answer", "answer", "answer")
    met: Counter[str] = Counter()
    for seed in range(500):
        rng = Random(seed)
        policy = random_policy(rng)
        script, time = [], 0.0
        for _ in range(120):
            time += rng.choice((0.0, 0.25, 0.25, 0.5))
            script.append((time, rng.choice(kinds), rng.randrange(policy.num_clients)))
        log = play(policy, script, None)
        assert log == play(policy, script, 0.25), f"seed {seed}"
        met.update(action.reason for _, action in log if isinstance(action, CloseRound))
        met.update(action.status for _, action in log if isinstance(action, EndRun))
    assert len(met) >= 6, met


# What silent or slow Byzantine clients can do to the pace.


def closing_of(policy: RoundPolicy, answers: list[tuple[float, int]]) -> tuple[float, Action]:
    """When and how the first round ends, everybody being live and nobody but these answering."""
    rounds = Rounds(policy)
    rounds.live_changed(frozenset(range(policy.num_clients)), 0.0)
    rounds.started(0.0)
    waiting = sorted(answers)
    now = 0.0
    while True:
        due = rounds.next_tick(now)
        assert due is not None
        if waiting and waiting[0][0] <= due:
            now, client_id = waiting.pop(0)
            actions = rounds.momentum_complete(client_id, 0, now)
        else:
            now = due
            actions = rounds.tick(now)
        for action in actions:
            if isinstance(action, CloseRound | EndRun):
                return now, action


def byzantine_policy(rng: Random, *, small_margin: bool) -> RoundPolicy:
    n = rng.randint(4, 40)
    f = rng.randint(1, (n - 1) // 2)
    quorum = rng.randint(n - f + 1, n) if small_margin else rng.randint(1, n - f)
    return replace(random_policy(rng), num_clients=n, num_byzantine=f, quorum=quorum)


@pytest.mark.parametrize("adversaries", ["silent", "slow"])
def test_byzantine_clients_cost_a_round_the_grace_at_most_when_the_others_make_a_quorum(adversaries):
    for seed in range(1000):
        rng = Random(seed)
        policy = byzantine_policy(rng, small_margin=False)
        n, f = policy.num_clients, policy.num_byzantine
        honest = [(rng.uniform(0.0, policy.round_deadline_s), i) for i in range(n - f)]
        slow = [(rng.uniform(0.0, 100.0), i) for i in range(n - f, n)] if adversaries == "slow" else []
        closed_at, action = closing_of(policy, honest + slow)
        last = max(honest)[0]
        assert isinstance(action, CloseRound), f"seed {seed}"
        assert closed_at <= last + max(policy.grace_floor_s, policy.grace_factor * last), f"seed {seed}"
        assert closed_at <= policy.round_deadline_s, f"seed {seed}"
        if adversaries == "silent":
            assert set(range(n - f)) == set(action.answered), f"seed {seed}: an honest answer was left out"


def test_byzantine_clients_set_the_pace_when_the_others_make_no_quorum_and_the_policy_warns():
    for seed in range(300):
        rng = Random(seed)
        policy = byzantine_policy(rng, small_margin=True)
        n, f = policy.num_clients, policy.num_byzantine
        give_up = policy.round_deadline_s + policy.quorum_deadline_s
        honest = [(0.0, i) for i in range(n - f)]
        ended_at, action = closing_of(policy, honest)
        assert isinstance(action, EndRun), f"seed {seed}"
        assert (ended_at, action.status) == (give_up, "quorum_lost"), f"seed {seed}"
        at = rng.uniform(policy.round_deadline_s, give_up)
        closed_at, action = closing_of(policy, [*honest, *((at, i) for i in range(n - f, n))])
        assert isinstance(action, CloseRound), f"seed {seed}"
        assert closed_at == at, f"seed {seed}"
        assert "can set the pace" in (policy.warning() or ""), f"seed {seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Play random schedules of rounds until one breaks a rule.")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=SCHEDULES, help="how many seeds; 1 tells its whole story")
    given = parser.parse_args()
    if given.count == 1:
        print(tell(given.first, last=1_000_000))
    began = perf_counter()
    seen = play_all(range(given.first, given.first + given.count))
    took = perf_counter() - began
    print(f"{given.count} schedules in {took:.1f} s ({given.count / took:.0f} per second): {dict(seen)}")


if __name__ == "__main__":
    main()

"""The life of a run under random schedules: a deterministic simulator.

A schedule is a function of its seed. Honest clients join, attend, answer and come back over a network that delays,
loses, repeats and reorders; the others do anything that the protocol lets them; the server's timers come on time or
late, its clock jumps, it crashes between any two actions and starts again from what was committed. After every step
the referees of :mod:`round_referee` assert what must hold.

``make simulate`` plays as many as you like: see :mod:`simulate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from round_stage import Stage, Step, replay, shortened

from ps.round_policy import RoundPolicy

# Times are dyadic, so that equal times are equal.
DELAYS = (0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 1.0, 2.0)
GAPS = (0.25, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0)
RETRY_S = 1.0
CRASHES, SLEEPS, STEPS = 3, 3, 10_000
BYZANTINE = ("silent", "slow", "late", "flapping", "storm", "anything", "absent")


def random_policy(rng: Random) -> RoundPolicy:
    n = rng.randint(1, 7)
    pick = rng.choice
    return RoundPolicy(
        num_clients=n,
        num_byzantine=rng.randrange((n + 1) // 2),
        quorum=rng.randint(1, n),
        rounds=rng.randint(1, 4) if rng.random() < 0.93 else rng.randint(6, 12),
        join_deadline_s=pick((2.0, 8.0, 16.0)),
        round_deadline_s=pick((2.0, 6.0, 12.0)),
        grace_factor=pick((0.0, 1.0, 2.0)),
        grace_floor_s=pick((0.0, 0.5, 4.0)),
        quorum_deadline_s=pick((0.5, 4.0, 12.0)),
        period_s=pick((None, None, None, None, None, 2.0, 6.0)),
        margin_s=pick((0.0, 0.5, 1.5)),
        join_grace_s=pick((0.0, 0.5, 4.0)),
        tardy_s=pick((1.0, 5.0)),
        patience_s=pick((0.0, 1.0, 2.0, 4.0, 8.0, inf)),
        patience_share=pick((0.0, 0.5, 1.0)),
        patience_refill=0.75,  # a dyadic share for each of 1, 2 and 3
    )


class Schedule:
    """One schedule.

    A client is *steady* from its join on while its link holds: whatever else happens, it is heard of often enough, so
    the server must never count it dead, unless the server itself was stopped so briefly that it cannot know.
    """

    def __init__(self, seed: int, stage_type: type[Stage] = Stage) -> None:
        self.rng = rng = Random(seed)
        self._random = rng.random
        policy = self.policy = random_policy(rng)
        n = policy.num_clients
        byzantine = rng.randint(0, policy.num_byzantine) if rng.random() < 0.6 else rng.randint(0, n)
        alike = rng.choice(BYZANTINE) if rng.random() < 0.5 else None
        self.role = {i: alike or rng.choice(BYZANTINE) for i in rng.sample(range(n), byzantine)}
        self.honest = [i for i in range(n) if i not in self.role]
        self.heartbeat_s = rng.choice((1.0, 2.0, 4.0))
        self.tardiness = rng.choice((0.0, 0.0, 0.0, 0.25, 1.0))  # how late a timer of the server may be
        self.loses, self.repeats = rng.choice((0.0, 0.0, 0.1, 0.3)), rng.choice((0.0, 0.1))
        self.cuts = rng.choice((0.0, 0.0, 0.1, 0.3))
        self.careless = rng.random() < 0.15  # answers reach the rounds without the checks of the service
        self.thinks_s = {i: rng.choice((0.0, 0.0, 0.0, 1.0, 4.0)) for i in self.honest}
        self.queue: list[tuple[float, float, Callable[..., None], tuple[Any, ...]]] = []
        self.incarnation: list[bytes | None] = [None] * n
        self.connection = [0] * n  # what is on its way in an older one is dropped
        self.linked, self.steady = [True] * n, [False] * n
        self.lives_had = [0] * n
        self.crashes = 0
        self.opened = -1
        self.waking = False
        self.slack_s = 0.0  # what the server's sleep may add to its run
        self.timer: tuple[float, float] | None = None
        self.make_stage = partial(
            stage_type,
            policy,
            self.heartbeat_s * rng.choice((2.0, 3.0, 4.0)),
            self.heartbeat_s * 2.0,
            frozenset(self.honest),
            float(rng.randrange(100)),
        )
        self.stage: Stage

    # ---------------------------------------------------------------- the clock

    def run(self, trace: list[str] | None = None) -> Counter[str]:
        """Play to the run's end and a little beyond; what was met, counted. ``trace`` receives what happens."""
        stage = self.stage = self.make_stage(self.happened, trace)
        stage.begin()
        self.prepare()
        queue = self.queue
        due = 0.0
        while not stage.over:
            if stage.stirred:
                stage.stirred, due = False, self.woken_at()
            if queue and (queue[0][0] < due or (queue[0][0] == due and self._random() < 0.5)):
                time, _, event, arguments = heappop(queue)
                if time > stage.now:
                    stage.now = time
                event(*arguments)
            elif (due := self.woken_at()) < inf:  # heartbeats may have put it off
                if not queue or due <= queue[0][0]:
                    self.timer = None
                    stage.do(due, "tick")
            else:
                assert queue, "nothing will ever happen again"
            assert len(stage.script) < STEPS, "the run does not end"
        self.check_duration()
        stage.do(stage.now + 50.0, "answer", 0, stage.rounds.round_id)
        stage.do(stage.now + 50.0, "tick")
        assert stage.rounds.next_tick(stage.now) is None, "a tick after the end"
        return stage.seen

    def prepare(self) -> None:
        """What will happen anyway."""
        rng, now = self.rng, self.stage.now
        self.all_join()
        for client_id, role in self.role.items():
            if role != "absent":
                self.at(now + self.delay(), getattr(self, role), client_id)
        if rng.random() < 0.25:
            self.stage.do(now, "fuse_at", rng.choice((1, 2, 3, 5, 8, 13, 21)))
        if rng.random() < 0.15:
            self.at(now + 8 * self.delay(), self.crash)
        if rng.random() < 0.1:
            self.at(now + 16 * self.delay(), self.stop)
        for _ in range(rng.choice((0, 0, 0, 1, SLEEPS))):
            self.at(now + 16 * self.delay(), self.sleep)

    def woken_at(self) -> float:
        """When the server's timer fires: when it asked for that, or a little later."""
        due = self.stage.due()
        if self.tardiness and due < inf:
            if self.timer is None or self.timer[0] != due:
                self.timer = due, due + self.tardiness * int(16 * self._random()) / 16
            return self.timer[1]
        return due

    def at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        heappush(self.queue, (time, self._random(), event, arguments))

    def delay(self) -> float:
        return DELAYS[int(self._random() * 8)]

    def gap(self) -> float:
        return GAPS[int(self._random() * 8)]

    def check_duration(self) -> None:
        """Every wait ends, and so does their sum."""
        if self.tardiness == 0.0:
            stage, policy = self.stage, self.policy
            took = stage.now - stage.referee.began_at
            longest = policy.longest_s(policy.rounds - stage.resumed_at) + stage.referee.closing_took + self.slack_s
            assert took <= longest, f"the run took {took} s: at most {longest} s"

    # ---------------------------------------------------------------- the server

    def happened(self, what: str, of_it: Any) -> None:
        if what == "opened":
            self.opened = of_it
            for client_id in self.honest:
                if self.incarnation[client_id] is not None:
                    self.pull(client_id)
        elif what == "closing":
            self.at(self.stage.now + self.delay(), self.make, of_it, self.crashes)
        elif what == "dead":
            unknowing = self.waking and self.stage.late_s <= 0.25 * self.stage.grace_s
            for client_id in of_it:
                assert unknowing or not self.steady[client_id], f"client {client_id} kept in touch and is counted dead"
        else:
            self.crashed()

    def make(self, closing: int, life: int) -> None:
        if life != self.crashes:
            return
        if self._random() < 0.02:
            self.stage.do(self.stage.now, "fail")
            return
        self.stage.do(self.stage.now, "commit")
        self.at(self.stage.now + self.delay(), self.publish, closing, life)

    def publish(self, closing: int, life: int) -> None:
        if life != self.crashes:
            return
        due = self.stage.rounds.publish_at
        if self.stage.do(self.stage.now, "publish") is False and due is not None:
            self.at(due, self.publish, closing, life)

    def crash(self) -> None:
        if self.crashes < CRASHES:
            self.stage.do(self.stage.now, "crash")

    def crashed(self) -> None:
        """The server is dead, and every connection is gone."""
        self.crashes += 1
        for client_id in range(self.policy.num_clients):
            self.disconnect(client_id)
        self.at(self.stage.now + self.delay(), self.restart)

    def restart(self) -> None:
        self.timer, self.slack_s = None, 0.0
        self.stage.do(self.stage.now, "start")
        self.all_join()
        if self.crashes < CRASHES and self._random() < 0.3:
            self.stage.do(self.stage.now, "fuse_at", 1 + int(16 * self._random()))

    def stop(self) -> None:
        self.stage.do(self.stage.now, "stop", "interrupted")

    def sleep(self) -> None:
        """The server is stopped. What comes meanwhile it finds when it wakes, but its timers may be first."""
        if not self.stage.up:
            return
        jump = self.rng.choice((1.0, 3.0, 8.0, 30.0, 500.0))
        self.slack_s += jump + self.policy.quorum_deadline_s
        self.timer = None
        self.stage.do(self.stage.now, "sleep")
        wakes_at = self.stage.now + jump
        if jump > 5.0 and self._random() < 0.5:  # long enough for connections to break
            for client_id in self.honest:
                self.disconnect(client_id)
                self.at(wakes_at + self.delay(), self.join, client_id, self.connection[client_id])
        self.waking = True
        self.stage.do(wakes_at, "tick" if self._random() < 0.7 else "wake")
        self.waking = False

    # ---------------------------------------------------------------- honest clients

    def all_join(self) -> None:
        for client_id in self.honest:
            self.at(self.stage.now + self.delay(), self.join, client_id, self.connection[client_id])

    def new_incarnation(self, client_id: int) -> bytes:
        self.lives_had[client_id] += 1
        return b"%d.%d" % (client_id, self.lives_had[client_id])

    def disconnect(self, client_id: int) -> None:
        self.incarnation[client_id], self.steady[client_id] = None, False
        self.connection[client_id] += 1

    def rejoin(self, client_id: int) -> None:
        self.disconnect(client_id)
        self.at(self.stage.now + self.delay(), self.join, client_id, self.connection[client_id])

    def join(self, client_id: int, connection: int) -> None:
        if connection != self.connection[client_id] or self.incarnation[client_id] or not self.linked[client_id]:
            return
        stage, now = self.stage, self.stage.now
        if not stage.up or self._random() < self.loses:
            self.at(now + RETRY_S, self.join, client_id, connection)
            return
        incarnation = self.new_incarnation(client_id)
        stage.do(now, "join", client_id, incarnation)
        if connection != self.connection[client_id]:
            return  # the server crashed over it
        if self._random() < self.loses:  # the reply is lost: the client joins again, and evicts itself
            self.at(now + RETRY_S, self.join, client_id, connection)
            return
        self.incarnation[client_id], self.steady[client_id] = incarnation, True
        self.at(now + self.heartbeat_s, self.beat, client_id, incarnation)
        self.pull(client_id)
        if self._random() < self.cuts:
            self.at(now + 4 * self.delay(), self.cut, client_id, incarnation)

    def beat(self, client_id: int, incarnation: bytes) -> None:
        """A heartbeat arrives, at most half a period late."""
        if incarnation != self.incarnation[client_id]:
            return
        now = self.stage.now
        if self.linked[client_id]:
            known = self.stage.do(now, "beat", client_id, incarnation)
            if incarnation != self.incarnation[client_id]:
                return
            assert known, f"client {client_id} was evicted, and nobody took its place"
            self.steady[client_id] = True
        self.at(now + self.heartbeat_s * (1.0 if self._random() < 0.5 else 1.5), self.beat, client_id, incarnation)

    def pull(self, client_id: int) -> None:
        """Get the model of the open round, if there is one, and answer it."""
        if self.stage.up and self.stage.referee.state == "open" and self.linked[client_id]:
            at = self.stage.now + self.thinks_s[client_id] + self.delay()
            self.at(at, self.push, client_id, self.incarnation[client_id], self.opened)

    def push(self, client_id: int, incarnation: bytes, round_id: int) -> None:
        if incarnation != self.incarnation[client_id] or not self.linked[client_id]:
            return
        stage, now = self.stage, self.stage.now
        chance = self._random()
        if chance < self.loses:
            self.at(now + RETRY_S, self.push, client_id, incarnation, round_id)
            return
        if self.careless:
            stage.do(now, "answer", client_id, round_id)
            if chance > 0.8:
                self.at(now + self.delay(), self.push, client_id, incarnation, round_id)
            return
        again = round_id == stage.rounds.round_id and client_id in stage.inbox
        how = stage.do(now, "push", client_id, incarnation, round_id)
        if incarnation != self.incarnation[client_id]:
            return
        expected = ("duplicate",) if again else ("accepted", "stale", "late")
        assert how in expected, f"client {client_id} answers round {round_id} and hears {how!r}"
        if how == "stale":
            self.pull(client_id)
        if chance > 1.0 - self.repeats:  # the reply is lost, or the network repeats it
            self.at(now + self.delay(), self.push, client_id, incarnation, round_id)

    def cut(self, client_id: int, incarnation: bytes) -> None:
        """A client is cut off; the server learns of it at once, later, or by its silence."""
        if incarnation != self.incarnation[client_id]:
            return
        self.linked[client_id] = self.steady[client_id] = False
        if self._random() < 0.5:
            self.at(self.stage.now + self.delay(), self.lose, client_id, incarnation)
        if self._random() < 0.8:
            self.at(self.stage.now + 3 * self.delay(), self.heal, client_id)

    def lose(self, client_id: int, incarnation: bytes) -> None:
        self.stage.do(self.stage.now, "lost", client_id, incarnation)

    def heal(self, client_id: int) -> None:
        self.linked[client_id] = True
        incarnation, chance = self.incarnation[client_id], self._random()
        if incarnation is None or chance < 0.3:
            self.rejoin(client_id)
        elif chance < 0.5:
            self.stage.do(self.stage.now, "leave", client_id, incarnation)
            self.rejoin(client_id)
        else:
            self.pull(client_id)

    # ---------------------------------------------------------------- those that may do anything

    def enter(self, client_id: int) -> None:
        self.incarnation[client_id] = incarnation = self.new_incarnation(client_id)
        self.stage.do(self.stage.now, "join", client_id, incarnation)

    def present(self, client_id: int) -> None:
        """Keep in touch; join if need be."""
        incarnation = self.incarnation[client_id]
        if incarnation is None or not self.stage.do(self.stage.now, "beat", client_id, incarnation):
            self.enter(client_id)

    def silent(self, client_id: int) -> None:
        self.present(client_id)
        self.at(self.stage.now + self.heartbeat_s, self.silent, client_id)

    def slow(self, client_id: int) -> None:
        self.present(client_id)
        if self._random() < 0.15:
            self.stage.do(self.stage.now, "push", client_id, self.incarnation[client_id], self.opened)
        self.at(self.stage.now + min(1.0, self.heartbeat_s), self.slow, client_id)

    def late(self, client_id: int) -> None:
        """Keep in touch, and answer when everybody else has: in time, too late, or not at all; then leave, perhaps."""
        self.present(client_id)
        stage = self.stage
        others = stage.up and stage.referee.live - stage.referee.answers.keys() <= self.role.keys()
        if others and self._random() < 0.3:
            stage.do(stage.now, "push", client_id, self.incarnation[client_id], self.opened)
            if self._random() < 0.25:
                stage.do(stage.now, "leave", client_id, self.incarnation[client_id])
        self.at(stage.now + min(0.5, self.heartbeat_s), self.late, client_id)

    def flapping(self, client_id: int) -> None:
        self.present(client_id)
        if self._random() < 0.7:
            how = "lost" if self._random() < 0.5 else "leave"
            self.stage.do(self.stage.now, how, client_id, self.incarnation[client_id])
        self.at(self.stage.now + self.gap(), self.flapping, client_id)

    def storm(self, client_id: int) -> None:
        for _ in range(1 + int(4 * self._random())):
            self.enter(client_id)
        self.at(self.stage.now + self.gap(), self.storm, client_id)

    def anything(self, client_id: int) -> None:
        now, chance = self.stage.now, self._random()
        old = 1 + int(self._random() * max(1, self.lives_had[client_id]))
        incarnation = b"%d.%d" % (client_id, old) if self._random() < 0.3 else self.incarnation[client_id]
        if chance < 0.25 or incarnation is None:
            self.enter(client_id)
        elif chance < 0.6:
            round_id = self.opened + (-1, 0, 0, 0, 0, 0, 0, 1)[int(self._random() * 8)]
            if self.careless:
                self.stage.do(now, "answer", client_id, round_id)
            else:
                self.stage.do(now, "push", client_id, incarnation, round_id)
        else:
            what = "beat" if chance < 0.85 else "lost" if chance < 0.95 else "leave"
            self.stage.do(now, what, client_id, incarnation)
        self.at(now + self.gap(), self.anything, client_id)


# -------------------------------------------------------------------- playing many, and telling one


def play_all(seeds: range, stage_type: type[Stage] = Stage) -> Counter[str]:
    """Play schedules and count what they met.

    Raises
    ------
    AssertionError
        One of them broke a rule: its seed, the rule, and how to get there.
    """
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen.update(Schedule(seed, stage_type).run())
        except Exception as problem:
            raise AssertionError(
                f"seed {seed}: {type(problem).__name__}: {problem}\n{explained(seed, stage_type)}"
            ) from problem
    return seen


def first_failure(seeds: range, stage_type: type[Stage]) -> tuple[int, str] | None:
    """The first seed that breaks a rule, and the rule; None when none does."""
    for seed in seeds:
        try:
            Schedule(seed, stage_type).run()
        except AssertionError as problem:
            return seed, str(problem)
    return None


def script_of(seed: int, stage_type: type[Stage] = Stage) -> tuple[Schedule, list[Step]]:
    """What happens in a schedule, up to its failure if it fails."""
    schedule = Schedule(seed, stage_type)
    with suppress(Exception):
        schedule.run()
    return schedule, schedule.stage.script


def explained(seed: int, stage_type: type[Stage] = Stage) -> str:
    """How a schedule fails: as few of its steps as will do, or all of them where the steps alone do not fail."""
    schedule, script = script_of(seed, stage_type)
    found = replay(schedule.make_stage, script)
    if found is None:
        return told(seed, stage_type)
    short = shortened(schedule.make_stage, script, found[0])
    again = replay(schedule.make_stage, short)
    failure, trace = again if again is not None else found
    return "\n".join([f"{len(script)} steps, of which {len(short)} do:", *trace, failure])


def told(seed: int, stage_type: type[Stage] = Stage) -> str:
    """The story of a schedule."""
    trace: list[str] = []
    with suppress(Exception):  # the failure whose story this is
        Schedule(seed, stage_type).run(trace)
    return "\n".join(trace)

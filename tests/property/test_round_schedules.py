"""The life of a run under random schedules, and what silent, slow and dead clients can do to its pace.

The simulator, the rules it asserts and the bugs planted to try it are in tests/support: ``round_simulator``,
``round_referee``, ``round_mutants``. ``make simulate`` plays as many schedules as you like.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from round_mutants import MUTANTS, CountsSleepAsSilence, ExpectsTheDead
from round_referee import Referee, RosterReferee
from round_simulator import explained, first_failure, play_all, random_policy, script_of, told
from round_stage import Stage, replay

from ps.roster import Roster
from ps.round_policy import RoundPolicy
from ps.rounds import Action, CloseRound, EndRun, Phase, Rounds

FOUND_WITHIN = 1_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedules", [2_000, pytest.param(10_000, marks=pytest.mark.system)])  # for the time it takes
def test_thousands_of_schedules_keep_to_the_rules_and_end(schedules):
    seen = play_all(range(schedules))
    # All that the simulator is for was met, and often, or its silence would mean little.
    for thing in (
        *("completed", "quorum_lost", "interrupted", "failed", "duplicate"),
        *("all_answered", "rest_gone", "grace_over", "patience_over", "deadline", "quorum_reached", "schedule"),
        *("crash between close and commit", "crash between commit and publish", "crash after publishing"),
        *("crash while joining", "crash while open", "crash while closing"),
        *("crash before OpenRound", "crash before CloseRound", "crash before Wait", "crash before EndRun"),
        *("stop while joining", "stop while open", "stop while closing"),
    ):
        assert seen[thing] >= schedules // 200, f"{thing}: {seen[thing]} times in {seen}"


def test_a_schedule_is_a_function_of_its_seed():
    for seed in range(50):
        assert told(seed) == told(seed)
    assert told(0) != told(1)


@pytest.mark.parametrize("bug", MUTANTS)
def test_the_simulator_finds_planted_bugs(bug):
    assert first_failure(range(FOUND_WITHIN), MUTANTS[bug]), f"{FOUND_WITHIN} schedules did not find {bug}"


class OnlyTheGuarantee(Referee):
    """Knows when a round must have closed because all honest members have answered, and not when it closes."""

    def closes_at(self):
        return -math.inf

    def acts_by(self):
        return math.inf

    def spend(self, now):
        pass

    judge = spend

    def settle(self, action, now):
        pass


def test_the_guarantee_holds_and_finds_by_itself_that_the_dead_are_expected():
    class Guaranteed(Stage):
        referee_type = OnlyTheGuarantee

    class Mutant(Guaranteed):
        rounds_type = ExpectsTheDead

    found = first_failure(range(3 * FOUND_WITHIN), Mutant)
    assert found is not None
    assert "all honest clients had answered" in found[1]
    play_all(range(found[0] + 1), Guaranteed)


def test_that_clients_kept_in_touch_finds_by_itself_that_sleep_is_taken_for_silence():
    class Credulous(RosterReferee):
        def expire(self, now):
            dead = sorted(i for i in self.live if now >= self.dies_at(i))
            self.live.difference_update(dead)
            return dead

    class Mutant(Stage):
        roster_type, members_type = CountsSleepAsSilence, Credulous

    found = first_failure(range(FOUND_WITHIN), Mutant)
    assert found is not None
    assert "kept in touch and is counted dead" in found[1]


def test_a_failure_names_its_seed_and_is_told_in_few_steps():
    mutant = MUTANTS["ClosesBelowQuorum"]
    found = first_failure(range(FOUND_WITHIN), mutant)
    assert found is not None
    seed, rule = found
    with pytest.raises(AssertionError) as failure:
        play_all(range(FOUND_WITHIN), mutant)
    first_line, steps, *story, last_line = str(failure.value).splitlines()
    assert first_line == f"seed {seed}: AssertionError: {rule}"
    assert "below the quorum" in last_line
    told_steps = [line for line in story if "->" not in line]
    assert len(told_steps) <= 8 < len(script_of(seed, mutant)[1]), steps
    assert explained(seed, mutant) == "\n".join([steps, *story, last_line])


def test_a_script_is_replayed_to_the_same_end():
    mutant = MUTANTS["KeysTheInboxByIncarnation"]
    found = first_failure(range(FOUND_WITHIN), mutant)
    assert found is not None
    schedule, script = script_of(found[0], mutant)
    failure, _ = replay(schedule.make_stage, script) or ("none", [])
    assert failure == f"AssertionError: {found[1]}"
    schedule, script = script_of(found[0])
    assert replay(schedule.make_stage, script) is None


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
                publish = (max(now + 0.5, rounds.publish_at or 0.0), action.round_id + 1)

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
        live = roster.live
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
        if roster.live != live:
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
        policy = replace(random_policy(rng), patience_share=rng.choice((0.0, 1.0)))  # in quarters of a second
        script, time = [], 0.0
        for _ in range(120):
            time += rng.choice((0.0, 0.25, 0.25, 0.5))
            script.append((time, rng.choice(kinds), rng.randrange(policy.num_clients)))
        log = play(policy, script, None)
        assert log == play(policy, script, 0.125), f"seed {seed}"
        met.update(action.reason for _, action in log if isinstance(action, CloseRound))
        met.update(action.status for _, action in log if isinstance(action, EndRun))
    assert len(met) >= 8, met


# What silent, slow, leaving and dead clients can do to the pace of a round.

Happening = tuple[float, str, int]
"""When, what (``answers``, ``gone``, ``back``), who."""


def round_of(policy: RoundPolicy, happenings: list[Happening]) -> tuple[float, Action]:
    """When and how the first round ends that opens at time 0 with everybody live."""
    rounds = Rounds(policy)
    live = set(range(policy.num_clients))
    rounds.live_changed(frozenset(live), 0.0)
    rounds.started(0.0)
    ahead = sorted(happenings)
    now = 0.0
    while True:
        due = rounds.next_tick(now)
        assert due is not None
        if ahead and ahead[0][0] <= due:
            now, what, client_id = ahead.pop(0)
            if what == "answers":
                actions = rounds.momentum_complete(client_id, 0, now)
            else:
                live = live - {client_id} if what == "gone" else live | {client_id}
                actions = rounds.live_changed(frozenset(live), now)
        else:
            now = due
            actions = rounds.tick(now)
        for action in actions:
            if isinstance(action, CloseRound | EndRun):
                return now, action


def answering_policy(rng: Random, *, spare: int = 0) -> RoundPolicy:
    """A policy with f ≥ 1 and a quorum of at most n − f − spare."""
    n = rng.randint(4 + 2 * spare, 40)
    f = rng.randint(1, (n - 1) // 2 - spare)
    quorum = rng.randint(1, n - f - spare)
    return replace(random_policy(rng), num_clients=n, num_byzantine=f, quorum=quorum, period_s=None)


def doings(rng: Random, how: str, client_id: int, until: float) -> list[Happening]:
    """What a Byzantine client does in a round."""
    time = rng.uniform(0.0, until)
    if how == "silent":
        return []
    if how == "answering at once":
        return [(0.0, "answers", client_id)]
    if how == "slow":
        return [(10 * time, "answers", client_id)]
    if how == "leaving":
        return [(time, "gone", client_id)]
    comings = [(rng.uniform(0.0, until), rng.choice(("gone", "back")), client_id) for _ in range(6)]
    return comings + [(time, "answers", client_id)] * rng.randrange(2)


HOW = ("silent", "answering at once", "slow", "leaving", "coming and going")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("deaths", [0, 3])
def test_f_byzantine_clients_and_as_many_dead_as_the_quorum_spares_cost_a_round_its_grace_at_most(how, deaths):
    reasons: Counter[str] = Counter()
    for seed in range(400):
        rng = Random(seed)
        policy = answering_policy(rng, spare=deaths)
        n, f, until = policy.num_clients, policy.num_byzantine, policy.round_deadline_s
        honest, dead = range(n - f - deaths), range(n - f - deaths, n - f)
        answers = [(rng.choice((0.0, 0.1, 0.5, 1.0)) * rng.uniform(0.0, until), "answers", i) for i in honest]
        noticed = [(rng.uniform(0.0, until), "gone", i) for i in dead]
        byzantine = [done for i in range(n - f, n) for done in doings(rng, how, i, until)]
        at, action = round_of(policy, answers + noticed + byzantine)
        assert isinstance(action, CloseRound), f"seed {seed}"
        last = max(answers)[0]
        promised = max(last + policy.grace_s(last), max(noticed, default=(0.0,))[0])
        assert at <= min(promised, until), f"seed {seed}: closed at {at}, promised {promised}"
        # And what they can do: nobody is left out who is within the wait for the rest after all but f of the honest.
        times = sorted(time for time, _, _ in answers)
        if len(times) > f:
            fast = times[-f - 1] + waited_s(policy, times[-f - 1])
            left_out = [i for time, _, i in answers if time <= min(fast, until) and i not in action.answered]
            assert not left_out, f"seed {seed}: {left_out} answered by {fast}"
        reasons[action.reason] += 1
    assert reasons["deadline"] < sum(reasons.values()), reasons


def waited_s(policy: RoundPolicy, took: float) -> float:
    """How long a member that has missed nothing is waited for at least, whoever comes and goes."""
    grace_s = policy.grace_s(took)
    return grace_s if policy.patience_s == math.inf else min(grace_s, policy.patience_share * took)


# What they can do to all rounds together, and whom patience gives up.


class Played:
    """Rounds one after the other, each of which opens as the last one closes."""

    def __init__(self, policy: RoundPolicy, rounds_type: type[Rounds] = Rounds) -> None:
        self.policy, self.rounds = policy, rounds_type(policy)
        self.live, self.opened_at = set(range(policy.num_clients)), 0.0
        self.rounds.live_changed(frozenset(self.live), 0.0)
        self.rounds.started(0.0)

    def one(self, happenings: list[Happening]) -> tuple[float, CloseRound]:
        """When, from its opening, and how a round closes in which this happens."""
        ahead, now = sorted(happenings), 0.0
        while True:
            due = self.rounds.next_tick(self.opened_at + now)
            assert due is not None
            if ahead and self.opened_at + ahead[0][0] <= due:
                now, what, client_id = ahead.pop(0)
                if what == "answers":
                    actions = self.rounds.momentum_complete(client_id, self.rounds.round_id, self.opened_at + now)
                else:
                    self.live = self.live - {client_id} if what == "gone" else self.live | {client_id}
                    actions = self.rounds.live_changed(frozenset(self.live), self.opened_at + now)
            else:
                now = due - self.opened_at
                actions = self.rounds.tick(due)
            for action in actions:
                assert not isinstance(action, EndRun)
                if isinstance(action, CloseRound):
                    self.opened_at += now
                    self.rounds.published(action.round_id + 1, self.opened_at)
                    return now, action


def patient_policy(rng: Random, rounds: int) -> RoundPolicy:
    policy = replace(answering_policy(rng), rounds=rounds + 1, round_deadline_s=1000.0, join_grace_s=0.0)
    return replace(policy, patience_s=rng.choice((0.0, 0.5, 3.0)), patience_share=0.4, patience_refill=0.1)


def schemes(rng: Random, how: str, policy: RoundPolicy, took: float, round_id: int) -> list[Happening]:
    """What f Byzantine clients do in a round of which the honest part takes ``took``."""
    n, f = policy.num_clients, policy.num_byzantine
    grace_s = policy.grace_s(took)
    done: list[Happening] = []
    for i in range(n - f, n):
        one = how if how != "anything" else rng.choice(SCHEMES)
        just_in_time, back = took + grace_s * (1.0 - 1e-6), (0.0, "back", i)
        if one == "answering as late as it can":
            done += [back, (just_in_time, "answers", i)]
        elif one == "by turns":
            done += [back] if round_id % f == i - (n - f) else [back, (0.0, "answers", i)]
        elif one == "leaving at the last moment":
            done += [back, (just_in_time, "gone", i)]
        elif one == "restoring its standing":
            done += [back, (0.0, "answers", i)] if round_id % 3 == 2 else [back]
        else:
            done += [back, *doings(rng, one, i, took + 2 * grace_s)]
    return done


SCHEMES = ("answering as late as it can", "by turns", "leaving at the last moment", "restoring its standing", *HOW)


def waited_in_all(rng: Random, how: str, rounds_type: type[Rounds] = Rounds) -> tuple[float, float]:
    """Seconds of waiting beyond the honest clients, in some tens of rounds, and how many are promised at most."""
    rounds = 60
    policy = patient_policy(rng, rounds)
    n, f = policy.num_clients, policy.num_byzantine
    run, beyond, honest_s = Played(policy, rounds_type), 0.0, 0.0
    pace_s = rng.choice((0.02, 1.0, 5.0))
    for round_id in range(rounds):
        answers = [(pace_s * rng.uniform(0.5, 2.0), "answers", i) for i in range(n - f)]
        took = max(answers)[0]
        at, _ = run.one(answers + schemes(rng, how, policy, took, round_id))
        beyond, honest_s = beyond + max(0.0, at - took), honest_s + took
    promised = (policy.patience_share + policy.patience_refill) * honest_s + f * policy.patience_s
    return beyond, promised


@pytest.mark.parametrize("how", [*SCHEMES, "anything"])
def test_over_all_rounds_f_byzantine_clients_cost_half_the_honest_time_and_their_patience_at_most(how):
    nearest = 0.0
    for seed in range(25):
        beyond, promised = waited_in_all(Random(seed), how)
        assert beyond <= promised * (1 + 1e-9), f"seed {seed}: waited {beyond} s, promised {promised} s"
        nearest = max(nearest, beyond / promised)
    assert nearest > 0.2 or how in ("leaving", "answering at once"), "it never came to waiting"


UNCHARGED = (
    "WaitsOutEachGrace",
    "ChargesNobodyThatLeaves",
    "WaitsOnCreditThatDoesNotCover",
    "GivesCreditToEachIncarnation",
)


@pytest.mark.parametrize("bug", UNCHARGED)
def test_that_bound_finds_by_itself_who_is_not_charged(bug):
    def broken(how: str, seed: int) -> bool:
        beyond, promised = waited_in_all(Random(seed), how, MUTANTS[bug].rounds_type)
        return beyond > promised * (1 + 1e-9)

    assert any(broken(how, seed) for seed in range(25) for how in SCHEMES)


def test_byzantine_clients_set_the_pace_when_the_others_make_no_quorum_and_the_policy_warns():
    for seed in range(300):
        rng = Random(seed)
        policy = answering_policy(rng)
        n, f = policy.num_clients, policy.num_byzantine
        policy = replace(policy, quorum=rng.randint(n - f + 1, n))
        give_up = policy.round_deadline_s + policy.quorum_deadline_s
        honest = [(0.0, "answers", i) for i in range(n - f)]
        ended_at, action = round_of(policy, honest)
        assert isinstance(action, EndRun), f"seed {seed}"
        assert (ended_at, action.status) == (give_up, "quorum_lost"), f"seed {seed}"
        at = rng.uniform(policy.round_deadline_s, give_up)
        closed_at, action = round_of(policy, [*honest, *((at, "answers", i) for i in range(n - f, n))])
        assert isinstance(action, CloseRound), f"seed {seed}"
        assert closed_at == at, f"seed {seed}"
        assert "can set the pace" in (policy.warning() or ""), f"seed {seed}"


def test_with_more_dead_than_the_quorum_spares_byzantine_clients_set_the_pace_too():
    policy = RoundPolicy(
        num_clients=10,
        num_byzantine=2,
        quorum=7,
        rounds=1,
        join_deadline_s=9.0,
        round_deadline_s=30.0,
        grace_factor=1.0,
        grace_floor_s=0.5,
        quorum_deadline_s=5.0,
    )
    dead = [(1.0, "gone", i) for i in range(2)]
    honest = [(1.0, "answers", i) for i in range(2, 8)]
    assert round_of(policy, [*dead[:1], (1.0, "answers", 1), *honest])[0] == 2.0
    at, action = round_of(policy, [*dead, *honest])
    assert isinstance(action, EndRun)
    assert (at, action.status) == (35.0, "quorum_lost")

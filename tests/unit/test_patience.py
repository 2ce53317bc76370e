"""For whom a round waits once the pace is reached, one claim at a time. The bound on all of it is in tests/property."""

from __future__ import annotations

import math
from itertools import pairwise
from operator import itemgetter

import pytest

from common.errors import ConfigError
from ps.round_policy import RoundPolicy
from ps.rounds import CloseRound, Rounds

T, GRACE, FREE, REFILL = 1.0, 2.0, 0.5, 0.125
"""The pace of every round here, its grace, the free share of it, and what comes back; sums of these are exact."""


class Run:
    """Ten clients, two of them Byzantine; in every round the others answer at T, unless something else is said."""

    def __init__(self, **changes: float) -> None:
        values = {"num_clients": 10, "num_byzantine": 2, "quorum": 6, "rounds": 1000, "join_deadline_s": 9.0}
        values |= {"round_deadline_s": 60.0, "grace_factor": 2.0, "grace_floor_s": 0.0, "quorum_deadline_s": 9.0}
        self.rounds = Rounds(
            RoundPolicy(**values | {"patience_s": 3.0, "patience_share": FREE} | {"patience_refill": REFILL} | changes)
        )
        self.live = frozenset(range(10))
        self.rounds.live_changed(self.live, 0.0)
        self.rounds.started(0.0)
        self.opened_at = 0.0

    def lives(self, live: frozenset[int], at: float) -> list:
        self.live = live
        return self.rounds.live_changed(live, self.opened_at + at)

    def pace(self, at: float = T) -> None:
        for client_id in range(8):
            if self.rounds.next_tick(self.opened_at) is not None:
                self.closed = self.rounds.momentum_complete(client_id, self.rounds.round_id, self.opened_at + at)

    def answers(self, client_id: int, at: float) -> list:
        return self.rounds.momentum_complete(client_id, self.rounds.round_id, self.opened_at + at)

    def close(self, actions: list | None = None) -> tuple[float, CloseRound]:
        """Wait until the round closes, if it has not; when, and how. The next one opens at once."""
        now = self.opened_at
        while not actions:
            due = self.rounds.next_tick(now)
            assert due is not None
            now = due
            actions = self.rounds.tick(now)
        (action,) = actions
        took = now - self.opened_at
        self.opened_at = now
        self.rounds.published(action.round_id + 1, now)
        return took, action

    def round(self, *late: tuple[int, float], at: float = T) -> tuple[float, str, tuple[int, ...]]:
        """A whole round, in which some answer late: how long it took, why it closed, and who was missing."""
        self.pace(at)
        if self.closed:
            return self._told(at, self.closed)
        for client_id, when in sorted(late, key=itemgetter(1)):
            due = self.rounds.next_tick(self.opened_at)
            if due is not None and due < self.opened_at + when:
                break
            if actions := self.answers(client_id, when):
                return self._told(when, actions)
        took, action = self.close()
        return took, action.reason, action.late

    def _told(self, took: float, actions: list) -> tuple[float, str, tuple[int, ...]]:
        (action,) = actions
        self.opened_at += took
        self.rounds.published(action.round_id + 1, self.opened_at)
        return took, action.reason, action.late


def durations(run: Run, rounds: int, *late: tuple[int, float]) -> list[float]:
    return [round(run.round(*late)[0], 9) for _ in range(rounds)]


def test_silence_costs_the_grace_at_first_then_the_free_share_then_nothing():
    run = Run()
    # Each grace costs 1.5 of the 3.0 that each may cost, and a sixteenth comes back in each round.
    assert run.round() == (T + GRACE, "grace_over", (8, 9))
    assert run.round() == (T + GRACE, "grace_over", (8, 9))
    assert run.round() == (T + FREE, "patience_over", (8, 9))
    assert durations(run, 5) == [T] * 5


def test_one_that_falls_silent_again_and_again_is_probed_as_often_as_the_refill_pays_for():
    run = Run(patience_s=0.0)
    took = durations(run, 200)
    assert took[:3] == [T + FREE] * 3
    probes = [number for number, seconds in enumerate(took) if seconds > T + FREE]
    assert probes
    assert set(took[3:]) == {T, T + GRACE}
    assert {later - earlier for earlier, later in pairwise(probes)} == {GRACE / (REFILL / 2) * T}


def test_a_member_within_the_free_share_is_waited_for_in_every_round_and_pays_nothing():
    run = Run(patience_s=0.0)
    assert {run.round((8, T + 0.75 * FREE), (9, T + FREE))[1] for _ in range(50)} == {"all_answered"}


def test_a_slower_one_is_waited_for_while_its_credit_lasts():
    run = Run()
    slow = (8, T + FREE + 0.5), (9, T)
    missed = [run.round(*slow)[1] != "all_answered" for _ in range(40)]
    # Half a second a round, of 3.0 which must cover 1.5 each time, and a sixteenth comes back.
    assert missed.index(True) == 4
    assert not all(missed[4:])


def test_one_answer_in_time_restores_the_standing():
    run = Run(patience_s=0.0)
    silent = (9, T)
    assert durations(run, 4, silent) == [T + FREE] * 3 + [T]
    assert run.answers(8, 0.5) == []
    run.round(silent)
    assert durations(run, 4, silent) == [T + FREE] * 3 + [T]


def test_joining_anew_buys_nothing():
    run = Run(patience_s=0.0)
    durations(run, 3)
    run.lives(run.live - {8, 9}, 0.1)
    run.lives(run.live | {8, 9}, 0.2)
    assert run.round() == (T, "patience_over", (8, 9))


def test_one_that_leaves_at_the_last_moment_has_paid_for_the_wait():
    run = Run()
    credit = run.rounds._patience.credit
    run.pace()
    run.answers(9, T)
    (action,) = run.lives(run.live - {8}, T + GRACE - 0.1)
    assert action.reason == "rest_gone"
    assert credit(8) == pytest.approx(3.0 - 1.4 + REFILL / 2)
    assert credit(9) == 3.0


def test_the_dead_pay_nothing():
    run = Run()
    run.lives(run.live - {8}, 0.5)
    run.pace()
    run.close()
    assert run.rounds._patience.credit(8) == 3.0
    assert run.rounds._patience.in_good_standing(8)


def test_a_server_that_was_stopped_charges_nobody_for_that():
    run = Run()
    run.pace()
    (action,) = run.rounds.tick(1000.0)
    assert action.reason == "deadline"
    assert run.rounds._patience.credit(8) == 3.0 - 1.5 + REFILL / 2


def test_a_round_that_the_deadline_cuts_short_is_not_held_against_anybody():
    run = Run(round_deadline_s=1.2, patience_s=0.0)
    for _ in range(5):
        assert run.round()[1] == "deadline"
    assert run.rounds._patience.in_good_standing(8)


def test_with_long_rounds_a_member_that_was_given_up_is_waited_for_again():
    run = Run(patience_s=3.0)
    slow = 30.0  # the grace is twenty times the patience
    took = []
    for _ in range(100):
        took.append(run.round(at=10.0)[0])
        run.opened_at += slow
        run.rounds._opened_at = run.opened_at
    assert max(took[3:]) == pytest.approx(30.0)


def test_infinite_patience_waits_out_each_grace():
    run = Run(patience_s=math.inf)
    assert durations(run, 20) == [T + GRACE] * 20


def test_without_byzantine_clients_there_is_no_grace_and_nobody_is_given_up():
    run = Run(num_byzantine=0)
    for _ in range(6):
        assert run.round()[1] == "deadline"


def test_below_the_quorum_everybody_is_waited_for():
    run = Run(quorum=9, patience_s=0.0)
    for _ in range(6):
        run.pace()
        assert run.rounds.next_tick(run.opened_at + T) == run.opened_at + 60.0
        assert run.answers(9, 50.0) == []  # 9 of the 8 that the pace of the others would be: the free share counts now
        run.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"patience_s": -1.0}, "patience_s = -1.0: expected at least 0"),
        ({"patience_s": math.nan}, "patience_s = nan"),
        ({"patience_share": 1.5}, "patience_share = 1.5: expected a share of 0 to 1"),
        ({"patience_refill": math.nan}, "patience_refill = nan"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(change, sentence):
    with pytest.raises(ConfigError) as refusal:
        Run(**change)
    assert sentence in str(refusal.value)

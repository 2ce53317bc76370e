"""The life of a round, one claim at a time. The whole life under random schedules is in tests/property."""

from __future__ import annotations

import math
from time import perf_counter

import pytest

from common.errors import ConfigError, exit_code_of
from ps.round_policy import RoundPolicy
from ps.rounds import CloseRound, EndRun, OpenRound, Phase, Rounds, Wait

JOIN, ROUND, QUORUM_WAIT, GRACE_FLOOR, JOIN_GRACE, TARDY = 120.0, 60.0, 40.0, 0.5, 15.0, 5.0


def policy(clients: int = 20, byzantine: int = 4, quorum: int = 16, **changes) -> RoundPolicy:
    values = {
        "num_clients": clients,
        "num_byzantine": byzantine,
        "quorum": quorum,
        "rounds": 3,
        "join_deadline_s": JOIN,
        "round_deadline_s": ROUND,
        "grace_factor": 2.0,
        "grace_floor_s": GRACE_FLOOR,
        "quorum_deadline_s": QUORUM_WAIT,
        "join_grace_s": JOIN_GRACE,
        "tardy_s": TARDY,
        "patience_s": math.inf,
    }
    return RoundPolicy(**{**values, **changes})


def ids(*groups: range | int) -> frozenset[int]:
    return frozenset(i for group in groups for i in (group if isinstance(group, range) else (group,)))


def open_round(rules: RoundPolicy, *, live: frozenset[int] | None = None, start_round: int = 0) -> Rounds:
    """A run whose first round opened at time 0 with everybody live; then the live set becomes ``live``."""
    rounds = Rounds(rules, start_round=start_round)
    rounds.live_changed(ids(range(rules.num_clients)), 0.0)
    assert rounds.started(0.0) == [OpenRound(start_round, ROUND)]
    if live is not None:
        rounds.live_changed(live, 0.0)
    return rounds


def answer(rounds: Rounds, who: range, now: float) -> list:
    """All of ``who`` answer at ``now``; the actions of the last answer, none being allowed before it."""
    actions: list = []
    for client_id in who:
        assert actions == []
        actions = rounds.momentum_complete(client_id, rounds.round_id, now)
    return actions


class TestJoining:
    def test_the_first_round_opens_when_all_have_joined(self):
        rounds = Rounds(policy(clients=2, byzantine=0, quorum=2))
        assert isinstance(rounds.started(1.0)[0], Wait)
        assert isinstance(rounds.live_changed(ids(0), 2.0)[0], Wait)
        assert rounds.live_changed(ids(0, 1), 3.0) == [OpenRound(0, 3.0 + ROUND)]
        assert rounds.phase is Phase.COLLECTING

    def test_the_wait_says_how_many_are_there_and_what_happens_next(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        rounds.live_changed(ids(range(11)), 79.0)
        assert rounds.live_changed(ids(range(12)), 79.0) == [
            Wait("12 of 20 clients have joined, waiting for 8 more; starts with at least 16 in 41 s", 12, 16, 20, JOIN)
        ]

    def test_clients_that_came_before_the_server_was_listening_count(self):
        rounds = Rounds(policy())
        assert rounds.live_changed(ids(range(20)), 0.0) == []
        assert rounds.started(1.0) == [OpenRound(0, 1.0 + ROUND)]

    def test_it_starts_with_the_quorum_at_the_join_deadline_and_not_before(self):
        rounds = Rounds(policy(quorum=12))
        rounds.started(0.0)
        rounds.live_changed(ids(range(12)), 1.0)
        assert rounds.tick(JOIN - 0.001) == []
        assert rounds.tick(JOIN) == [OpenRound(0, JOIN + ROUND)]

    def test_byzantine_clients_that_never_join_cost_the_start_its_grace_and_no_more(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        (wait,) = rounds.live_changed(ids(range(16)), 2.0)
        assert wait.until == 2.0 + JOIN_GRACE == rounds.next_tick(2.0)
        assert wait.message.endswith(
            "16 of 20 clients have joined, waiting for 4 more; starts with at least 16 in 15 s"
        )
        assert rounds.tick(2.0 + JOIN_GRACE - 0.001) == []
        assert rounds.tick(2.0 + JOIN_GRACE) == [OpenRound(0, 2.0 + JOIN_GRACE + ROUND)]

    def test_the_grace_of_a_slow_start_is_a_multiple_of_the_time_it_took(self):
        rounds = Rounds(policy())
        rounds.started(5.0)
        rounds.live_changed(ids(range(16)), 5.0 + 20.0)
        assert rounds.next_tick(25.0) == 5.0 + 20.0 + 2.0 * 20.0

    def test_the_grace_of_the_start_does_not_outlast_the_join_deadline(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        rounds.live_changed(ids(range(16)), JOIN - 3.0)
        assert rounds.next_tick(JOIN - 3.0) == JOIN
        assert rounds.tick(JOIN) == [OpenRound(0, JOIN + ROUND)]

    def test_the_grace_of_the_start_begins_anew_when_somebody_that_counted_is_lost(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        rounds.live_changed(ids(range(16)), 2.0)
        rounds.live_changed(ids(range(15)), 3.0)
        assert rounds.next_tick(3.0) == JOIN
        rounds.live_changed(ids(range(1, 17)), 4.0)
        assert rounds.next_tick(4.0) == 4.0 + JOIN_GRACE

    def test_a_quorum_above_n_minus_f_is_what_the_start_needs(self):
        rounds = Rounds(policy(quorum=18))
        rounds.started(0.0)
        rounds.live_changed(ids(range(17)), 2.0)
        assert rounds.next_tick(2.0) == JOIN
        rounds.live_changed(ids(range(18)), 2.0)
        assert rounds.next_tick(2.0) == 2.0 + JOIN_GRACE

    def test_without_byzantine_clients_the_start_waits_for_everybody_until_the_join_deadline(self):
        rounds = Rounds(policy(byzantine=0))
        rounds.started(0.0)
        rounds.live_changed(ids(range(19)), 2.0)
        assert rounds.next_tick(2.0) == JOIN

    def test_below_the_quorum_at_the_join_deadline_it_waits_visibly_then_starts_once_the_quorum_is_there(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        rounds.live_changed(ids(range(15)), 1.0)
        assert rounds.tick(JOIN) == [
            Wait(
                "15 of 20 clients have joined, need 1 more of 15, 16, 17, 18, 19; gives up in 40 s",
                *(15, 16, 20, JOIN + QUORUM_WAIT),
            )
        ]
        assert rounds.live_changed(ids(range(16)), JOIN + 5) == [OpenRound(0, JOIN + 5 + ROUND)]

    def test_without_a_quorum_it_gives_up_and_says_who_is_missing(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        rounds.live_changed(ids(range(2, 14)), 1.0)
        rounds.tick(JOIN)
        assert rounds.tick(JOIN + QUORUM_WAIT - 0.001) == []
        (end,) = rounds.tick(JOIN + QUORUM_WAIT)
        assert end.status == "quorum_lost"
        assert "12 of 20 clients joined, at least 16 were needed" in end.message
        assert "missing: 0, 1, 14, 15, 16 and 3 others" in end.message

    def test_the_same_situation_is_told_once(self):
        rounds = Rounds(policy())
        assert len(rounds.started(0.0)) == 1
        assert rounds.tick(1.0) == []
        assert rounds.started(2.0) == []
        assert len(rounds.live_changed(ids(0), 3.0)) == 1
        assert rounds.live_changed(ids(1), 4.0) == []

    def test_a_resumed_run_opens_the_round_it_was_in(self):
        rounds = open_round(policy(), start_round=2)
        assert rounds.round_id == 2

    def test_a_run_resumed_after_its_last_round_is_complete(self):
        rounds = Rounds(policy(), start_round=3)
        assert rounds.started(0.0) == [EndRun("completed", "all 3 rounds are done")]

    def test_a_start_beyond_the_last_round_is_refused(self):
        with pytest.raises(ValueError, match="start_round = 4: expected 0 to 3"):
            Rounds(policy(), start_round=4)


class TestClosing:
    def test_a_round_closes_as_soon_as_all_have_answered(self):
        rounds = open_round(policy())
        everybody = tuple(range(20))
        assert answer(rounds, range(20), 1.0) == [CloseRound(0, everybody, (), "all_answered")]
        assert rounds.phase is Phase.CLOSING

    def test_it_closes_at_once_when_every_missing_client_is_known_dead(self):
        rounds = open_round(policy(quorum=12))
        assert answer(rounds, range(13), 1.0) == []
        assert rounds.live_changed(ids(range(14)), 1.5) == []
        closing = rounds.live_changed(ids(range(13)), 2.0)
        assert closing == [CloseRound(0, tuple(range(13)), tuple(range(13, 20)), "rest_gone")]

    def test_the_answer_of_one_that_died_since_counts(self):
        rounds = open_round(policy(clients=3, byzantine=0, quorum=2))
        answer(rounds, range(1), 1.0)
        rounds.live_changed(ids(1, 2), 2.0)
        assert rounds.momentum_complete(1, 0, 3.0) == []
        (close,) = rounds.momentum_complete(2, 0, 3.0)
        assert close.answered == (0, 1, 2)

    def test_a_client_that_joins_late_is_waited_for(self):
        rounds = open_round(policy(clients=3, byzantine=0, quorum=2), live=ids(0, 1))
        rounds.momentum_complete(0, 0, 1.0)
        rounds.live_changed(ids(0, 1, 2), 1.5)
        assert rounds.momentum_complete(1, 0, 2.0) == []
        assert isinstance(rounds.momentum_complete(2, 0, 2.0)[0], CloseRound)

    def test_one_that_answered_died_and_revived_is_not_waited_for_again(self):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=2))
        rounds.momentum_complete(0, 0, 1.0)
        rounds.live_changed(ids(1), 2.0)
        rounds.live_changed(ids(0, 1), 3.0)
        assert isinstance(rounds.momentum_complete(1, 0, 4.0)[0], CloseRound)

    def test_f_silent_clients_cost_the_grace_and_no_more(self):
        rounds = open_round(policy())
        assert answer(rounds, range(16), 3.0) == []
        over = 3.0 + 2.0 * 3.0
        assert rounds.next_tick(3.0) == over
        assert rounds.tick(over - 0.001) == []
        assert rounds.tick(over) == [CloseRound(0, tuple(range(16)), (16, 17, 18, 19), "grace_over")]

    def test_a_dead_honest_client_and_f_silent_ones_cost_the_grace_and_no_more(self):
        rounds = open_round(policy(quorum=12), live=ids(range(3, 20)))
        assert answer(rounds, range(3, 16), 3.0) == []
        assert rounds.next_tick(3.0) == 3.0 + 2.0 * 3.0
        (close,) = rounds.tick(9.0)
        assert (close.reason, close.answered) == ("grace_over", tuple(range(3, 16)))

    def test_a_death_that_is_noticed_late_ends_the_round_when_its_grace_is_over_already(self):
        rounds = open_round(policy(quorum=12))
        assert answer(rounds, range(15), 3.0) == []
        assert rounds.next_tick(3.0) == ROUND
        (close,) = rounds.live_changed(ids(range(15), range(16, 20)), 20.0)
        assert (close.reason, close.answered) == ("grace_over", tuple(range(15)))

    def test_a_death_that_is_noticed_early_starts_the_grace_at_the_answer_that_was_enough(self):
        rounds = open_round(policy(quorum=12))
        assert answer(rounds, range(15), 3.0) == []
        assert rounds.live_changed(ids(range(15), range(16, 20)), 4.0) == []
        assert rounds.next_tick(4.0) == 9.0

    def test_no_death_takes_the_pace_below_the_quorum(self):
        rounds = open_round(policy(), live=ids(range(2, 20)))
        assert answer(rounds, range(2, 17), 3.0) == []
        assert rounds.next_tick(3.0) == ROUND
        assert answer(rounds, range(17, 18), 4.0) == []
        assert rounds.next_tick(4.0) == 4.0 + 2.0 * 4.0

    def test_one_that_joins_during_the_grace_is_waited_for_and_those_that_come_and_go_gain_no_time(self):
        rounds = open_round(policy(quorum=12), live=ids(range(3, 20)))
        answer(rounds, range(3, 16), 3.0)
        assert rounds.live_changed(ids(range(2, 20)), 8.0) == []
        assert rounds.next_tick(8.0) == ROUND
        (close,) = rounds.live_changed(ids(range(3, 20)), 10.0)
        assert close.reason == "grace_over"

    def test_the_grace_has_a_floor(self):
        rounds = open_round(policy())
        answer(rounds, range(16), 0.0)
        assert rounds.next_tick(0.0) == GRACE_FLOOR

    def test_the_grace_runs_from_the_answer_that_made_the_number_not_from_a_later_one(self):
        rounds = open_round(policy())
        answer(rounds, range(16), 3.0)
        answer(rounds, range(16, 18), 8.0)
        (close,) = rounds.tick(9.0)
        assert close.answered == tuple(range(18))

    def test_an_answer_at_the_very_end_of_the_grace_counts(self):
        rounds = open_round(policy())
        answer(rounds, range(16), 3.0)
        (close,) = rounds.momentum_complete(19, 0, 9.0)
        assert close.answered == (*range(16), 19)

    def test_without_byzantine_clients_everybody_is_waited_for_until_the_deadline(self):
        rounds = open_round(policy(byzantine=0))
        assert answer(rounds, range(19), 1.0) == []
        assert rounds.next_tick(1.0) == ROUND

    def test_a_quorum_above_n_minus_f_is_what_starts_the_grace(self):
        rounds = open_round(policy(byzantine=6))
        assert answer(rounds, range(15), 1.0) == []
        assert rounds.next_tick(1.0) == ROUND
        rounds.momentum_complete(15, 0, 2.0)
        assert rounds.next_tick(2.0) == 6.0

    def test_the_deadline_closes_with_the_quorum(self):
        rounds = open_round(policy(quorum=12))
        answer(rounds, range(12), 1.0)
        assert rounds.tick(ROUND - 0.001) == []
        assert rounds.tick(ROUND) == [CloseRound(0, tuple(range(12)), tuple(range(12, 20)), "deadline")]

    def test_a_long_grace_does_not_outlast_the_deadline(self):
        rounds = open_round(policy(grace_factor=100.0))
        answer(rounds, range(16), 30.0)
        assert rounds.next_tick(30.0) == ROUND
        assert rounds.tick(ROUND)[0].reason == "deadline"

    def test_an_answer_counts_once(self):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=2))
        for _ in range(3):
            assert rounds.momentum_complete(0, 0, 1.0) == []
        assert rounds.answered == {0}

    @pytest.mark.parametrize(("client_id", "round_id"), [(0, 1), (0, -1), (2, 0), (-1, 0)])
    def test_an_answer_to_another_round_or_of_a_stranger_is_ignored(self, client_id, round_id):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=1))
        assert rounds.momentum_complete(client_id, round_id, 1.0) == []
        assert rounds.answered == frozenset()

    def test_an_answer_after_the_closing_changes_nothing(self):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=1), live=ids(0))
        assert isinstance(rounds.momentum_complete(0, 0, 1.0)[0], CloseRound)
        assert rounds.momentum_complete(1, 0, 2.0) == []
        assert rounds.answered == {0}
        assert rounds.next_tick(2.0) is None
        assert rounds.tick(1e9) == []

    def test_a_stranger_among_the_live_is_a_defect(self):
        with pytest.raises(ValueError, match="client 20 is live"):
            Rounds(policy()).live_changed(ids(20), 0.0)


class TestBelowTheQuorum:
    def test_at_the_deadline_it_waits_visibly(self):
        rounds = open_round(policy(), start_round=2)
        answer(rounds, range(12), 1.0)
        assert rounds.tick(ROUND) == [
            Wait(
                "round 2: 12 of 20 answered, need 4 more of 12, 13, 14, 15, 16 and 3 others; gives up in 40 s",
                *(12, 16, 20, ROUND + QUORUM_WAIT),
            )
        ]
        assert rounds.next_tick(ROUND) == ROUND + QUORUM_WAIT

    def test_the_wait_goes_on_in_words_that_follow_the_clock(self):
        rounds = open_round(policy())
        assert rounds.waiting(1.0) is None
        rounds.tick(ROUND)
        assert "gives up in 31 s" in rounds.waiting(ROUND + 9.0).message
        assert "gives up in 0.5 s" in rounds.waiting(ROUND + QUORUM_WAIT - 0.5).message

    def test_it_closes_as_soon_as_the_quorum_is_reached(self):
        rounds = open_round(policy())
        answer(rounds, range(14), 1.0)
        rounds.tick(ROUND)
        (wait,) = rounds.momentum_complete(14, 0, ROUND + 3.0)
        assert (wait.have, wait.need) == (15, 16)
        closing = rounds.momentum_complete(19, 0, ROUND + 5.0)
        assert closing == [CloseRound(0, (*range(15), 19), (15, 16, 17, 18), "quorum_reached")]

    def test_it_gives_up_in_the_end_and_says_why(self):
        rounds = open_round(policy())
        answer(rounds, range(12), 1.0)
        rounds.tick(ROUND)
        (end,) = rounds.tick(ROUND + QUORUM_WAIT)
        assert end.status == "quorum_lost"
        assert end.message.startswith("round 0: 12 of 20 clients answered, at least 16 were needed; missing: 12, 13,")
        assert rounds.phase is Phase.ENDED

    def test_an_answer_that_is_there_before_a_late_timer_saves_the_run(self):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=2))
        rounds.momentum_complete(0, 0, 1.0)
        assert isinstance(rounds.momentum_complete(1, 0, 1e6)[0], CloseRound)

    def test_when_too_few_are_alive_it_waits_for_them_to_come_back(self):
        rounds = open_round(policy(clients=3, byzantine=0, quorum=2), live=ids(0))
        (wait,) = rounds.momentum_complete(0, 0, 1.0)
        expected = "round 0: 1 of 3 answered, need 1 more of 1, 2; gives up in 99 s"
        assert wait == Wait(expected, 1, 2, 3, ROUND + QUORUM_WAIT)
        assert rounds.live_changed(ids(0, 2), 2.0) == []
        assert rounds.waiting(2.0) is None
        assert rounds.momentum_complete(2, 0, 3.0) == [CloseRound(0, (0, 2), (1,), "rest_gone")]

    def test_a_round_that_opens_for_nobody_says_so_at_once(self):
        rounds = open_round(policy(clients=2, byzantine=0, quorum=1))
        answer(rounds, range(2), 1.0)
        rounds.live_changed(frozenset(), 2.0)
        opened, wait = rounds.published(1, 3.0)
        assert opened == OpenRound(1, 3.0 + ROUND)
        assert (wait.have, wait.need, wait.of) == (0, 1, 2)


class TestAServerThatWasStopped:
    """Its clock jumps, its timers come late, and nobody could reach it meanwhile."""

    def test_it_waits_for_the_quorum_from_when_it_is_there_again(self):
        rounds = open_round(policy())
        answer(rounds, range(12), 1.0)
        back = ROUND + QUORUM_WAIT + 1000.0
        (wait,) = rounds.tick(back)
        assert (wait.have, wait.until) == (12, back + QUORUM_WAIT)
        assert rounds.next_tick(back) == back + QUORUM_WAIT
        (end,) = rounds.tick(back + QUORUM_WAIT)
        assert end.status == "quorum_lost"

    def test_it_waits_anew_when_it_was_stopped_in_the_wait(self):
        rounds = open_round(policy())
        rounds.tick(ROUND)
        back = ROUND + QUORUM_WAIT + TARDY + 0.001
        (wait,) = rounds.tick(back)
        assert wait.until == back + QUORUM_WAIT

    def test_a_timer_that_is_a_little_late_gives_no_more_time(self):
        rounds = open_round(policy())
        rounds.tick(ROUND + TARDY)
        assert rounds.next_tick(ROUND + TARDY) == ROUND + QUORUM_WAIT
        (end,) = rounds.tick(ROUND + QUORUM_WAIT + TARDY)
        assert end.status == "quorum_lost"

    def test_it_closes_at_once_with_a_quorum(self):
        rounds = open_round(policy(quorum=12))
        answer(rounds, range(12), 1.0)
        (close,) = rounds.tick(1e6)
        assert close.reason == "deadline"

    def test_it_waits_for_clients_to_join_again(self):
        rounds = Rounds(policy())
        rounds.started(0.0)
        (wait,) = rounds.tick(1e6)
        assert wait.until == 1e6 + QUORUM_WAIT


class TestEnding:
    def small(self) -> Rounds:
        return open_round(policy(clients=1, byzantine=0, quorum=1, rounds=2))

    def test_publishing_opens_the_next_round_and_the_last_one_completes_the_run(self):
        rounds = self.small()
        rounds.momentum_complete(0, 0, 1.0)
        assert rounds.published(1, 2.0) == [OpenRound(1, 2.0 + ROUND)]
        assert rounds.answered == frozenset()
        rounds.momentum_complete(0, 1, 3.0)
        assert rounds.published(2, 4.0) == [EndRun("completed", "all 2 rounds are done")]
        assert rounds.phase is Phase.ENDED

    def test_publishing_out_of_turn_is_a_defect(self):
        rounds = self.small()
        with pytest.raises(ValueError, match="round 1 was published while round 0 was collecting"):
            rounds.published(1, 1.0)
        rounds.momentum_complete(0, 0, 1.0)
        with pytest.raises(ValueError, match="round 2 was published while round 0 was closing"):
            rounds.published(2, 1.0)

    @pytest.mark.parametrize("started", [False, True])
    def test_stopping_while_clients_join_or_answer_takes_effect_at_once(self, started):
        rounds = self.small() if started else Rounds(policy())
        assert rounds.stop("interrupted", "Ctrl-C", 1.0) == [EndRun("interrupted", "Ctrl-C")]

    def test_stopping_while_a_round_closes_waits_for_what_is_being_committed(self):
        rounds = self.small()
        rounds.momentum_complete(0, 0, 1.0)
        assert rounds.stop("interrupted", "Ctrl-C", 2.0) == []
        assert rounds.phase is Phase.CLOSING
        assert rounds.published(1, 3.0) == [EndRun("interrupted", "Ctrl-C")]

    def test_a_failure_that_leaves_nothing_to_publish_ends_the_run_at_once(self):
        rounds = self.small()
        rounds.momentum_complete(0, 0, 1.0)
        assert rounds.stop("failed", "disk full", 2.0, at_once=True) == [EndRun("failed", "disk full")]

    def test_the_first_reason_to_stop_stands_unless_a_later_one_is_a_failure(self):
        rounds = self.small()
        rounds.momentum_complete(0, 0, 1.0)
        rounds.stop("budget_exhausted", "no ε left", 2.0)
        rounds.stop("interrupted", "Ctrl-C", 2.0)
        assert rounds.published(1, 3.0) == [EndRun("budget_exhausted", "no ε left")]
        rounds = self.small()
        rounds.momentum_complete(0, 0, 1.0)
        rounds.stop("interrupted", "Ctrl-C", 2.0)
        rounds.stop("failed", "a client process died", 2.0)
        assert rounds.published(1, 3.0) == [EndRun("failed", "a client process died")]

    @pytest.mark.parametrize(("status", "ends_as"), [("interrupted", "completed"), ("failed", "failed")])
    def test_a_stop_in_the_last_closing_finds_the_run_complete_unless_it_failed(self, status, ends_as):
        rounds = open_round(policy(clients=1, byzantine=0, quorum=1, rounds=1))
        rounds.momentum_complete(0, 0, 1.0)
        rounds.stop(status, "why", 2.0)
        assert rounds.published(1, 3.0)[0].status == ends_as

    def test_nothing_happens_after_the_end(self):
        rounds = self.small()
        rounds.stop("interrupted", "Ctrl-C", 1.0)
        assert rounds.started(1.0) == []
        assert rounds.momentum_complete(0, 0, 1.0) == []
        assert rounds.live_changed(frozenset(), 1.0) == []
        assert rounds.published(1, 1.0) == []
        assert rounds.stop("failed", "late", 1.0) == []
        assert rounds.tick(1e9) == []
        assert rounds.next_tick(1.0) is None
        assert rounds.waiting(1.0) is None

    def test_its_own_statuses_have_exit_codes(self):
        assert exit_code_of("completed") == 0
        assert exit_code_of("quorum_lost") == 21


class TestPolicy:
    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"num_clients": 0}, "num_clients = 0: expected at least 1"),
            ({"num_byzantine": 20}, "num_byzantine = 20: expected 0 to 19 with 20 clients"),
            ({"num_byzantine": -1}, "num_byzantine = -1"),
            ({"quorum": 0}, "quorum = 0: expected 1 to 20"),
            ({"quorum": 21}, "quorum = 21"),
            ({"rounds": 0}, "rounds = 0"),
            ({"join_deadline_s": 0.0}, "join_deadline_s = 0.0: expected a finite number above 0"),
            ({"round_deadline_s": math.inf}, "round_deadline_s = inf"),
            ({"quorum_deadline_s": math.nan}, "quorum_deadline_s = nan"),
            ({"grace_factor": -0.1}, "grace_factor = -0.1: expected a finite number of at least 0"),
            ({"grace_floor_s": math.nan}, "grace_floor_s = nan"),
            ({"join_grace_s": -1.0}, "join_grace_s = -1.0: expected a finite number of at least 0"),
            ({"tardy_s": 0.0}, "tardy_s = 0.0: expected a finite number above 0"),
        ],
    )
    def test_a_value_out_of_range_is_refused_by_name(self, change, sentence):
        with pytest.raises(ConfigError) as refusal:
            policy(**change)
        assert sentence in str(refusal.value)

    @pytest.mark.parametrize(
        ("clients", "byzantine", "quorum", "sentence"),
        [
            (20, 4, 16, None),
            (20, 5, 16, "the quorum is 16, and only 15 of 20 clients are sure to answer"),
            (14, 4, 9, None),
            (13, 4, 9, "13 clients leave no margin for 4 Byzantine ones"),
            (1, 0, 1, None),
            (3, 0, 3, None),
        ],
    )
    def test_a_margin_so_small_that_silent_clients_set_the_pace_is_warned_of(
        self, clients, byzantine, quorum, sentence
    ):
        warning = policy(clients, byzantine, quorum).warning()
        assert warning is None if sentence is None else sentence in warning


def test_an_answer_costs_the_same_with_many_clients():
    def seconds_per_answer(clients: int) -> float:
        best = float("inf")
        for _ in range(5):
            rounds = open_round(policy(clients=clients, byzantine=0, quorum=clients))
            start = perf_counter()
            for client_id in range(400):
                rounds.momentum_complete(client_id, 0, 1.0)
                rounds.next_tick(1.0)
            best = min(best, perf_counter() - start)
        return best

    assert seconds_per_answer(50_000) < 10 * seconds_per_answer(500)


def on_schedule(**changes):
    values = {"num_clients": 3, "num_byzantine": 0, "quorum": 3, "rounds": 2, "join_deadline_s": 5.0}
    values |= {"round_deadline_s": 9.0, "grace_factor": 1.0, "grace_floor_s": 0.0, "quorum_deadline_s": 4.0}
    return RoundPolicy(**(values | {"period_s": 10.0, "margin_s": 2.0} | changes))


def opened_on_schedule():
    rounds = Rounds(on_schedule())
    rounds.started(-4.0)
    (wait,) = rounds.live_changed(frozenset({0, 1, 2}), 0.0)
    assert (wait.have, wait.until) == (3, 1.0)
    assert rounds.next_tick(0.0) == 1.0
    assert rounds.tick(1.0) == [OpenRound(0, 9.0)]
    return rounds


def test_on_a_public_schedule_answers_neither_hasten_nor_delay_a_round():
    rounds = opened_on_schedule()
    assert [rounds.momentum_complete(i, 0, 2.0) for i in range(3)] == [[], [], []]
    assert rounds.next_tick(2.0) == 9.0
    assert rounds.tick(9.0) == [CloseRound(0, (0, 1, 2), (), "schedule")]
    assert rounds.publish_at == 11.0


def test_on_a_public_schedule_the_first_round_opens_with_nobody_too():
    rounds = Rounds(on_schedule())
    (wait,) = rounds.started(0.0)
    assert wait.message == "0 of 3 clients have joined; the schedule starts in 5.0 s"
    assert rounds.tick(5.0) == [OpenRound(0, 13.0)]


def test_on_a_public_schedule_a_round_closes_with_nobody_too():
    rounds = opened_on_schedule()
    assert rounds.live_changed(frozenset(), 3.0) == []
    assert rounds.tick(9.0) == [CloseRound(0, (), (0, 1, 2), "schedule")]
    assert rounds.published(1, 11.0) == [OpenRound(1, 19.0)]


def test_on_a_public_schedule_the_first_round_opens_neither_sooner_nor_later_for_who_joins():
    rounds = Rounds(on_schedule(num_byzantine=1, quorum=2, join_grace_s=0.0))
    rounds.started(0.0)
    rounds.live_changed(frozenset({0, 1}), 1.0)
    assert rounds.live_changed(frozenset({0, 1, 2}), 2.0)[0].until == 5.0
    assert rounds.next_tick(2.0) == 5.0


def test_without_a_schedule_a_model_is_published_as_soon_as_it_can():
    assert Rounds(on_schedule(period_s=None)).publish_at is None


@pytest.mark.parametrize("margin", [10.0, 11.0, -1.0])
def test_a_margin_that_leaves_no_time_to_collect_is_refused(margin):
    with pytest.raises(ConfigError, match="margin_s"):
        on_schedule(margin_s=margin)

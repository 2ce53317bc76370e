"""Identity, incarnation, liveness."""

from __future__ import annotations

from time import perf_counter

import pytest

from common.errors import ConfigError
from ps.roster import Member, Roster, Standing


@pytest.fixture
def roster() -> Roster:
    return Roster(range(3), liveness_s=10.0, reconnect_grace_s=2.0)


def test_a_client_that_joins_is_live_and_a_member(roster):
    assert roster.join(1, b"a", 5.0) is None
    assert roster.live == {1}
    assert roster.members[1] == Member(1, b"a", joined_at=5.0, last_seen=5.0, alive=True, incarnations=1)
    assert roster.joined_ever == {1}


def test_an_identity_that_is_not_on_the_roster_cannot_join(roster):
    with pytest.raises(KeyError, match="client 3 is not one of the 3 identities"):
        roster.join(3, b"a", 0.0)
    assert not roster.members
    assert roster.standing(3, b"a") is Standing.UNKNOWN_CLIENT


def test_a_newer_incarnation_evicts_the_older_which_may_no_longer_speak(roster):
    roster.join(0, b"old", 0.0)
    assert roster.join(0, b"new", 1.0) == b"old"
    assert roster.live == {0}
    assert roster.members[0].incarnations == 2
    assert roster.standing(0, b"new") is Standing.CURRENT
    assert roster.standing(0, b"old") is Standing.SUPERSEDED
    assert roster.standing(0, b"made up") is roster.standing(1, b"made up") is Standing.NOT_A_MEMBER
    assert not roster.heartbeat(0, b"old", 2.0)
    assert not roster.lost(0, b"old", 2.0)
    assert not roster.leave(0, b"old", 2.0)
    assert roster.live == {0}
    assert roster.members[0].last_seen == 1.0


def test_a_dead_incarnation_is_evicted_too(roster):
    roster.join(0, b"old", 0.0)
    assert roster.tick(10.0) == [0]
    assert roster.join(0, b"new", 11.0) == b"old"
    assert roster.live == {0}


def test_a_retried_join_of_the_current_incarnation_evicts_nobody(roster):
    roster.join(0, b"a", 0.0)
    assert roster.join(0, b"a", 4.0) is None
    assert roster.members[0] == Member(0, b"a", joined_at=0.0, last_seen=4.0, alive=True, incarnations=1)


def test_one_that_left_is_no_member_until_it_joins_again(roster):
    roster.join(0, b"a", 0.0)
    assert roster.leave(0, b"a", 1.0)
    assert roster.live == frozenset()
    assert 0 not in roster.members
    assert roster.standing(0, b"a") is Standing.NOT_A_MEMBER
    assert not roster.heartbeat(0, b"a", 2.0)
    assert not roster.leave(0, b"a", 2.0)
    assert roster.joined_ever == {0}
    assert roster.join(0, b"b", 3.0) is None
    assert roster.members[0].incarnations == 2
    assert roster.tick(12.9) == []


def test_a_member_is_dead_exactly_when_it_was_silent_for_liveness_s(roster):
    roster.join(0, b"a", 0.0)
    roster.join(1, b"b", 0.0)
    assert roster.heartbeat(1, b"b", 4.0)
    assert roster.tick(9.999) == []
    assert roster.tick(10.0) == [0]
    assert roster.live == {1}
    assert not roster.members[0].alive
    assert roster.tick(13.0) == []
    assert roster.tick(14.0) == [1]


def test_a_death_is_reported_once(roster):
    roster.join(0, b"a", 0.0)
    assert roster.tick(10.0) == [0]
    assert roster.tick(10.0) == []
    assert roster.tick(30.0) == []


def test_several_deaths_are_reported_by_id(roster):
    for client_id, now in ((2, 0.0), (0, 0.1), (1, 0.2)):
        roster.join(client_id, b"a", now)
    assert roster.tick(10.2) == [0, 1, 2]


def test_a_dead_member_is_still_current_and_a_heartbeat_revives_it(roster):
    roster.join(0, b"a", 0.0)
    roster.tick(10.0)
    assert roster.standing(0, b"a") is Standing.CURRENT
    assert roster.heartbeat(0, b"a", 50.0)
    assert roster.live == {0}
    assert roster.members[0].alive
    assert roster.tick(59.9) == []
    assert roster.tick(60.0) == [0]


def test_a_lost_stream_leaves_time_to_reconnect(roster):
    roster.join(0, b"a", 0.0)
    assert roster.lost(0, b"a", 1.0)
    assert roster.live == {0}
    assert roster.tick(2.9) == []
    assert roster.tick(3.0) == [0]


def test_one_that_reconnects_in_time_is_not_dead(roster):
    roster.join(0, b"a", 0.0)
    roster.lost(0, b"a", 1.0)
    roster.heartbeat(0, b"a", 2.5)
    assert roster.tick(12.4) == []
    assert roster.tick(12.5) == [0]


def test_a_newer_incarnation_does_not_inherit_the_loss_of_the_older(roster):
    roster.join(0, b"a", 0.0)
    roster.lost(0, b"a", 1.0)
    roster.join(0, b"b", 2.0)
    assert roster.tick(5.0) == []


def test_losing_the_stream_again_does_not_lengthen_the_grace(roster):
    roster.join(0, b"a", 0.0)
    roster.lost(0, b"a", 1.0)
    roster.lost(0, b"a", 2.5)
    assert roster.tick(3.0) == [0]


def test_a_loss_never_lengthens_a_life(roster):
    roster.join(0, b"a", 0.0)
    roster.lost(0, b"a", 9.5)
    assert roster.tick(10.0) == [0]
    assert roster.lost(0, b"a", 10.5)
    assert roster.tick(20.0) == []


def test_the_next_tick_is_when_the_next_member_would_die(roster):
    assert roster.next_tick(0.0) is None
    roster.join(0, b"a", 0.0)
    roster.join(1, b"b", 4.0)
    assert roster.next_tick(4.0) == 10.0
    roster.lost(1, b"b", 5.0)
    assert roster.next_tick(5.0) == 7.0
    assert roster.next_tick(8.0) == 8.0
    assert roster.tick(7.0) == [1]
    assert roster.tick(10.0) == [0]
    assert roster.next_tick(10.0) is None


def test_silence_while_the_server_was_stopped_does_not_count(roster):
    roster.join(0, b"a", 0.0)
    roster.join(1, b"b", 1.0)
    assert roster.tick(500.0) == []
    assert roster.live == {0, 1}
    assert roster.next_tick(500.0) == 502.0
    assert roster.heartbeat(0, b"a", 501.0)
    assert roster.tick(502.0) == [1]
    assert roster.tick(511.0) == [0]


def test_a_lost_stream_may_come_back_after_the_server_was_stopped(roster):
    roster.join(0, b"a", 0.0)
    roster.lost(0, b"a", 1.0)
    assert roster.tick(9.0) == []
    assert roster.heartbeat(0, b"a", 10.9)
    assert roster.tick(20.8) == []
    assert roster.tick(20.9) == [0]


def test_those_that_would_not_be_dead_yet_keep_their_time_when_the_server_was_stopped(roster):
    roster.join(0, b"a", 0.0)
    roster.join(1, b"b", 8.0)
    assert roster.tick(15.0) == []
    assert roster.tick(17.0) == [0]
    assert roster.tick(18.0) == [1]


def test_a_tick_that_is_a_little_late_gives_no_more_time(roster):
    roster.join(0, b"a", 0.0)
    assert roster.tick(10.5) == [0]


def test_the_view_of_the_members_cannot_be_written(roster):
    with pytest.raises(TypeError):
        roster.members[0] = None
    roster.join(0, b"a", 0.0)
    with pytest.raises(AttributeError):
        roster.members[0].alive = False


@pytest.mark.parametrize(
    ("identities", "durations", "sentence"),
    [
        ([], {}, "empty"),
        ([1, 1], {}, "twice"),
        ([1], {"liveness_s": 0.0}, "liveness_s = 0.0"),
        ([1], {"liveness_s": float("nan")}, "liveness_s = nan"),
        ([1], {"reconnect_grace_s": -1.0}, "reconnect_grace_s = -1.0"),
    ],
)
def test_a_roster_that_makes_no_sense_is_refused(identities, durations, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Roster(identities, **{"liveness_s": 1.0, **durations})


def test_a_heartbeat_costs_the_same_with_a_hundred_times_the_members():
    def seconds_per_heartbeat(members: int) -> float:
        roster = Roster(range(members), liveness_s=10.0)
        for client_id in range(members):
            roster.join(client_id, b"a", 0.0)
        best = float("inf")
        for attempt in range(5):
            start = perf_counter()
            for beat in range(1000):
                roster.heartbeat(beat % members, b"a", float(attempt))
                roster.tick(float(attempt))
            best = min(best, perf_counter() - start)
        return best

    assert seconds_per_heartbeat(5000) < 10 * seconds_per_heartbeat(50)

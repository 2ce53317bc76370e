"""Strikes, suspensions and how often an identity may join, one claim at a time."""

from __future__ import annotations

import asyncio
import math

import pytest

import ps.tally
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.records import RefusalCount
from ps.strikes import BREACHES, Strikes
from ps.tally import Tally


def three_in_a_minute(**changes) -> Strikes:
    return Strikes(**{"strikes": 3, "window_s": 60.0, "suspension_s": 30.0} | changes)


def test_the_third_strike_within_the_window_suspends_and_no_other_does():
    strikes = three_in_a_minute()
    assert [strikes.strike(1, now) for now in (0.0, 30.0, 60.0)] == [False, False, True]
    assert strikes.suspended_s(1, 60.0) == 30.0


def test_strikes_older_than_the_window_are_forgotten():
    strikes = three_in_a_minute()
    assert [strikes.strike(1, now) for now in (0.0, 1.0, 60.5, 61.5, 62.0)] == [False, False, False, False, True]


def test_a_suspension_concerns_nobody_else():
    strikes = three_in_a_minute()
    assert [strikes.strike(client_id, 0.0) for client_id in (1, 2, 1, 2)] == [False] * 4
    assert strikes.strike(1, 1.0)
    assert strikes.suspended_s(2, 1.0) == 0.0


def test_after_a_suspension_an_identity_is_clean_and_meanwhile_nothing_is_counted():
    strikes = three_in_a_minute()
    for _ in range(3):
        strikes.strike(1, 0.0)
    assert [strikes.strike(1, 29.0) for _ in range(5)] == [False] * 5
    assert strikes.suspended_s(1, 29.0) == 1.0
    assert strikes.suspended_s(1, 30.0) == 0.0
    assert [strikes.strike(1, 31.0) for _ in range(3)] == [False, False, True]


def test_without_a_limit_nobody_is_suspended():
    strikes = three_in_a_minute(strikes=0)
    assert not any(strikes.strike(1, 0.0) for _ in range(100))


def test_what_befalls_the_honest_is_no_breach_and_neither_is_what_a_momentum_says():
    innocent = {"TRUNCATED", "LATE", "STALE_ROUND", "ROW_BUSY", "TOO_MANY_CALLS", "SUPERSEDED", "NOT_A_MEMBER"}
    assert innocent.isdisjoint(pb.RefusalKind.Name(kind) for kind in BREACHES)
    assert set(pb.RefusalKind.values()) >= BREACHES  # non_finite is no refusal at all


def test_an_identity_may_join_a_few_times_at_once_and_then_once_in_a_while():
    joins = Strikes(max_joins=10, join_every_s=2.0)
    assert [joins.join(1, 0.0) for _ in range(10)] == [0.0] * 10
    assert joins.join(1, 0.0) == 2.0
    assert joins.join(1, 0.5) == pytest.approx(1.5)
    assert joins.join(2, 0.5) == 0.0
    assert joins.join(1, 2.0) == 0.0
    assert joins.join(1, 2.0) == 2.0
    assert [joins.join(1, 1000.0) for _ in range(11)] == [0.0] * 10 + [2.0]


def test_who_joins_once_in_so_long_is_never_refused():
    joins = Strikes(max_joins=1, join_every_s=2.0)
    assert not any(joins.join(1, 2.0 * number) for number in range(100))


def test_joining_is_free_by_default():
    joins = Strikes()
    assert not any(joins.join(1, 0.0) for _ in range(1000))
    assert math.isinf(joins._max_joins)


# Counting refusals.


class Recorder:
    def __init__(self, monkeypatch, every_s: float) -> None:
        monkeypatch.setattr(ps.tally, "WRITE_EVERY_S", every_s)
        self.writes: list[list[RefusalCount]] = []
        self.changed = asyncio.Event()
        self.tally = Tally(self.write)

    def write(self, counts) -> None:
        self.writes.append(list(counts))
        self.changed.set()


def test_a_flood_of_refusals_is_written_in_as_many_lines_as_it_has_kinds_and_senders(monkeypatch):
    async def flood():
        recorder = Recorder(monkeypatch, 1e6)
        for number in range(10_000):
            recorder.tally.add(("late", "malformed")[number % 2], number % 3, number // 1000)
        assert recorder.writes == [[RefusalCount("late", 0, 1, 0, 0)]]
        recorder.tally.flush()
        recorder.tally.flush()
        assert len(recorder.writes) == 2
        assert sum(count.count for count in recorder.writes[1]) == 9_999
        assert len(recorder.writes[1]) == 6
        assert {(count.first_round, count.last_round) for count in recorder.writes[1]} == {(0, 9)}
        recorder.tally.add("late", None, 9)
        recorder.tally.close()
        assert recorder.writes[2:] == [[RefusalCount("late", None, 1, 9, 9)]]

    asyncio.run(flood())


def test_what_follows_the_first_is_written_a_little_later_without_being_asked_for(monkeypatch):
    async def two():
        recorder = Recorder(monkeypatch, 0.01)
        recorder.tally.add("late", 1, 0)
        recorder.changed.clear()
        recorder.tally.add("late", 1, 0)
        await asyncio.wait_for(recorder.changed.wait(), 60.0)
        assert recorder.writes == [[RefusalCount("late", 1, 1, 0, 0)]] * 2

    asyncio.run(two())

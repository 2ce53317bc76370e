"""The timeline, without a clock: what is due when, once each, and in which order."""

from __future__ import annotations

from typing import Any

from deploy.chaos.faults import Kill, Partition, Restart
from deploy.chaos.timeline import Occurrence, Timeline


def partition(**keys: Any) -> Partition:
    return Partition.model_validate({"do": "partition", "on": "client-0", **keys})


def begun(timeline: Timeline, now_s: float | None, rounds: int) -> list[str]:
    return [str(item.at) for item in timeline.due(now_s, rounds)[1]]


def test_what_is_at_the_start_comes_first_and_once() -> None:
    timeline = Timeline([partition(at="round 1"), partition(at="start")])
    assert begun(timeline, None, 0) == ["start"]
    assert begun(timeline, None, 0) == []
    assert begun(timeline, 0.0, 1) == ["round 1"]


def test_seconds_count_from_the_first_round() -> None:
    timeline = Timeline([partition(at=0), partition(at=2.0)])
    assert begun(timeline, None, 0) == []
    assert timeline.next_s(None) is None
    assert begun(timeline, 0.0, 1) == ["0 s"]
    assert timeline.next_s(0.5) == 1.5
    assert begun(timeline, 2.0, 1) == ["2 s"]


def test_a_round_that_was_overrun_is_not_missed() -> None:
    timeline = Timeline([partition(at=["round 3", "round 5", "round 9"])])
    assert begun(timeline, 1.0, 6) == ["round 3", "round 5"]
    assert [str(item.at) for item in timeline.missed] == ["round 9"]


def test_a_fault_ends_after_its_seconds_or_its_rounds() -> None:
    timeline = Timeline([partition(at=1, **{"for": 2}), partition(at="round 4", **{"for": "3 rounds"})])
    timeline.due(1.0, 4)
    assert len(timeline.holding) == 2
    assert timeline.next_s(1.0) == 2.0
    (over,), _ = timeline.due(3.0, 6)
    assert (str(over.at), over.began_s, over.ended_s, over.ended_round) == ("1 s", 1.0, 3.0, 6)
    (over,), _ = timeline.due(3.1, 7)
    assert (str(over.at), over.began_round, over.ended_round) == ("round 4", 4, 7)
    assert timeline.holding == []
    assert timeline.due(100.0, 100) == ([], [])


def test_a_fault_without_an_end_holds_to_the_end() -> None:
    timeline = Timeline([Kill.model_validate({"do": "kill", "on": "client-0", "at": 1})])
    timeline.due(1.0, 1)
    assert timeline.due(1e9, 10**9) == ([], [])
    assert [item.holds for item in timeline.occurrences] == [True]


def test_a_momentary_fault_never_holds() -> None:
    timeline = Timeline([Restart.model_validate({"do": "restart", "on": "client-0", "at": 1})])
    (item,) = timeline.due(1.5, 1)[1]
    assert (item.holds, item.began_s, item.ended_s) == (False, 1.5, 1.5)
    assert timeline.next_s(2.0) is None


def test_the_length_of_a_fault_from_the_start_counts_from_the_first_round() -> None:
    timeline = Timeline([partition(at="start", **{"for": 2})])
    timeline.due(None, 0)
    assert timeline.due(1.9, 5) == ([], [])
    assert len(timeline.due(2.0, 5)[0]) == 1


def test_ends_are_told_before_beginnings() -> None:
    timeline = Timeline([partition(at=1, **{"for": 1}), partition(at=2)])
    timeline.due(1.0, 1)
    over, new = timeline.due(2.0, 1)
    assert [str(item.at) for item in (*over, *new)] == ["1 s", "2 s"]
    assert timeline.holding == new


def test_an_occurrence_says_what_became_of_it() -> None:
    fault = Kill.model_validate({"do": "kill", "on": ["ps", "client-0"], "at": "round 2", "for": 1.5})
    item = Occurrence(fault, fault.at[0])
    item.note("not running: client-0")
    item.note("not running: client-0")
    told = item.as_json()
    assert (told["on"], told["at"], told["for"], told["began_s"]) == (["ps", "client-0"], "round 2", "1.5 s", None)
    assert told["notes"] == ["not running: client-0"]

"""Schedules: public functions of the round, fixed before round 0."""

import math

import pytest

from common.schedules import parse_schedule


def test_a_number_is_constant():
    assert [parse_schedule(0.5)(t) for t in (0, 1, 999)] == [0.5, 0.5, 0.5]


def test_inverse_sqrt_is_fed_ngas_learning_rate():
    schedule = parse_schedule({"kind": "inverse_sqrt", "a": 1, "b": 2, "c": 0.002})
    assert schedule(0) == 0.5
    assert schedule(500) == pytest.approx(1 / (2 * math.sqrt(2)))


def test_power_decays_from_its_offset():
    schedule = parse_schedule({"kind": "power", "a": 6, "c": 2, "p": 1})
    assert [schedule(t) for t in (0, 1, 4)] == [3.0, 2.0, 1.0]


def test_a_list_goes_on_with_its_last_value():
    assert [parse_schedule([0.3, 0.2])(t) for t in range(4)] == [0.3, 0.2, 0.2, 0.2]


def test_a_momentum_is_held_below_one_and_the_clamped_rounds_are_counted():
    schedule = parse_schedule({"kind": "power", "a": 4, "c": 1, "p": 1}).clamped()
    values = [schedule(t) for t in range(6)]
    assert values[0] < 1
    assert values[4] == 0.8
    assert schedule.clamps_in(6) == 4


def test_a_negative_momentum_becomes_zero():
    assert parse_schedule([-0.5]).clamped()(0) == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "cosine"}, "kind = 'cosine'"),
        ({"kind": "power", "a": 1, "c": 1}, "power takes a, c, p"),
        ({"kind": "power", "a": 1, "c": 0, "p": 1}, "c > 0"),
        ({"kind": "inverse_sqrt", "a": 1, "b": 0, "c": 1}, "b ≠ 0"),
        ([], "at least one"),
        ([1.0, float("nan")], "item 1 = nan"),
        ("fast", "expected a number"),
        (True, "expected a number"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(given, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(given)


@pytest.mark.parametrize("given", [0.25, [1.0, 2.0], {"kind": "power", "a": 1.0, "c": 2.0, "p": 0.5}])
def test_a_schedule_reads_back_from_its_json(given):
    schedule = parse_schedule(given)
    assert parse_schedule(schedule.as_json()) == schedule

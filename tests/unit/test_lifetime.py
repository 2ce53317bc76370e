"""A client's privacy total over all runs with one parameter server: what is charged, and what still fits."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from client.lifetime import Charge, Lifetime, Limit
from common.errors import PrivacyError
from common.privacy.calibration import calibrate
from common.privacy.conversions import epsilon_of

HERE, THERE = "ps.example:5000", "10.0.0.7:5000"
DELTA = 1e-5


def run(name, *, z=10.0, rounds=100, server=HERE, discrete=False):
    return Charge.planned(name, server, z, rounds, discrete=discrete)


def total(*runs, limit=None):
    lifetime = Lifetime()
    for one in runs:
        lifetime = lifetime.reserve(one, limit)
    return lifetime


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-2, 1e3), st.floats(1e-10, 0.1), st.integers(1, 12), st.integers(1, 100_000), st.booleans())
@example(1.0, 1e-5, 3, 1, False)
@example(8.0, 1e-3, 7, 800, True)
def test_exactly_the_planned_number_of_runs_fits(epsilon, delta, runs, rounds, discrete):
    calibration = "renyi" if discrete else "exact"
    z, limit = calibrate(epsilon, delta, runs * rounds, calibration), Limit(epsilon, delta)
    planned = [run(f"run-{k}", z=z, rounds=rounds, discrete=discrete) for k in range(runs)]
    lifetime = total(*planned, limit=limit)
    assert lifetime.epsilon(HERE, delta) == pytest.approx(epsilon, rel=1e-6)
    with pytest.raises(PrivacyError):
        lifetime.reserve(run("one too many", z=z, rounds=1, discrete=discrete), limit)


def test_the_total_is_that_of_all_releases_as_one_composition():
    lifetime = total(run("a", z=10.0, rounds=100), run("b", z=20.0, rounds=400), run("c", z=30.0, rounds=900))
    assert lifetime.epsilon(HERE, DELTA) == pytest.approx(epsilon_of(math.sqrt(3), DELTA, "exact"), rel=1e-12)


def test_an_address_is_charged_for_the_runs_it_was_reached_for_and_no_others():
    lifetime = total(run("a"), run("b", server=THERE), run("c", server=THERE))
    assert lifetime.spent(THERE) == 2 * lifetime.spent(HERE) == lifetime.spent(HERE) + run("d").cost
    assert lifetime.epsilon("elsewhere:1", DELTA) == 0


def test_a_run_that_is_resumed_is_charged_once_to_each_address_it_is_reached_by():
    once = total(run("a"))
    assert once.reserve(run("a")) == once
    moved = once.reserve(run("a", server=THERE))
    assert moved.spent(HERE) == moved.spent(THERE) == once.spent(HERE)
    assert len(moved.charges) == 1


def test_a_resumed_run_that_fits_exactly_is_not_refused():
    limit = Limit(2.0, DELTA)
    lifetime = total(run("a", z=calibrate(2.0, DELTA, 100)), limit=limit)
    assert lifetime.reserve(run("a", z=calibrate(2.0, DELTA, 100)), limit) == lifetime


@pytest.mark.parametrize("other", [{"z": 9.0}, {"rounds": 101}, {"discrete": True}])
def test_a_run_that_changes_its_terms_is_refused(other):
    with pytest.raises(PrivacyError, match="run a was joined before as 100 releases at noise multiplier 10"):
        total(run("a"), run("a", **other))


def test_a_reservation_stands_until_it_is_settled_and_then_costs_what_was_released():
    reserved = total(run("a", rounds=100), run("b", rounds=100))
    settled = reserved.settle("a", 40)
    assert settled.spent(HERE) == run("x", rounds=140).cost
    assert [charge.settled for charge in settled.charges] == [True, False]
    assert reserved.settle("a", None).spent(HERE) == reserved.spent(HERE)  # perhaps all of them
    assert reserved.settle("a", 5000).spent(HERE) == reserved.spent(HERE)  # never more than planned


def test_a_settled_run_that_goes_on_after_all_is_reserved_anew():
    assert total(run("a")).settle("a", 40).reserve(run("a")) == total(run("a"))


def test_a_run_without_noise_has_no_bound_and_is_refused_under_any_limit():
    unbounded = run("a", z=0.0)
    assert total(unbounded, run("b")).epsilon(HERE, DELTA) == math.inf
    assert total(unbounded, run("b")).epsilon(THERE, DELTA) == 0
    with pytest.raises(PrivacyError, match="100 releases without secret noise: inf"):
        total(unbounded, limit=Limit(1e6, DELTA))
    with pytest.raises(PrivacyError, match="together inf"):  # one of them spoils the rest
        total(unbounded).reserve(run("b", z=1e6), Limit(1e6, DELTA))


def test_discrete_noise_is_charged_by_the_conversion_that_holds_for_it():
    continuous, discrete = total(run("a")), total(run("a", discrete=True))
    assert continuous.epsilon(HERE, DELTA) == epsilon_of(1.0, DELTA, "exact")
    assert discrete.epsilon(HERE, DELTA) == epsilon_of(1.0, DELTA, "renyi")
    assert total(run("a"), run("b", discrete=True)).epsilon(HERE, DELTA) == pytest.approx(
        epsilon_of(math.sqrt(2), DELTA, "renyi"), rel=1e-12
    )
    tight = Limit(discrete.epsilon(HERE, DELTA) * (1 - 1e-6), DELTA)
    total(run("a"), limit=tight)
    with pytest.raises(PrivacyError):
        total(run("a", discrete=True), limit=tight)


def test_a_refusal_names_the_total_the_run_the_limit_and_the_remedy():
    with pytest.raises(PrivacyError) as refused:
        total(run("first"), run("second"), limit=Limit(5.0, DELTA))
    one, two = (epsilon_of(math.sqrt(k), DELTA, "exact") for k in (1, 2))
    for said in (
        "run second is refused",
        "client.lifetime_epsilon = 5 at delta = 1e-05",
        HERE,
        f"so far: epsilon = {one:.4g}",
        f"100 releases at noise multiplier 10: {one:.4g}",
        f"together {two:.4g}",
        "raise client.lifetime_epsilon",
    ):
        assert said in str(refused.value)


def test_what_is_stored_is_read_back_exactly():
    lifetime = total(run("a", z=0.1 + 0.2), run("b", server=THERE, discrete=True), run("c", z=0.0)).settle("b", 3)
    lifetime = lifetime.reserve(run("a", z=0.1 + 0.2, server=THERE))
    again = Lifetime.from_json(json.loads(json.dumps(lifetime.to_json())))
    assert again == lifetime
    assert again.spent(HERE) == lifetime.spent(HERE)

"""What holds for all ε, δ, T and multipliers."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from common.privacy.calibration import (
    calibrate,
    compose,
    epsilon_exact,
    epsilon_improved,
    epsilon_of,
    epsilon_renyi,
    mu_to_delta,
    multiplier_exact,
    multiplier_improved,
    multiplier_renyi,
    sufficient_multiplier,
)

EPSILONS = (epsilon_exact, epsilon_improved, epsilon_renyi)
MULTIPLIERS = (multiplier_exact, multiplier_improved, multiplier_renyi)
ROUNDING = 1 + 1e-12

multipliers = st.floats(1e-3, 1e6)
epsilons = st.floats(1e-4, 1e4)
deltas = st.floats(1e-12, 0.5)
rounds = st.integers(1, 100_000)
factors = st.floats(1.001, 100)

few = settings(max_examples=60, deadline=None)


@few
@given(multipliers, rounds, deltas, factors)
def test_less_noise_costs_more(z, T, delta, factor):
    for epsilon in EPSILONS:
        more, less = epsilon(z / factor, T, delta), epsilon(z, T, delta)
        assert more > less or more == less == 0


@few
@given(multipliers, rounds, deltas, st.integers(1, 100_000))
def test_more_rounds_cost_more(z, T, delta, extra):
    for epsilon in EPSILONS:
        assert epsilon(z, T + extra, delta) * ROUNDING >= epsilon(z, T, delta)
        assert epsilon(z, 2 * T, delta) > epsilon(z, T, delta) or epsilon(z, 2 * T, delta) == 0


@few
@given(multipliers, rounds, deltas, factors)
def test_a_larger_delta_buys_a_smaller_epsilon(z, T, delta, factor):
    larger = delta + (1 - delta) * (1 - 1 / factor) / 2
    for epsilon in EPSILONS:
        assert epsilon(z, T, larger) <= epsilon(z, T, delta) * ROUNDING


@few
@given(multipliers, rounds, deltas)
def test_the_conversions_are_ordered_in_epsilon(z, T, delta):
    exact, improved, renyi = (epsilon(z, T, delta) for epsilon in EPSILONS)
    assert exact <= improved * ROUNDING
    assert improved <= renyi * ROUNDING


@few
@given(epsilons, deltas, rounds)
def test_the_conversions_are_ordered_in_noise(eps, delta, T):
    exact, improved, renyi = (multiplier(eps, delta, T) for multiplier in MULTIPLIERS)
    assert exact <= improved * ROUNDING
    assert improved <= renyi * ROUNDING
    if eps < 2.343 * math.log(1 / delta):
        assert renyi <= sufficient_multiplier(eps, delta, T) * ROUNDING


@few
@given(epsilons, deltas, rounds)
def test_multiplier_and_epsilon_are_inverse(eps, delta, T):
    for epsilon, multiplier in zip(EPSILONS, MULTIPLIERS, strict=True):
        z = multiplier(eps, delta, T)
        assert epsilon(z * (1 + 1e-9), T, delta) <= eps
        assert epsilon(z * (1 - 1e-6), T, delta) > eps


@few
@given(epsilons, deltas, rounds)
def test_a_calibrated_run_keeps_its_promise(eps, delta, T):
    z = calibrate(eps, delta, T, "exact")
    assert epsilon_exact(z, T, delta) <= eps
    assert mu_to_delta(eps, math.sqrt(T) / z) <= delta
    assert epsilon_renyi(calibrate(eps, delta, T, "renyi"), T, delta) <= eps


@few
@given(st.lists(multipliers, min_size=1, max_size=20), deltas)
def test_the_order_of_releases_does_not_matter_and_each_one_costs(zs, delta):
    mu = compose(zs)
    assert math.isclose(mu, compose(sorted(zs)), rel_tol=1e-13)
    assert compose([*zs, min(zs)]) > mu
    for conversion in ("exact", "improved", "renyi"):
        assert epsilon_of(mu, delta, conversion) * ROUNDING >= epsilon_of(1 / min(zs), delta, conversion)

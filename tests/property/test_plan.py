"""What holds of every plan."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.aggregation import make_rule
from common.errors import ByzULDPError
from ps.privacy.plan import plan
from ps.privacy.signal import largest_aggregate, smallest
from ps.release import Mechanism

few = settings(max_examples=40, deadline=None)

multipliers = st.floats(1e-2, 1e4)
epsilons = st.floats(1e-3, 1e3)
deltas = st.floats(1e-12, 1e-4)
rounds = st.integers(1, 10_000)
calibrations = st.sampled_from(["exact", "renyi"])
factors = st.floats(1.01, 100)


@few
@given(multipliers, rounds, deltas, calibrations, factors)
def test_less_noise_and_more_rounds_cost_more(z, T, delta, calibration, factor):
    def costs(z, T):
        return plan(noise_multiplier=z, rounds=T, delta=delta, calibration=calibration).epsilon

    assert costs(z / factor, T) > costs(z, T) or costs(z / factor, T) == 0
    assert costs(z, 2 * T) > costs(z, T) or costs(z, 2 * T) == 0


@few
@given(multipliers, rounds, deltas, factors)
def test_a_smaller_sigma_costs_more(z, T, delta, factor):
    federation = {"clients": 100, "byzantine": 7, "rounds": T, "delta": delta}
    sigma = z * 2 / 86
    assert plan(sigma=sigma / factor, **federation).epsilon >= plan(sigma=sigma, **federation).epsilon


@few
@given(epsilons, rounds, deltas, calibrations)
def test_epsilon_and_noise_are_inverse(eps, T, delta, calibration):
    there = plan(epsilon=eps, rounds=T, delta=delta, calibration=calibration)
    back = plan(noise_multiplier=there.noise_multiplier, rounds=T, delta=delta, calibration=calibration)
    assert eps * (1 - 1e-7) <= back.epsilon <= eps
    assert there.rounds_that_fit == T


@few
@given(epsilons, multipliers, deltas, calibrations)
def test_the_rounds_that_fit_fit_and_one_more_does_not(eps, z, delta, calibration):
    def costs(T):
        return plan(noise_multiplier=z, rounds=T, delta=delta, calibration=calibration).epsilon

    try:
        fit = plan(epsilon=eps, noise_multiplier=z, delta=delta, calibration=calibration).rounds
    except ByzULDPError:
        assert costs(1) > eps
        return
    assert costs(fit) <= eps
    assert fit == 10_000_000 or costs(fit + 1) > eps


@settings(max_examples=12, deadline=None)
@given(
    st.floats(5e-324, 1e8),
    st.floats(1e-300, 1e-6),
    st.integers(1, 50),
    st.integers(1, 10**9),
    st.integers(1, 1000),
    st.integers(0, 400),
)
def test_every_number_of_a_plan_is_finite_or_null(z, delta, T, d, n, f):
    assume(n > 2 * f)
    found = plan(noise_multiplier=z, delta=delta, rounds=T, parameters=d, clients=n, byzantine=f)
    json.dumps(found.as_json(), allow_nan=False)


@few
@given(st.integers(1, 60), st.integers(0, 29), st.integers(1, 20), st.integers(0, 2**32), st.floats(0.1, 10))
def test_no_aggregate_is_larger_than_the_signal_that_is_promised(n, f, d, seed, C):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((n, d), generator=generator)
    if seed % 2:  # many equal rows in few coordinates come near the bound
        rows = torch.where(rows > 0.5, 1.0, 0.0) + 1e-3
    rows = (C * rows / rows.norm(dim=1, keepdim=True)).float()
    for name in ("trimmed_mean", "mean", "median", "normalized_mean"):
        rule = make_rule(name, num_byzantine=f)
        if n < max(rule.minimum_clients, 1):
            continue
        bound = largest_aggregate(Mechanism(rule, n, f, C, 1.0))
        assert float(rule.evaluate(rows).norm()) <= bound * (1 + 1e-5)


@few
@given(st.fractions(0, Fraction(45, 100), max_denominator=50), st.integers(900, 3_000))
def test_the_smallest_number_is_found_though_a_share_is_uneven(share, wanted):
    def kept(n):
        return n - 2 * math.floor(share * n)

    by_hand = next(n for n in range(1, 40 * wanted) if kept(n) >= wanted)
    assert smallest(kept, wanted, share) == by_hand

"""What the robust rules promise for every input: order, equivariance, robustness."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.aggregation import BEFORE, RULES, RoundContext, make_rule

SETTINGS = [(3, 1), (5, 1), (5, 2), (7, 2), (9, 2), (9, 4), (11, 2)]
BY_BITS = ["krum", "multi_krum", "mda", "bulyan", "covariance_filter", "geometric_median", "mca", "median", "meamed"]
KAPPAS = [
    ("median", {}),
    ("geometric_median", {}),
    ("krum", {"neighbours": "n-f-1"}),
    ("covariance_filter", {}),
    ("median", {"before": ["nearest_neighbor_mixing"]}),
    ("geometric_median", {"before": ["nearest_neighbor_mixing"]}),
    ("median", {"before": ["adaptive_clipping"]}),
    ("krum", {"neighbours": "n-f-1", "before": ["adaptive_clipping", "nearest_neighbor_mixing"]}),
]


@st.composite
def cases(draw, shapes=("normal", "ties", "far", "copies", "shifted")):
    """float32 (n, d), f, and a generator: normal, many ties, a far minority, copies, a common mean."""
    n, f = draw(st.sampled_from(SETTINGS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    d = draw(st.integers(1, 6))
    x = rng.standard_normal((n, d))
    shape = draw(st.sampled_from(shapes))
    if shape == "ties":
        x = rng.integers(-2, 3, (n, d)).astype(np.float64)
    elif shape == "far":
        x[:f] *= 10.0 ** rng.integers(1, 30)
    elif shape == "copies":
        x[:f] = 5.0 * x[0]
    elif shape == "shifted":
        x += 1000.0
    return np.round(x * 1024).astype(np.float32) / np.float32(1024), f, rng


def made(name, f, n, **parameters):
    if name == "weighted_mean":
        parameters["weights"] = np.arange(1.0, n + 1).tolist()
    return make_rule(name, num_byzantine=f, **parameters)


def defined(rule, n):
    return n >= rule.minimum_clients


@pytest.mark.parametrize("name", BY_BITS)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_a_choice_among_rows_has_the_same_bits_in_any_client_order(name, case):
    x, f, rng = case
    order = rng.permutation(len(x))
    rule = made(name, f, len(x))
    if defined(rule, len(x)):
        one, other = rule(torch.from_numpy(x)), rule(torch.from_numpy(x[order]))
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_steps_follow_the_order_of_clients(case):
    x, f, rng = case
    order = rng.permutation(len(x))
    for name in ("nearest_neighbor_mixing", "clipping", "adaptive_clipping"):
        step = BEFORE[name](num_byzantine=f)
        one, other = step(torch.from_numpy(x)), step(torch.from_numpy(x[order]))
        assert torch.equal(one[order], other)


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_weights_and_norms_stay_with_their_clients_in_any_order(case):
    x, f, rng = case
    order = rng.permutation(len(x))
    shuffled = torch.from_numpy(x[order])
    scale = max(1.0, float(np.abs(x).max()))
    weights = np.arange(1.0, len(x) + 1)
    for name in ("weighted_mean", "normalized_mean"):
        one = make_rule(name, num_byzantine=f, weights=weights.tolist())(torch.from_numpy(x))
        other = make_rule(name, num_byzantine=f, weights=weights[order].tolist())(shuffled)
        np.testing.assert_allclose(one, other, atol=1e-6 * scale)
    for rule in (
        make_rule("centered_clipping", num_byzantine=f, radius=1.0, iterations=2),
        make_rule("geometric_median", num_byzantine=f, smoothing=0.1),
    ):
        np.testing.assert_allclose(rule(torch.from_numpy(x)), rule(shuffled), atol=1e-6 * scale)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"mean", "trimmed_mean"}))
@settings(deadline=None, max_examples=40)
@given(case=cases(), doublings=st.integers(-3, 3))
def test_equivariant_rules_follow_a_shift_and_a_scale(name, case, doublings):
    rule = made(name, case[1], len(case[0]))
    assert rule.equivariant == (name not in ("centered_clipping", "normalized_mean"))
    if rule.equivariant:
        check_equivariance(rule, case, doublings)


@pytest.mark.parametrize("before", [["nearest_neighbor_mixing"], ["bucketing"]], ids=str)
@settings(deadline=None, max_examples=40)
# No ties: behind a step they are broken by its rounding to float32.
@given(case=cases(("normal", "shifted")), name=st.sampled_from(BY_BITS), doublings=st.integers(-3, 3))
def test_equivariant_rules_stay_so_behind_an_equivariant_step(before, case, name, doublings):
    rule = made(name, case[1], len(case[0]), before=before)
    assert rule.equivariant
    check_equivariance(rule, case, doublings)


def check_equivariance(rule, case, doublings):
    x, _, rng = case
    if not defined(rule, len(x)) or np.abs(x).max() > 1e4:
        return
    shift = rng.integers(-64, 65, x.shape[1]).astype(np.float32)
    moved = x * np.float32(2.0**doublings) + shift  # exact in float32, so that ties stay ties
    results = [rule(torch.from_numpy(v), RoundContext(generator=np.random.default_rng(3))).numpy() for v in (x, moved)]
    size = max(1.0, float(np.abs(x).max()))
    np.testing.assert_allclose(results[1], results[0] * 2.0**doublings + shift, rtol=0, atol=2e-5 * size * 2**3)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("normalized_mean", {}),
        ("centered_clipping", {"radius": 0.5}),
        ("geometric_median", {"smoothing": 1.0}),
        ("mca", {"width": 0.5}),
        ("median", {"before": ["clipping"]}),
        ("median", {"before": ["adaptive_clipping"]}),
    ],
)
def test_rules_that_say_they_are_not_equivariant_are_not(name, parameters):
    rule = make_rule(name, num_byzantine=2, **parameters)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32))
    assert not rule.equivariant
    assert float((rule(4.0 * x + 3.0) - (4.0 * rule(x) + 3.0)).abs().max()) > 1e-3


def largest_share_of_kappa(rule, x, f):
    """max over S of ‖F - x̄_S‖² / (κ/|S| Σ ‖x_i - x̄_S‖²)."""
    n = len(x)
    result = rule.evaluate(torch.from_numpy(x)).numpy()
    values, worst = x.astype(np.float64), 0.0
    for chosen in itertools.combinations(range(n), n - f):
        honest = values[list(chosen)]
        mean = honest.mean(axis=0)
        allowed = rule.kappa(n) * ((honest - mean) ** 2).sum() / (n - f)
        error = ((result - mean) ** 2).sum()
        if error > 1e-9 * max(1.0, float((mean**2).sum())):
            worst = max(worst, error / max(allowed, 1e-300))
    return worst


@pytest.mark.parametrize(("name", "parameters"), KAPPAS, ids=str)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_no_set_of_honest_rows_is_missed_by_more_than_kappa_allows(name, parameters, case):
    x, f, _ = case
    rule = make_rule(name, num_byzantine=f, **parameters)
    if np.abs(x).max() < 1e8:
        assert largest_share_of_kappa(rule, x, f) <= 1.0 + 1e-5


@pytest.mark.parametrize(("name", "parameters"), KAPPAS[:4], ids=str)
@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (9, 3)])
def test_no_climb_finds_rows_that_are_missed_by_more_than_kappa_allows(name, parameters, n, f):
    rng = np.random.default_rng([n, f])
    rule = make_rule(name, num_byzantine=f, **parameters)
    x = rng.standard_normal((n, 2)).astype(np.float32)
    x[: n // 2] += 3.0  # two clusters, one a little larger: the hard case
    best = largest_share_of_kappa(rule, x, f)
    for step in range(60):
        tried = x + (0.97**step * rng.standard_normal(x.shape) * (rng.random((n, 1)) < 0.4)).astype(np.float32)
        found = largest_share_of_kappa(rule, tried, f)
        if found > best:
            best, x = found, tried
    assert 0.02 < best <= 1.0 + 1e-5

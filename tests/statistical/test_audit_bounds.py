"""How much an audit sees: enough of a mechanism that meets its claim, and every one that does not.

Seeds are fixed and public, so no test fails by chance; probabilities stated are those over all seeds.
"""

import numpy as np
import pytest
from scipy import stats

from common.privacy.conversions import epsilon_of, mu_of
from ps.privacy import clopper_pearson
from ps.privacy.audit import AuditResult, lower_bounds, thresholds_for

DELTA, ALPHA = 1e-5, 0.01
MU = mu_of(4.0, DELTA, "exact")


def audit(trials, *, epsilon=4.0, alpha=ALPHA, noise=1.0, distance=1.0, seed=20) -> AuditResult:
    """An audit of the claim ε, of a mechanism with ``noise`` times σ and ``distance`` times the sensitivity."""
    mu = mu_of(epsilon, DELTA, "exact")
    generator = np.random.default_rng(seed)
    plus, minus = (sign * distance * mu / 2 + noise * generator.standard_normal(trials) for sign in (1, -1))
    return lower_bounds(plus, minus, mu=mu, epsilon=epsilon, delta=DELTA, alpha=alpha)


def test_a_direct_bound_from_five_million_trials_exceeds_3_of_4():
    result = audit(5_000_000)
    assert result.verdict == "pass"
    assert 3 < result.best("direct").epsilon < 4
    assert result.expected_epsilon == pytest.approx(result.epsilon_lower, abs=0.02)


def test_it_does_so_whatever_the_luck():
    """5,000 draws of the counts: a mechanism with noise from the operating system will do as well."""
    trials, draws = 5_000_000, 5_000
    thresholds = np.array(thresholds_for(MU, delta=DELTA, trials=trials, alpha=ALPHA))
    generator = np.random.default_rng(20)
    right, wrong = (
        generator.binomial(2 * trials, stats.norm.sf(thresholds - mean), (draws, thresholds.size))
        for mean in (MU / 2, -MU / 2)
    )
    level = ALPHA / (4 * 3 * thresholds.size)
    low, high = clopper_pearson.lower(right, 2 * trials, level), clopper_pearson.upper(wrong, 2 * trials, level)
    assert np.log((low - DELTA) / high).max(axis=1).min() > 3


def test_a_curve_bound_from_a_hundred_thousand_trials_exceeds_3_7_of_4():
    result = audit(100_000)
    assert result.verdict == "pass"
    assert 3.7 < result.best("curve").epsilon < 4
    assert result.expected_epsilon == pytest.approx(result.epsilon_lower, abs=0.1)


@pytest.mark.parametrize(("epsilon", "trials", "audits"), [(4.0, 1000, 250), (0.5, 500, 40), (20.0, 300, 40)])
def test_bounds_exceed_the_truth_no_more_often_than_stated(epsilon, trials, audits):
    """At α = 0.2. At a true rate of 0.2, more failures than are allowed here have probability 1e-6."""
    fails = sum(audit(trials, epsilon=epsilon, alpha=0.2, seed=seed).verdict == "fail" for seed in range(audits))
    assert fails <= stats.binom.isf(1e-6, audits, 0.2)


@pytest.mark.parametrize(("trials", "kind"), [(2_000, "curve"), (100_000, "direct")])
@pytest.mark.parametrize("fault", [{"noise": 0.5}, {"distance": 2.0}, {"noise": 0.1}, {"noise": 0.0}])
def test_half_the_noise_or_twice_the_sensitivity_fails(fault, trials, kind):
    result = audit(trials, alpha=1e-3, **fault)
    assert result.verdict == "fail"
    assert result.best(kind).epsilon > 4


@pytest.mark.parametrize("alpha", [0.01, 1e-3])
def test_a_tenth_less_noise_is_seen_in_a_million_trials(alpha):
    assert audit(1_000_000, alpha=alpha, noise=0.9).verdict == "fail"
    assert audit(1_000_000, alpha=alpha, noise=1.0).verdict == "pass"
    assert audit(1_000_000, alpha=alpha, noise=1.1).verdict == "pass"


def test_the_bound_stays_below_the_truth_of_a_faulty_mechanism_too():
    for noise in (0.5, 0.8, 1.25, 2.0):
        result = audit(500_000, noise=noise, alpha=1e-3)
        assert 0.8 * epsilon_of(MU / noise, DELTA, "exact") < result.epsilon_lower
        assert result.epsilon_lower < epsilon_of(MU / noise, DELTA, "exact")


def test_noise_shared_by_two_coordinates_passes_alone_and_fails_in_their_difference():
    generator, pairs = np.random.default_rng(20), 20_000
    signs = np.array([1.0, -1.0])  # of the canary
    worlds = [sign * MU / 2 * signs + generator.standard_normal((pairs, 1)) for sign in (1, -1)]
    alone = [(signs * world).ravel() for world in worlds]
    assert lower_bounds(*alone, mu=MU, epsilon=4, delta=DELTA, alpha=1e-3).verdict == "pass"
    # two independent values of noise would leave N(±√2 μ / 2, 1)
    differences = [world @ signs / np.sqrt(2) for world in worlds]
    mu = np.sqrt(2) * MU
    claim = epsilon_of(mu, DELTA, "exact")
    assert lower_bounds(*differences, mu=mu, epsilon=claim, delta=DELTA, alpha=1e-3).verdict == "fail"

"""The arithmetic of an audit's bounds, and what it refuses; ``statistical/test_audit_bounds.py`` has their power."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from common.errors import PrivacyError
from common.privacy.conversions import epsilon_of, mu_of
from ps.privacy import clopper_pearson
from ps.privacy.audit import AuditResult, Tally, lower_bounds, thresholds_for

EPSILON, DELTA, ALPHA = 4.0, 1e-5, 0.01
MU = mu_of(EPSILON, DELTA, "exact")
TESTS = 15  # five thresholds, three sides
LEVEL = ALPHA / (4 * TESTS)


def audit(plus, minus, *, mu=MU, epsilon=EPSILON, delta=DELTA, alpha=ALPHA) -> AuditResult:
    return lower_bounds(np.asarray(plus), np.asarray(minus), mu=mu, epsilon=epsilon, delta=delta, alpha=alpha)


def tally(trials: int) -> Tally:
    return Tally(MU, EPSILON, DELTA, trials, ALPHA)


def outcomes(trials: int, seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return MU / 2 + generator.standard_normal(trials), -MU / 2 + generator.standard_normal(trials)


# --- Clopper and Pearson's limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.1, 0.01, 1e-5])
@pytest.mark.parametrize("trials", [4, 7, 100, 5_000_000])
def test_at_the_limit_a_count_as_extreme_has_just_the_stated_probability(trials, level):
    for successes in (2, trials // 2, trials - 2, trials):
        low = clopper_pearson.lower(successes, trials, level)
        assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(level, rel=1e-6)
    for successes in (0, 2, trials // 2, trials - 2):
        high = clopper_pearson.upper(successes, trials, level)
        assert stats.binom.cdf(successes, trials, high) == pytest.approx(level, rel=1e-6)


def test_the_limits_are_scipys_exact_intervals():
    for successes, alternative in ((12, "greater"), (12, "less")):
        interval = stats.binomtest(successes, 50, alternative=alternative).proportion_ci(0.99)
        limit = clopper_pearson.lower if alternative == "greater" else clopper_pearson.upper
        assert limit(successes, 50, 0.01) == pytest.approx(
            interval.low if alternative == "greater" else interval.high, abs=1e-9
        )


def test_the_limits_of_textbooks():
    assert clopper_pearson.upper(0, 100, 0.05) == pytest.approx(1 - 0.05**0.01)  # "the rule of three": 3 in 100
    assert clopper_pearson.lower(100, 100, 0.05) == pytest.approx(0.05**0.01)
    assert clopper_pearson.lower(10, 100, 0.025) == pytest.approx(0.04900469, abs=1e-8)
    assert clopper_pearson.upper(10, 100, 0.025) == pytest.approx(0.17622260, abs=1e-8)
    assert clopper_pearson.lower(0, 9, 0.1) == 0
    assert clopper_pearson.upper(9, 9, 0.1) == 1


@pytest.mark.parametrize("level", [0.24, 0.05, 1e-3])
@pytest.mark.parametrize("trials", [1, 2, 5, 20])
def test_the_limits_hold_for_sums_of_two_worlds_with_different_probabilities(trials, level):
    """Exactly: every probability on a grid, every outcome of both worlds."""
    counts = np.arange(2 * trials + 1)
    low = clopper_pearson.lower(counts, 2 * trials, level)
    high = clopper_pearson.upper(counts, 2 * trials, level)
    # the classical limit of a single success fails just below itself, with all of it in one world
    edge = 2 * (1 - (1 - level) ** (1 / (2 * trials))) * (1 - 1e-9)
    grid = np.unique(np.concatenate([np.linspace(0, 1, 41), [edge, 1 - edge], 2 * low[1:3] * (1 - 1e-9)]))
    grid = grid[grid <= 1]
    laws = {p: stats.binom.pmf(np.arange(trials + 1), trials, p) for p in grid}
    for p in grid:
        for q in grid:
            law, mean = np.convolve(laws[p], laws[q]), (p + q) / 2
            assert law[low > mean].sum() <= level * (1 + 1e-9)
            assert law[high < mean].sum() <= level * (1 + 1e-9)


# --- the bounds ------------------------------------------------------------------------------------------------------


def test_each_bound_is_its_formula_on_its_own_counts():
    trials = 2_000
    plus, minus = outcomes(trials)
    result = audit(plus, minus)
    assert len(result.bounds) == 2 * TESTS
    for bound in result.bounds:
        c = bound.threshold
        right = {"above": np.sum(plus > c), "below": np.sum(minus < -c)}
        wrong = {"above": np.sum(minus > c), "below": np.sum(plus < -c)}
        right["both"], wrong["both"] = sum(right.values()), sum(wrong.values())
        guesses = 2 * trials if bound.side == "both" else trials
        assert (bound.true_positives, bound.false_positives) == (right[bound.side], wrong[bound.side])
        assert (bound.trials, bound.swapped) == (trials, False)
        r = stats.beta.ppf(LEVEL, bound.true_positives, guesses - bound.true_positives + 1)
        w = stats.beta.isf(LEVEL, bound.false_positives + 1, guesses - bound.false_positives)
        if bound.kind == "direct":
            assert bound.epsilon == pytest.approx(max(0, math.log((r - DELTA) / w)), rel=1e-9)
            assert bound.mu is None
        else:
            assert bound.mu == pytest.approx(max(0, stats.norm.ppf(r) - stats.norm.ppf(w)), rel=1e-9)
            assert bound.epsilon == epsilon_of(bound.mu, DELTA, "exact")
    assert result.epsilon_lower == max(result.best("direct").epsilon, result.best("curve").epsilon) > 0


def test_a_large_delta_explains_away_what_was_seen():
    plus, minus = np.repeat([9.0, 0.0], [50, 950]), np.zeros(1000)
    assert audit(plus, minus, delta=1e-5).best("direct").epsilon > 1
    assert audit(plus, minus, delta=0.1).best("direct").epsilon == 0


@pytest.mark.parametrize("trials", [1, 3, 1_000, 100_000])
def test_worlds_told_apart_always_give_a_finite_bound_that_grows_with_the_trials(trials):
    result, fewer = (audit(np.full(n, 50.0), np.full(n, -50.0)) for n in (trials, max(1, trials // 2)))
    assert all(math.isfinite(bound.epsilon) for bound in result.bounds)
    # 2 n right guesses and no wrong one, all limits at one level
    r = LEVEL ** (1 / (2 * trials))
    assert result.best("direct").epsilon == pytest.approx(max(0, math.log((r - DELTA) / (1 - r))))
    assert result.epsilon_lower > fewer.epsilon_lower or result.epsilon_lower == 0
    assert result.verdict == ("fail" if trials >= 1_000 else "pass")


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -7.5, 1e300])
def test_a_mechanism_that_says_the_same_in_both_worlds_shows_nothing(value):
    result = audit(np.full(500, value), np.full(500, value))
    assert [bound.epsilon for bound in result.bounds] == [0.0] * (2 * TESTS)
    assert not any(bound.swapped for bound in result.bounds)
    assert result.verdict == "pass"
    assert result.expected_epsilon > 2  # and the reader sees that it should have shown more


def test_at_the_threshold_itself_a_test_abstains():
    for bound in audit(np.zeros(20), np.zeros(20)).bounds:
        assert (bound.true_positives, bound.false_positives) == (0, 0)


def test_swapped_worlds_are_measured_all_the_same():
    plus, minus = outcomes(20_000)
    labelled, swapped = audit(plus, minus), audit(minus, plus)
    assert labelled.best("curve").epsilon > 3
    assert not labelled.best("curve").swapped
    for kind in ("direct", "curve"):
        assert swapped.best(kind).epsilon == pytest.approx(labelled.best(kind).epsilon, rel=1e-9)
        assert swapped.best(kind).swapped
    assert audit(2 * minus, 2 * plus, mu=MU / 2, epsilon=1.9).verdict == "fail"


def test_a_curve_bound_refutes_the_mu_of_a_claim_with_slack_in_epsilon():
    """A Rényi calibration promises ε = 4 at a μ that costs less; noise of that slack is not what was claimed."""
    plus, minus = outcomes(100_000)
    mu = mu_of(EPSILON, DELTA, "renyi")
    result = audit(plus, minus, mu=mu)
    assert result.epsilon_lower < EPSILON
    assert result.best("curve").mu > mu
    assert result.verdict == "fail"
    assert audit(plus, minus).verdict == "pass"


def test_a_bound_on_epsilon_refutes_the_epsilon_of_a_claim_whose_mu_holds():
    result = audit(*outcomes(100_000), epsilon=2.0)
    assert result.best("curve").mu < MU
    assert result.epsilon_lower > 2
    assert result.verdict == "fail"


# --- thresholds, chunks, refusals ------------------------------------------------------------------------------------


def test_thresholds_come_from_the_claim_and_the_plan_alone():
    fixed = thresholds_for(MU, delta=DELTA, trials=1_000, alpha=ALPHA)
    assert fixed[0] == 0
    assert list(fixed) == sorted(set(fixed))
    for plus, minus in (outcomes(1_000), outcomes(1_000, seed=5), (np.full(1_000, 99.0), np.full(1_000, -3.0))):
        assert tuple(dict.fromkeys(bound.threshold for bound in audit(plus, minus).bounds)) == fixed
    assert thresholds_for(MU, delta=DELTA, trials=5_000_000, alpha=ALPHA)[-1] > fixed[-1]  # more trials reach further


@given(
    plus=st.lists(st.floats(-4, 4), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    first=st.sampled_from([1, -1]),
)
@settings(max_examples=40, deadline=None)
def test_a_tally_of_any_chunks_is_the_audit_of_the_whole(plus, cuts, first):
    minus = [-value / 2 for value in reversed(plus)]
    worlds = {1: np.array(plus), -1: np.array(minus)}
    streamed = tally(len(plus))
    for world in (first, -first):
        for chunk in np.split(worlds[world], sorted(min(cut, len(plus)) for cut in cuts)):
            streamed.add(world, chunk)
    assert streamed.result() == audit(plus, minus)


def test_rounds_may_come_as_matrices_and_in_turns():
    plus, minus = outcomes(60)
    streamed = tally(60)
    for part in range(3):
        streamed.add(-1, minus.reshape(3, 4, 5)[part])
        streamed.add(1, plus.reshape(3, 20)[part])
    assert streamed.result() == audit(plus, minus)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_statistic_that_is_no_number_is_refused_by_its_place_and_nothing_is_counted(value):
    plus, minus = outcomes(100)
    spoilt = plus.copy()
    spoilt[17] = value
    streamed = tally(100)
    with pytest.raises(PrivacyError, match=rf"world \+1: statistic 17 of these 100 is {value}"):
        streamed.add(1, spoilt)
    streamed.add(1, plus)
    streamed.add(-1, minus)
    assert streamed.result() == audit(plus, minus)


def test_no_other_number_of_trials_than_planned_gives_a_result():
    streamed = tally(100)
    streamed.add(1, np.zeros(100))
    with pytest.raises(PrivacyError, match="100 and 0 trials"):
        streamed.result()
    streamed.add(-1, np.zeros(99))
    with pytest.raises(PrivacyError, match="100 and 99 trials"):
        streamed.result()
    with pytest.raises(PrivacyError, match="world -1: 101 trials, but 100 were planned"):
        streamed.add(-1, np.zeros(2))
    streamed.add(-1, np.zeros(1))
    assert streamed.result().verdict == "pass"
    with pytest.raises(PrivacyError, match="5 and 6 trials"):
        audit(np.zeros(5), np.zeros(6))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"mu": 0.0}, "mu"),
        ({"mu": math.inf}, "mu"),
        ({"mu": math.nan}, "mu"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
    ],
)
def test_a_claim_out_of_range_is_refused_by_name(wrong, named):
    with pytest.raises(PrivacyError, match=f"{named} = .*: expected"):
        audit(*outcomes(10), **wrong)


def test_no_trials_and_unknown_worlds_are_refused():
    with pytest.raises(PrivacyError, match="trials = 0: expected at least 1"):
        audit([], [])
    with pytest.raises(PrivacyError, match="world = 0: expected 1 or -1"):
        tally(3).add(0, np.zeros(3))


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 1.0, 40.0, 1e6])
@pytest.mark.parametrize("trials", [1, 50, 10**9])
def test_any_claim_and_number_of_trials_has_thresholds_and_an_expectation(mu, trials):
    thresholds = thresholds_for(mu, delta=1e-6, trials=trials, alpha=1e-3)
    assert thresholds[0] == 0
    assert all(math.isfinite(threshold) for threshold in thresholds)
    result = audit(np.full(50, mu), np.full(50, -mu), mu=mu, epsilon=1.0, delta=1e-6, alpha=1e-3)
    assert math.isfinite(result.expected_epsilon)
    assert math.isfinite(result.epsilon_lower)

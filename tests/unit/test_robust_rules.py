"""Every rule and every step before one: golden values, ByzFL as an oracle, the edge cases their tables state."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.aggregation import BEFORE, RULES, Composed, RoundContext, SumRule, make_rule
from common.aggregation import geometry as geometry_module
from common.aggregation import rows as rows_module
from common.aggregation import sorting as sorting_module
from common.aggregation.covariance_filter import filtered_weights
from common.aggregation.geometry import geometry_of
from common.aggregation.mda import smallest_diameter
from common.aggregation.rows import rough_squared_norms
from common.errors import RuleError

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())
ORACLE = json.loads((HERE / "byzfl_oracle.json").read_text())
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
DEVICES = ["cpu", CUDA]
AS_BYZFL = {
    "trimmed_mean": {},
    "median": {},
    "geometric_median": {"smoothing": 0.1, "iterations": 3},
    "krum": {"neighbours": "n-f-1"},
    "multi_krum": {"neighbours": "n-f-1"},
    "centered_clipping": {"radius": 1.5, "iterations": 3},
    "meamed": {},
    "mda": {},
}
STEPS_AS_BYZFL = {"nearest_neighbor_mixing": {}, "clipping": {"radius": 2.0}, "adaptive_clipping": {}}
ROWWISE = sorted(set(RULES) - {"mean", "median", "trimmed_mean", "meamed"})


def rule_of(name, f=1, n=None, **parameters):
    """A rule that needs nothing further; for weighted_mean with equal weights."""
    if name == "weighted_mean":
        parameters.setdefault("weights", [1.0] * n)
    return make_rule(name, num_byzantine=f, **parameters)


def context(seed=0):
    return RoundContext(generator=np.random.default_rng(seed))


def rows(n, d, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "parameters", "golden"),
    [
        ("trimmed_mean", {}, "cwtm"),
        ("median", {}, "cwmed"),
        ("geometric_median", {"smoothing": 0.1}, "gm_smoothed_nu0.1_T3_z0"),
        ("krum", {"neighbours": "n-f-1"}, "krum_nf1"),
        ("multi_krum", {"neighbours": "n-f-1"}, "multikrum"),
        ("meamed", {}, "meamed"),
        ("mda", {}, "mda"),
        ("covariance_filter", {}, "caf"),
    ],
)
def test_rules_give_the_golden_values(name, parameters, golden, device):
    x = torch.tensor(GOLDEN["example_inputs"], device=device)
    result = make_rule(name, num_byzantine=1, **parameters)(x)
    assert (result.dtype, result.device.type) == (torch.float32, device)
    np.testing.assert_allclose(result.cpu(), GOLDEN["example_f1"][golden], rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_and_compositions_give_the_golden_values(device):
    x = torch.tensor(GOLDEN["example_inputs"], device=device)
    for name, golden in [("nearest_neighbor_mixing", "nnm"), ("adaptive_clipping", "arc")]:
        np.testing.assert_allclose(BEFORE[name](num_byzantine=1)(x).cpu(), GOLDEN["example_f1"][golden], rtol=1e-6)
    rule = make_rule("trimmed_mean", num_byzantine=1, before=["clipping", "nearest_neighbor_mixing"])
    np.testing.assert_allclose(rule(x).cpu(), [0.95841302, 1.14416941, 1.3299258], rtol=1e-6)
    clipped = make_rule("centered_clipping", num_byzantine=1, radius=100.0)
    np.testing.assert_allclose(clipped(x).cpu(), [4.0, 5.0, 6.0], rtol=1e-6)


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: f"n{len(case['x'])}f{case['f']}")
def test_rules_and_steps_agree_with_byzfl_where_definitions_do(case):
    x = torch.tensor(case["x"], dtype=torch.float32)
    for name, parameters in AS_BYZFL.items():
        if name in case:
            result = make_rule(name, num_byzantine=case["f"], **parameters)(x)
            np.testing.assert_allclose(result, case[name], rtol=0, atol=2e-6, err_msg=name)
    for name, parameters in STEPS_AS_BYZFL.items():
        result = BEFORE[name](num_byzantine=case["f"], **parameters)(x)
        np.testing.assert_allclose(result, case[name], rtol=0, atol=2e-6, err_msg=name)


# Definitions, straight from the page.


def test_krum_scores_by_blanchards_neighbours_unless_asked_otherwise():
    x = rows(9, 4).numpy().astype(np.float64)
    squared = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    for neighbours, number in [("n-f-2", 5), ("n-f-1", 6)]:
        scores = np.sort(squared, axis=1)[:, 1 : 1 + number].sum(axis=1)
        rule = make_rule("krum", num_byzantine=2, neighbours=neighbours)
        np.testing.assert_array_equal(rule(rows(9, 4)), x[scores.argmin()])
        chosen = x[np.argsort(scores)[:7]].mean(axis=0)
        multi = make_rule("multi_krum", num_byzantine=2, neighbours=neighbours)
        np.testing.assert_allclose(multi(rows(9, 4)), chosen, atol=1e-6)
    three = make_rule("multi_krum", num_byzantine=2, selected=3)
    assert three.sensitivity(num_clients=9, clip_norm=1.0) == pytest.approx(2.0)
    with pytest.raises(RuleError, match="selected = 10 of 9"):
        make_rule("multi_krum", num_byzantine=2, selected=10)(rows(9, 4))


def test_bulyan_picks_by_krum_again_and_again_then_averages_around_the_median():
    n, f, d = 12, 2, 6
    x = rows(n, d, seed=3).numpy().astype(np.float64)
    left, picked = list(range(n)), []
    while len(picked) < n - 2 * f:
        squared = ((x[left][:, None] - x[left][None]) ** 2).sum(axis=2)
        scores = np.sort(squared, axis=1)[:, 1 : 1 + max(1, len(left) - f - 2)].sum(axis=1)
        picked.append(left.pop(int(scores.argmin())))
    chosen = x[picked]
    nearest = np.argsort(np.abs(chosen - np.median(chosen, axis=0)), axis=0)[: len(picked) - 2 * f]
    expected = np.take_along_axis(chosen, nearest, axis=0).mean(axis=0)
    np.testing.assert_allclose(make_rule("bulyan", num_byzantine=f)(rows(n, d, seed=3)), expected, atol=1e-6)


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 3), (8, 3), (20, 4), (21, 10)])
def test_meamed_averages_what_is_nearest_the_median(n, f):
    x = rows(n, 5000, seed=n)
    values = x.numpy().astype(np.float64)
    nearest = np.argsort(np.abs(values - np.median(values, axis=0)), axis=0)[: n - f]
    expected = np.take_along_axis(values, nearest, axis=0).mean(axis=0)
    np.testing.assert_allclose(make_rule("meamed", num_byzantine=f)(x), expected, atol=1e-6)


def test_meamed_keeps_the_smaller_of_two_values_equally_far_from_the_median():
    assert make_rule("meamed", num_byzantine=1)(torch.tensor([[1.0], [4.0], [7.0]])).item() == 2.5
    assert make_rule("meamed", num_byzantine=1)(torch.tensor([[-1.0], [-4.0], [-7.0]])).item() == -5.5


@pytest.mark.parametrize("seed", range(25))
def test_mda_finds_the_smallest_diameter_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 10))
    f = int(rng.integers(0, (n - 1) // 2 + 1))
    x = rng.integers(-3, 4, (n, 2)).astype(np.float64)  # many ties
    squared = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    sets = list(itertools.combinations(range(n), n - f))
    diameters = [squared[np.ix_(chosen, chosen)].max() for chosen in sets]
    assert tuple(smallest_diameter(squared, n - f)) == sets[int(np.argmin(diameters))]


def test_mda_is_exact_for_many_rows_and_refuses_an_f_it_could_not_finish():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 8)).astype(np.float32)
    x[:20] += 50.0
    result = make_rule("mda", num_byzantine=20)(torch.from_numpy(x))
    np.testing.assert_allclose(result, x[20:].astype(np.float64).mean(axis=0), atol=1e-6)
    with pytest.raises(RuleError, match="exponential in f, at most 20"):
        make_rule("mda", num_byzantine=21)


def geometric_median_of(x):
    from scipy.optimize import minimize

    start = np.median(x, axis=0)
    return minimize(lambda z: np.linalg.norm(x - z, axis=1).sum(), start, method="Nelder-Mead", tol=1e-10).x


@pytest.mark.parametrize("seed", range(6))
def test_the_geometric_median_is_the_minimiser(seed):
    x = rows(6 + seed, 2, seed).numpy()
    result = make_rule("geometric_median", num_byzantine=1)(torch.from_numpy(x))
    np.testing.assert_allclose(result, geometric_median_of(x.astype(np.float64)), atol=1e-5)


def test_the_geometric_median_may_be_a_row_and_is_then_found_exactly():
    x = torch.tensor([[0.0, 0.0], [4.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])  # inside the triangle of the others
    assert make_rule("geometric_median", num_byzantine=1)(x).tolist() == [0.0, 0.0]
    most = torch.tensor([[1.0, 2.0]] * 4 + [[9.0, 9.0], [-3.0, 7.0], [5.0, 5.0]])
    assert make_rule("geometric_median", num_byzantine=3)(most).tolist() == [1.0, 2.0]


def test_the_geometric_median_of_a_line_is_the_median_at_its_middle():
    line = torch.tensor([[1.0], [2.0], [10.0], [50.0]]) * torch.tensor([[3.0, 4.0]])
    np.testing.assert_allclose(make_rule("geometric_median", num_byzantine=1)(line), [18.0, 24.0], rtol=1e-6)
    assert make_rule("geometric_median", num_byzantine=1)(torch.tensor([[3.0], [9.0], [1.0]])).item() == 3.0


def test_an_outlier_of_1e30_pulls_the_geometric_median_no_more_than_one_far_away():
    x = rows(9, 5)
    near, far = x.clone(), x.clone()
    near[0], far[0] = 1e5 * torch.ones(5), 1e30 * torch.ones(5)
    rule = make_rule("geometric_median", num_byzantine=1)
    np.testing.assert_allclose(rule(near), rule(far), atol=1e-4)


def test_centered_clipping_starts_at_the_public_centre():
    x, centre = rows(8, 5).numpy().astype(np.float64), rows(1, 5, seed=9)[0]
    v = centre.numpy().astype(np.float64)
    for _ in range(3):
        differences = x - v
        norms = np.linalg.norm(differences, axis=1, keepdims=True)
        v = v + (differences * np.minimum(1.0, 0.7 / norms)).mean(axis=0)
    rule = make_rule("centered_clipping", num_byzantine=1, radius=0.7, iterations=3)
    np.testing.assert_allclose(rule(rows(8, 5), RoundContext(centre=centre)), v, atol=1e-6)
    all_there = make_rule("centered_clipping", num_byzantine=1)(torch.zeros(3, 4), RoundContext(centre=torch.zeros(4)))
    assert all_there.tolist() == [0.0] * 4


def test_mca_is_a_fixed_point_that_ignores_a_far_minority():
    x = rows(11, 3, seed=2)
    x[:4] += 1000.0
    result = make_rule("mca", num_byzantine=4, width=2.0, tolerance=1e-9)(x).numpy().astype(np.float64)
    values = x.numpy().astype(np.float64)
    kernel = np.exp(-((values - result) ** 2).sum(axis=1) / (2 * 2.0**2))
    np.testing.assert_allclose(result, (kernel[:, None] * values).sum(axis=0) / kernel.sum(), atol=1e-5)
    assert np.abs(make_rule("mca", num_byzantine=4)(x).numpy()).max() < 2.0


@pytest.mark.parametrize("norm", [1e2, 1e4, 1e6, 1e30])
@pytest.mark.parametrize(("n", "f", "d"), [(10, 2, 5), (15, 5, 20), (9, 4, 1)])
def test_the_covariance_filter_ends_within_2f_iterations_however_far_outliers_are(n, f, d, norm):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, d)).astype(np.float32)
    x[:f] = norm * rng.standard_normal((f, d))
    _, iterations = filtered_weights(geometry_of(torch.from_numpy(x)).gram, f)
    assert iterations <= 2 * f
    result = make_rule("covariance_filter", num_byzantine=f)(torch.from_numpy(x)).numpy()
    assert np.linalg.norm(result - x[f:].mean(axis=0)) < 3 * np.sqrt(d)


def test_the_covariance_filter_agrees_with_the_definition_on_the_covariance_itself():
    n, f, d = 12, 3, 4
    x = rows(n, d, seed=4)
    x[:f] += 3.0
    values, c, best, smallest = x.numpy().astype(np.float64), np.ones(n), None, np.inf
    while c.sum() > n - 2 * f:
        mean = (c[:, None] * values).sum(axis=0) / c.sum()
        about = values - mean
        eigenvalues, eigenvectors = np.linalg.eigh((c[:, None] * about).T @ about / c.sum())
        if eigenvalues[-1] <= smallest:
            smallest, best = eigenvalues[-1], mean
        tau = (about @ eigenvectors[:, -1]) ** 2
        c = np.where(c > 1e-12, c * (1 - tau / tau[c > 1e-12].max()), 0.0)
        c[c < 1e-12] = 0.0
    np.testing.assert_allclose(make_rule("covariance_filter", num_byzantine=f)(x), best, atol=1e-5)


# Weights and Fed-NGA.


def test_the_weighted_mean_weighs_by_sample_counts_of_the_whole_roster():
    x = torch.tensor([[1.0], [2.0], [6.0]])
    rule = make_rule("weighted_mean", num_byzantine=0, weights=[1, 1, 2])
    assert rule(x).item() == 3.75
    assert make_rule("weighted_mean", num_byzantine=0).with_weights([10, 10, 20])(x).item() == 3.75
    answered = RoundContext(weights=torch.tensor([0.25, 0.5]))
    assert rule(x[[0, 2]], answered).item() == 3.25  # never renormalised over those present
    assert rule.sensitivity(num_clients=3, clip_norm=2.0) == pytest.approx(2.0)
    assert rule.strict_sensitivity(num_clients=3, clip_norm=2.0) == pytest.approx(2.0)


def test_weights_are_refused_where_they_are_missing_wrong_or_larger_than_what_is_charged():
    x = torch.zeros(3, 2)
    plain = make_rule("weighted_mean", num_byzantine=0)
    with pytest.raises(RuleError, match="needs weights"):
        plain(x)
    with pytest.raises(RuleError, match="states no sensitivity without weights"):
        plain.sensitivity(num_clients=3, clip_norm=1.0)
    weighted = plain.with_weights([1, 1, 2])
    with pytest.raises(RuleError, match="3 weights for 4 identities"):
        make_rule("normalized_mean", num_byzantine=0, weights=[1, 1, 1]).sensitivity(num_clients=4, clip_norm=1.0)
    with pytest.raises(RuleError, match="3 weights for 2 rows"):
        weighted(x[:2])
    with pytest.raises(RuleError, match="larger than the rule's own"):
        weighted(x, RoundContext(weights=torch.tensor([0.5, 0.5, 0.0])))
    with pytest.raises(RuleError, match="larger than the rule's own"):
        make_rule("normalized_mean", num_byzantine=0)(x, RoundContext(weights=torch.tensor([0.5, 0.25, 0.25])))
    for weights in ([], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]):
        with pytest.raises(RuleError, match="expected numbers of at least 0"):
            plain.with_weights(weights)
    with pytest.raises(RuleError, match="median takes no weights"):
        make_rule("median", num_byzantine=0).with_weights([1.0])


@pytest.mark.parametrize("device", DEVICES)
def test_fed_nga_hears_directions_only_whatever_their_length(device):
    x = torch.tensor([[3.0, 4.0], [3e30, 4e30], [3e-40, 4e-40], [0.0, 0.0], [float("nan"), 1.0]], device=device)
    result = make_rule("normalized_mean", num_byzantine=1)(x).cpu()
    np.testing.assert_allclose(result, [0.6 * 3 / 5, 0.8 * 3 / 5], rtol=2e-6)
    weighted = make_rule("normalized_mean", num_byzantine=1, weights=[2, 1, 1, 4, 8])(x).cpu()
    np.testing.assert_allclose(weighted, [0.6 * 4 / 16, 0.8 * 4 / 16], rtol=2e-6)


def test_the_aggregate_of_fed_nga_is_never_longer_than_one_as_real_numbers():
    for seed in range(20):
        x = rows(1, 1000, seed).expand(7, 1000) * torch.tensor([10.0**k for k in range(-3, 4)])[:, None]
        exact = make_rule("normalized_mean", num_byzantine=0).evaluate(x)
        assert float(exact.pow(2).sum()) < 1.0


def test_rough_norms_are_right_to_a_millionth_and_for_any_scale():
    x = torch.ones(9, 4096 + 3) + 2.0**-12  # every product rounds
    x[1:5] = rows(4, 4096 + 3) * torch.tensor([1e-45, 1e-25, 1e25, 3e37])[:, None]
    x[5], x[6], x[7, 4097], x[8, 5] = 0.0, 1e30, np.nan, -np.inf
    exact = x.numpy().astype(np.float64)
    squares = (exact[:7] ** 2).sum(axis=1)
    found = rough_squared_norms(x)
    np.testing.assert_allclose(found[:7], squares, rtol=1.5 * 2.0**-20)
    assert not np.isfinite(found[7:]).any()
    np.testing.assert_allclose(rough_squared_norms(x.t().contiguous().t())[:7], squares, rtol=1.5 * 2.0**-20)


def test_fed_nga_and_mean_cannot_be_weighed_behind_a_step_that_mixes_clients():
    for step in ("bucketing", "nearest_neighbor_mixing"):
        with pytest.raises(RuleError, match="mixes clients"):
            make_rule("normalized_mean", num_byzantine=1, before=[step], weights=[1, 2, 3])
    behind_clipping = make_rule("weighted_mean", num_byzantine=0, before=["clipping"]).with_weights([1, 3])
    np.testing.assert_allclose(behind_clipping(torch.tensor([[8.0], [1.0]])), [1.25])


# Steps before a rule.


def test_bucketing_deals_everybody_once_into_buckets_of_nearly_equal_size():
    x = torch.eye(11)
    buckets = BEFORE["bucketing"](num_byzantine=1, size=3)(x, context())
    sizes = (buckets > 0).sum(dim=1).tolist()
    assert sorted(sizes) == [3, 4, 4]
    assert ((buckets > 0).sum(dim=0) == 1).all()
    np.testing.assert_allclose(buckets.sum(dim=1), 1.0, rtol=1e-6)


def test_bucketing_is_a_function_of_the_context_and_deals_places_not_contents():
    x, same = rows(10, 3), context(4)
    step = BEFORE["bucketing"](num_byzantine=1)
    first = step(x, same)
    assert torch.equal(first, step(x, same))
    changed = x.clone()
    changed[7] = 100.0
    assert int((step(changed, same) != first).any(dim=1).sum()) == 1  # one client, one bucket
    assert not torch.equal(first, step(x, context(5)))
    with pytest.raises(RuleError, match="needs a RoundContext with generator"):
        make_rule("median", num_byzantine=1, before=["bucketing"])(x)


def test_arc_cuts_the_longest_rows_to_the_next_longest():
    for n, f in [(9, 3), (15, 5), (49, 21), (100, 29)]:
        x = torch.arange(1.0, n + 1)[:, None]
        kept = n - 2 * f * (n - f) // n
        assert BEFORE["adaptive_clipping"](num_byzantine=f)(x).max().item() == pytest.approx(kept, rel=1e-6)


def test_steps_leave_their_input_as_it_was_and_nothing_to_clip_costs_no_copy():
    x = rows(9, 50)
    before = x.clone()
    for name in BEFORE:
        BEFORE[name](num_byzantine=2)(x, context())
    assert torch.equal(x, before)
    assert BEFORE["clipping"](num_byzantine=0, radius=1e6)(x).data_ptr() == x.data_ptr()


def test_a_composition_runs_its_steps_in_order_and_needs_what_any_of_them_needs():
    rule = make_rule("krum", num_byzantine=1, before=["adaptive_clipping", {"name": "bucketing", "size": 3}])
    assert isinstance(rule, Composed)
    assert rule.name == "adaptive_clipping + bucketing + krum"
    assert rule.minimum_clients == 15
    assert rule.needs == {"generator"}
    x = rows(15, 4)
    steps = [BEFORE["adaptive_clipping"](num_byzantine=1), BEFORE["bucketing"](num_byzantine=1, size=3)]
    expected = make_rule("krum", num_byzantine=1)(steps[1](steps[0](x), context()))
    assert torch.equal(rule(x, context()), expected)
    with pytest.raises(RuleError, match="of 14 rows 4 are left: krum with num_byzantine = 1 needs at least 5"):
        rule(rows(14, 4), context())
    rule.prepare(15, 4, "cpu")
    with pytest.raises(RuleError, match="4 are left"):
        rule.prepare(14, 4, "cpu")


@pytest.mark.parametrize(
    ("before", "match"),
    [
        (["bucketting"], "did you mean 'bucketing'"),
        ("bucketing", "expected a list of steps"),
        ([{"size": 3}], "expected a name, or a table with one"),
        ([{"name": "bucketing", "sise": 3}], "did you mean 'size'"),
        ([{"name": "bucketing", "size": 0}], "expected an integer of at least 1"),
        ([{"name": "clipping", "radius": -1.0}], "expected a number above 0"),
        ([3], "no pre-aggregation None|expected a name"),
    ],
)
def test_a_step_that_is_none_is_refused_with_the_reason(before, match):
    with pytest.raises(RuleError, match=match):
        make_rule("median", num_byzantine=1, before=before)


def test_a_step_named_as_a_rule_is_shown_its_place():
    with pytest.raises(RuleError, match=r"before = \['bucketing'\]"):
        make_rule("bucketing", num_byzantine=1)


@pytest.mark.parametrize(
    ("name", "parameters", "match"),
    [
        ("krum", {"neighbours": "all"}, "expected one of 'n-f-2', 'n-f-1'"),
        ("multi_krum", {"selected": 0}, "expected an integer of at least 1"),
        ("centered_clipping", {"radius": 0.0}, "expected a number above 0"),
        ("centered_clipping", {"iterations": 1.5}, "expected an integer"),
        ("geometric_median", {"smoothing": float("nan")}, "expected a finite number"),
        ("geometric_median", {"tolerance": 2.0}, "expected a share below 1"),
        ("mca", {"width": -1}, "expected a number above 0"),
        ("bulyan", {"theta": 3}, "bulyan has no parameter 'theta'"),
    ],
)
def test_a_parameter_out_of_range_is_refused(name, parameters, match):
    with pytest.raises(RuleError, match=match):
        make_rule(name, num_byzantine=1, **parameters)


# Edge cases of every rule.


@pytest.mark.parametrize(
    ("name", "f", "minimum"),
    [
        ("median", 2, 5),
        ("geometric_median", 2, 5),
        ("krum", 2, 7),
        ("multi_krum", 2, 7),
        ("meamed", 2, 5),
        ("mda", 2, 5),
        ("bulyan", 2, 11),
        ("covariance_filter", 2, 5),
        ("mca", 2, 5),
        ("centered_clipping", 2, 1),
        ("normalized_mean", 2, 1),
    ],
)
def test_too_few_rows_are_refused_with_how_many_it_takes(name, f, minimum):
    rule = rule_of(name, f)
    assert rule.minimum_clients == minimum
    assert torch.isfinite(rule(rows(minimum, 3))).all()
    if minimum > 1:
        for refused in (
            lambda: rule(rows(minimum - 1, 3)),
            lambda: rule.sensitivity(num_clients=minimum - 1, clip_norm=1.0),
            lambda: rule.kappa(minimum - 1),
        ):
            with pytest.raises(RuleError, match=f"needs at least {minimum} rows; given {minimum - 1}"):
                refused()


@pytest.mark.parametrize("name", sorted(set(RULES) - {"normalized_mean"}))
def test_rows_that_are_all_equal_give_that_row(name):
    row = rows(1, 7, seed=5)
    x = row.expand(11, 7).contiguous()
    np.testing.assert_allclose(rule_of(name, 2, n=11)(x), row[0], rtol=1e-6)
    assert rule_of(name, 2, n=11)(torch.zeros(11, 7)).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", ["bulyan", "krum", "multi_krum", "mda", "covariance_filter", "median", "meamed"])
def test_without_byzantine_clients_a_selection_keeps_everything(name):
    x = rows(8, 6)
    if name in ("krum", "median"):
        assert torch.isfinite(rule_of(name, 0)(x)).all()
    else:
        np.testing.assert_allclose(rule_of(name, 0)(x), x.double().mean(dim=0), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_that_is_not_finite_counts_as_the_zero_vector(name, bad, device):
    for one_entry in (True, False):
        x, zeroed = rows(11, 300, seed=6).to(device), rows(11, 300, seed=6).to(device)
        zeroed[2], zeroed[5] = 0.0, 0.0
        if one_entry:
            x[2, 7], x[5, 299] = bad, -bad
        else:
            x[2], x[5] = bad, float("nan")
        rule = rule_of(name, 2, n=11)
        result = rule(x)
        assert torch.isfinite(result).all()
        np.testing.assert_allclose(result.cpu(), rule(zeroed).cpu(), atol=1e-6)
    smoothed = make_rule("geometric_median", num_byzantine=2, smoothing=0.1)
    np.testing.assert_allclose(smoothed(x).cpu(), smoothed(zeroed).cpu(), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_steps_count_a_row_that_is_not_finite_as_the_zero_vector(bad):
    x, zeroed = rows(9, 20), rows(9, 20)
    x[3, 4], zeroed[3] = bad, 0.0
    for name in BEFORE:
        step = BEFORE[name](num_byzantine=2)
        np.testing.assert_allclose(step(x, context()), step(zeroed, context()), atol=1e-6)


@pytest.mark.parametrize("attack", [np.inf, -np.inf, np.nan, 1e30, -3e38])
@pytest.mark.parametrize("name", ["median", "meamed"])
def test_coordinate_wise_rules_trim_f_rows_of_anything(name, attack):
    honest = rows(7, 50, seed=1)
    x = torch.cat([torch.full((2, 50), attack), honest])
    result = rule_of(name, 2)(x)
    assert (result >= honest.min(dim=0).values).all()
    assert (result <= honest.max(dim=0).values).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["geometric_median", "krum", "multi_krum", "mda", "bulyan", "covariance_filter", "mca"]
)
def test_f_rows_of_1e30_leave_a_robust_rule_among_the_honest_rows(name, device):
    honest = rows(9, 400, seed=2)
    for attack in (torch.full((2, 400), 1e30), torch.stack([torch.full((400,), 3e38), -rows(1, 400)[0] * 1e37])):
        result = rule_of(name, 2)(torch.cat([attack, honest]).to(device)).cpu()
        assert float((result - honest.mean(dim=0)).norm()) <= 25.0
    mixed = make_rule(name, num_byzantine=2, before=["nearest_neighbor_mixing"])
    assert float((mixed(torch.cat([attack, honest]).to(device)).cpu() - honest.mean(dim=0)).norm()) <= 25.0


@pytest.mark.parametrize("device", DEVICES)
def test_clipped_rows_of_3e38_keep_their_direction_and_length(device):
    x = torch.full((5, 1000), 3e38, device=device)
    x[:4] = rows(4, 1000).to(device)
    for step in (BEFORE["clipping"](num_byzantine=1, radius=2.0), BEFORE["adaptive_clipping"](num_byzantine=1)):
        clipped = step(x).cpu()
        assert torch.isfinite(clipped).all()
        assert float(clipped[4].double().norm()) == pytest.approx(
            float(clipped.double().norm(dim=1)[:4].max()), rel=1e-6
        )
        assert float(clipped[4].std()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_distances_are_right_on_rows_with_a_large_common_mean(device):
    rng = np.random.default_rng(8)
    exact = 4096.0 * 64 + rng.integers(-9, 10, (9, 3000)) / 32  # exact in float32, spread 1e-6 of the mean
    x = torch.from_numpy(exact.astype(np.float32)).to(device)
    geometry = geometry_of(x)
    ordered = exact[geometry.order]
    squared = ((ordered[:, None] - ordered[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(geometry.squared_distances, squared, rtol=1e-7, atol=1e-9)
    scores = np.sort(squared, axis=1)[:, 1:6].sum(axis=1)
    np.testing.assert_array_equal(make_rule("krum", num_byzantine=2)(x).cpu(), ordered[scores.argmin()])


def test_rows_of_one_coordinate_and_of_none_are_rows():
    for name in RULES:
        result = rule_of(name, 1, n=7)(torch.tensor([[3.0], [1.0], [2.0], [4.0], [1.5], [90.0], [2.5]]))
        assert result.shape == (1,)
        assert torch.isfinite(result).all()
        assert rule_of(name, 1, n=7)(torch.zeros(7, 0)).shape == (0,)


def test_every_rule_and_step_works_above_2_to_the_24_elements():
    d = (1 << 24) // 7 + 1000
    x = (torch.arange(7.0) % 5)[:, None].expand(7, d)
    for name in sorted(set(RULES) - {"mean", "trimmed_mean"}):
        result = rule_of(name, 1, n=7)(x)
        assert float(result.max() - result.min()) <= 1e-6, name
        if name not in ("normalized_mean", "centered_clipping"):  # norms grow with d
            np.testing.assert_allclose(result[-3:], rule_of(name, 1, n=7)(x[:, :3]), atol=1e-5, err_msg=name)
    for name in BEFORE:
        result = BEFORE[name](num_byzantine=1)(x, context())
        assert torch.equal(result[:, -1], result[:, 0]), name


def test_the_path_of_other_devices_agrees_with_the_cpus(monkeypatch):
    x = rows(11, 700, seed=3)
    x[4, 5], x[7] = float("nan"), 1e30
    bare = [*((rule_of(name, 2, n=11), f"rule {name}") for name in RULES if name != "mean")]
    bare.append((make_rule("geometric_median", num_byzantine=2, smoothing=0.1), "smoothed"))
    steps = [(BEFORE[name](num_byzantine=2), f"step {name}") for name in BEFORE]
    here = [function(x, context()) for function, _ in (*bare, *steps)]
    monkeypatch.setattr(rows_module, "_DEVICE_ELEMENTS", 1024)  # several blocks
    for module in (rows_module, geometry_module, sorting_module):
        monkeypatch.setattr(module, "on_cpu", lambda _: False)
    for expected, (function, label) in zip(here, (*bare, *steps), strict=True):
        np.testing.assert_allclose(function(x, context()), expected, rtol=1e-6, atol=1e-6, err_msg=label)


def test_what_is_evaluated_in_float64_is_rounded_once():
    x = rows(9, 30)
    for name in RULES:
        rule = rule_of(name, 1, n=9)
        exact = rule.evaluate(x)
        assert exact.dtype == torch.float64
        assert torch.equal(exact.float(), rule(x))
        if name in ("mean", "trimmed_mean", "weighted_mean", "normalized_mean"):
            assert not torch.equal(exact.float().double(), exact), name


# What they state.


def test_sensitivities_are_those_that_are_proved():
    def of(name, n=20, f=4, clip_norm=1.5, strict=False, **parameters):
        rule = rule_of(name, f, n=n, **parameters)
        state = rule.strict_sensitivity if strict else rule.sensitivity
        return state(num_clients=n, clip_norm=clip_norm)

    near = {"rel": 1e-6}
    assert of("median", n=21) == 3.0
    assert of("median", n=20) == 1.5
    assert of("centered_clipping", radius=0.1) == pytest.approx(0.2 / 20, **near)
    assert of("centered_clipping", radius=10.0, iterations=3) == pytest.approx(9.0 / 20, **near)
    assert of("centered_clipping", radius=10.0, iterations=100) == 3.0
    assert of("normalized_mean") == 2.0 / 20
    assert of("normalized_mean", clip_norm=1e-3) == 2.0 / 20
    assert of("multi_krum") == pytest.approx(3.0 * 5 / 16, **near)
    assert of("mda") == pytest.approx(3.0 * 5 / 16, **near)
    for name in ("geometric_median", "krum", "meamed", "bulyan", "covariance_filter", "mca"):
        assert of(name) == 3.0
        assert of(name, strict=True) == 3.0
        assert rule_of(name, 4).project_output
    assert of("mean", strict=True) == pytest.approx(3.0 * 5 / 20)
    assert of("trimmed_mean", strict=True) == pytest.approx(3.0 * 5 / 12)
    assert of("trimmed_mean", f=9, strict=True) == 3.0
    assert of("centered_clipping", radius=0.1, strict=True) == pytest.approx(5 * 0.2 / 20, **near)
    assert of("normalized_mean", strict=True) == pytest.approx(5 * 2.0 / 20)
    assert of("normalized_mean", n=4, f=1, weights=[5, 3, 1, 1], strict=True) == pytest.approx(2 * 0.8)
    assert of("multi_krum", strict=True) == pytest.approx(3.0 * 9 / 16, **near)


def test_the_output_is_projected_exactly_where_the_sensitivity_needs_it():
    def projects(name, n=20, f=4, strict=False, **parameters):
        return rule_of(name, f, n=n, **parameters).projects_output(num_clients=n, clip_norm=1.0, strict=strict)

    assert not projects("trimmed_mean")
    assert not projects("trimmed_mean", strict=True)
    assert projects("trimmed_mean", f=9, strict=True)
    assert not projects("trimmed_mean", f=9)
    assert projects("krum")
    assert not projects("normalized_mean", strict=True)
    assert projects("centered_clipping", iterations=30)
    assert not projects("centered_clipping", iterations=3)


def test_compositions_are_charged_what_their_steps_leave_of_the_proof():
    def of(name, before, n=20, f=3, **parameters):
        rule = make_rule(name, num_byzantine=f, before=before, **parameters)
        return rule.sensitivity(num_clients=n, clip_norm=1.0), rule.project_output

    near = {"rel": 1e-5}
    assert of("trimmed_mean", ["bucketing"]) == (pytest.approx(2 / (2 * (10 - 6)), **near), False)
    assert of("median", ["bucketing"]) == (pytest.approx(1 / 2, **near), False)
    assert of("median", [{"name": "bucketing", "size": 4}], f=2) == (pytest.approx(2 / 4, **near), False)
    assert of("trimmed_mean", [{"name": "bucketing", "size": 3}], f=2, n=17) == (pytest.approx(2 / 3, **near), False)
    assert of("trimmed_mean", [{"name": "clipping", "radius": 0.5}]) == (pytest.approx(1 / 14, **near), False)
    assert of("trimmed_mean", [{"name": "clipping", "radius": 5.0}]) == (2 / 14, False)
    assert of("normalized_mean", ["clipping"]) == (2 / 20, False)
    for before in (["nearest_neighbor_mixing"], ["adaptive_clipping"], ["bucketing", "adaptive_clipping"]):
        assert of("trimmed_mean", before, f=1) == (2.0, True)
    assert of("krum", ["bucketing"], f=1) == (2.0, True)


def test_server_momentum_inside_the_rule_is_charged_or_refused():
    def inside(name, strict=False, n=20, f=4, **parameters):
        rule = rule_of(name, f, n=n, **parameters)
        return rule.inside_sensitivity(num_clients=n, clip_norm=1.0, server_momentum=0.75, strict=strict)

    assert inside("trimmed_mean") == 0.5 / 12
    assert inside("trimmed_mean", strict=True) == 5 * 0.5 / 12
    assert inside("median") == 0.25
    assert inside("krum") == 0.5
    assert inside("centered_clipping", radius=10.0) == pytest.approx(0.5 / 20)
    assert inside("centered_clipping", radius=0.1) == pytest.approx(0.2 / 20)
    assert inside("normalized_mean") == 2 / 20
    assert inside("trimmed_mean", before=["nearest_neighbor_mixing"]) == 0.5
    for step in ("clipping", "adaptive_clipping"):
        with pytest.raises(RuleError, match=f"{step} cannot stand where server momentum is inside"):
            inside("trimmed_mean", before=[step])
    for beta in (1.0, -0.1, float("nan")):
        with pytest.raises(RuleError, match="server_momentum"):
            make_rule("median", num_byzantine=0).inside_sensitivity(num_clients=3, clip_norm=1.0, server_momentum=beta)


def test_a_users_rule_with_a_sensitivity_of_its_own_states_the_rest_from_it(tmp_path):
    (tmp_path / "inside_rules.py").write_text(
        "class Half:\n"
        "    def __init__(self, *, equivariant=False): self.equivariant = equivariant\n"
        "    def sensitivity(self, *, num_clients, clip_norm): return clip_norm / 2\n"
        "    def kappa(self, num_clients): return 3\n"
        "    def __call__(self, x): return x[0] / 4\n"
        "def free(x): return x[0]\n"
    )

    def make(name, **parameters):
        return make_rule(f"inside_rules:{name}", num_byzantine=2, folders=[tmp_path], **parameters)

    sizes = {"num_clients": 9, "clip_norm": 1.0}
    half, free, even = make("Half"), make("free"), make("Half", equivariant=True)
    assert (half.sensitivity(**sizes), half.strict_sensitivity(**sizes), half.kappa(9)) == (0.5, 1.5, 3.0)
    assert (free.sensitivity(**sizes), free.strict_sensitivity(**sizes), free.kappa(9)) == (2.0, 2.0, None)
    assert even.inside_sensitivity(**sizes, server_momentum=0.5) == 0.25
    assert free.inside_sensitivity(**sizes, server_momentum=0.5) == 1.0
    with pytest.raises(RuleError, match="states no sensitivity for server momentum inside"):
        half.inside_sensitivity(**sizes, server_momentum=0.5)
    behind = make("free", before=["adaptive_clipping"])
    assert behind.sensitivity(**sizes) == 2.0
    assert torch.isfinite(behind(rows(9, 4))).all()


def test_every_rule_documents_formula_sensitivity_complexity_and_edge_cases():
    for owner in [*RULES.values(), *BEFORE.values()]:
        text = owner.__doc__ or ""
        for section in ("Complexity", "edge case", "1e30", "2^24"):
            assert section in text, f"{owner.name}: {section}"
        if owner not in (RULES["trimmed_mean"], RULES["mean"]):
            for case in ("n = 2f + 1", "f = 0|any f|f is not used", "all equal", "non-finite|NaN", "d = 1"):
                assert any(word in text for word in case.split("|")), f"{owner.name}: {case}"
        assert "Sensitivity" in text, owner.name


def test_exact_sums_are_those_of_mean_trimmed_mean_and_median_alone():
    exact = {name for name in RULES if isinstance(rule_of(name, 1, n=9), SumRule)}
    assert exact == {"mean", "trimmed_mean", "median"}
    total, divisor = make_rule("median", num_byzantine=1).kept_sum(torch.tensor([[1.0], [2.0], [4.0], [9.0]]))
    assert (total.item(), divisor) == (6.0, 2)

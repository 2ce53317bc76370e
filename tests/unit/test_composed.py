"""Steps that scale rows: no scaled copy where scales will do, else one buffer that outlives the round."""

import threading

import numpy as np
import pytest
import torch

from common.aggregation import BEFORE, RoundContext, make_rule
from common.aggregation import scratch as scratch_module
from common.aggregation.before.preparation import RowScaling
from common.aggregation.scratch import Scratch

CLIPPING = {"name": "clipping", "radius": 3.0}
CHAINS = [[CLIPPING], ["adaptive_clipping"], [CLIPPING, "adaptive_clipping"], ["adaptive_clipping", CLIPPING]]
RULES = ["mean", "weighted_mean", "normalized_mean", "trimmed_mean", "median", "krum", "geometric_median"]


def rows(n=9, d=60, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, d)) * np.linspace(0.1, 2.0, n)[:, None]
    return torch.from_numpy(x.astype(np.float32))


def weights(n=9):
    return RoundContext(weights=torch.full((n,), 1.0 / n, dtype=torch.float64), generator=np.random.default_rng(1))


@pytest.fixture
def _always_scratch(monkeypatch):
    monkeypatch.setattr(scratch_module, "LARGE", 1)


def step_of(entry):
    parameters = {"name": entry} if isinstance(entry, str) else dict(entry)
    return BEFORE[parameters.pop("name")](num_byzantine=2, **parameters)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_behind_steps_that_scale_is_the_rule_on_scaled_rows(name, chain):
    for bad in (None, float("nan"), float("inf"), 1e30, 3e38):
        x = rows()
        if bad is not None:
            x[4, 7] = bad
        original = x.clone()
        scaled = x
        for entry in chain:
            scaled = step_of(entry)(scaled)
        expected = make_rule(name, num_byzantine=2)(scaled, weights())
        result = make_rule(name, num_byzantine=2, before=chain)(x, weights())
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6, err_msg=str(bad))
        np.testing.assert_array_equal(x, original)


def test_scales_come_in_between_steps_that_need_the_rows():
    x, chain = rows(), [CLIPPING, "nearest_neighbor_mixing", {"name": "clipping", "radius": 0.5}, "bucketing"]
    expected = x
    for entry in chain:
        expected = step_of(entry)(expected, weights())
    rule = make_rule("mean", num_byzantine=2, before=chain)
    np.testing.assert_allclose(rule(x, weights()), expected.mean(dim=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "weighted_mean", "normalized_mean"])
def test_the_means_take_scales_and_no_copy_of_the_rows(name, monkeypatch):
    def refused(*_):
        raise AssertionError("a copy")

    monkeypatch.setattr("common.aggregation.composed.scale_rows", refused)
    make_rule(name, num_byzantine=2, before=["adaptive_clipping", CLIPPING])(rows(), weights())
    with pytest.raises(AssertionError, match="a copy"):
        make_rule("median", num_byzantine=2, before=["adaptive_clipping"])(rows())


def test_rows_that_are_cut_to_nothing_count_as_zero():
    x = torch.zeros(5, 3)
    x[0] = torch.tensor([3.0, 0.0, 4.0])
    for name in ("mean", "weighted_mean", "normalized_mean", "median"):
        rule = make_rule(name, num_byzantine=1, before=["adaptive_clipping"])
        assert not rule(x, weights(5)).any(), name


@pytest.mark.usefixtures("_always_scratch")
@pytest.mark.parametrize("name", RULES)
def test_a_result_does_not_change_when_the_buffer_is_used_again(name):
    rule = make_rule(name, num_byzantine=2, before=[CLIPPING])
    first = rule(rows(seed=1), weights()), rule.evaluate(rows(seed=1), weights())
    kept = [result.clone() for result in first]
    rule(rows(seed=2), weights())
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))


@pytest.mark.usefixtures("_always_scratch")
def test_the_buffer_serves_every_round_that_is_not_larger():
    rule, places = make_rule("trimmed_mean", num_byzantine=2, before=[CLIPPING]), []
    kept_sum = rule.rule.kept_sum
    rule.rule.kept_sum = lambda x: (places.append(x.data_ptr()), kept_sum(x))[1]
    for n in (9, 9, 7):
        result = rule(rows(n))
        np.testing.assert_allclose(
            result, make_rule("trimmed_mean", num_byzantine=2)(BEFORE["clipping"](num_byzantine=2, radius=3.0)(rows(n)))
        )
    assert places[0] == places[1] == places[2]


@pytest.mark.usefixtures("_always_scratch")
def test_a_buffer_in_use_is_nobody_elses():
    scratch, x = Scratch(), rows()
    with scratch.like(x) as one, scratch.like(x) as other:
        assert one.shape == other.shape == x.shape
        assert one.data_ptr() != other.data_ptr()
    assert len(scratch._kept) == 1


@pytest.mark.usefixtures("_always_scratch")
def test_a_rule_that_fails_gives_its_buffer_back():
    rule = make_rule("trimmed_mean", num_byzantine=2, before=[CLIPPING])
    rule.rule.kept_sum = lambda _: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            rule(rows())
    assert len(rule._scratch._kept) == 1


@pytest.mark.usefixtures("_always_scratch")
def test_threads_that_share_a_rule_do_not_disturb_each_other():
    rule = make_rule("median", num_byzantine=2, before=[CLIPPING])
    inputs = [rows(seed=seed) for seed in range(4)]
    expected, wrong = [rule(x) for x in inputs], []

    def work(k):
        wrong.extend(k for _ in range(50) if not torch.equal(rule(inputs[k]), expected[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_small_matrices_and_devices_have_no_buffer():
    with Scratch().like(rows()) as nothing:
        assert nothing is None
    with Scratch().like(torch.zeros(2, 1 << 20, device="meta")) as nothing:
        assert nothing is None


def test_what_a_composition_evaluates_is_not_rounded_to_float32():
    for name in ("mean", "trimmed_mean", "median"):
        exact = make_rule(name, num_byzantine=1, before=["bucketing"]).evaluate(rows(12), weights(12))
        assert exact.dtype == torch.float64
        assert not torch.equal(exact.float().double(), exact), name


def test_scales_are_never_above_one_and_zero_for_rows_that_are_not_finite():
    norms = np.array([0.0, 1e-45, 1.0, 2.5, 2.5, 1e30, 1e42, np.inf, np.nan])
    for name in BEFORE:
        step = BEFORE[name](num_byzantine=2)
        if isinstance(step, RowScaling):
            scales = step.scales(norms)
            assert (scales[:7] <= 1.0).all(), name
            assert not scales[7:].any(), name

"""The aggregation rules on their edge cases, and how they are made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.aggregation import RoundContext, SumRule, make_rule
from common.errors import ConfigError, RuleError

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
DEVICES = ["cpu", CUDA]


def trimmed_mean_reference(x: np.ndarray, f: int) -> np.ndarray:
    """float64, straight from the definition."""
    ordered = np.sort(np.where(np.isnan(x), np.inf, x).astype(np.float64), axis=0)
    return ordered[f : len(x) - f].mean(axis=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_trimmed_mean_gives_the_golden_value(device):
    x = torch.tensor(GOLDEN["example_inputs"], device=device)
    assert make_rule("trimmed_mean", num_byzantine=1)(x).tolist() == GOLDEN["example_f1"]["cwtm"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("n", "f", "d"), [(1, 0, 1), (3, 1, 1), (5, 2, 7), (20, 4, 5000), (41, 20, 300), (64, 3, 2049)]
)
def test_the_trimmed_mean_agrees_with_float64(n, f, d, device):
    x = np.random.default_rng(n).standard_normal((n, d)).astype(np.float32)
    result = make_rule("trimmed_mean", num_byzantine=f)(torch.from_numpy(x).to(device))
    assert result.dtype == torch.float32
    assert result.device.type == device
    np.testing.assert_allclose(result.cpu().numpy(), trimmed_mean_reference(x, f), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attack", [np.inf, -np.inf, np.nan, -np.nan, 1e30, -1e30, 3.4e38])
def test_f_rows_of_anything_are_trimmed_without_a_trace(attack, device):
    honest = np.random.default_rng(1).standard_normal((7, 50)).astype(np.float32)
    x = np.concatenate([np.full((2, 50), attack, dtype=np.float32), honest])
    result = make_rule("trimmed_mean", num_byzantine=2)(torch.from_numpy(x).to(device)).cpu().numpy()
    np.testing.assert_allclose(result, trimmed_mean_reference(x, 2), rtol=0, atol=1e-6)
    assert (result >= honest.min(axis=0)).all()
    assert (result <= honest.max(axis=0)).all()


def test_nan_counts_as_plus_infinity_even_where_it_is_kept():
    column = torch.tensor([[float("nan")], [float("nan")], [float("nan")], [1.0], [2.0]])
    assert make_rule("trimmed_mean", num_byzantine=1)(column).item() == float("inf")
    opposed = torch.tensor([[float("nan")], [float("nan")], [-float("inf")], [-float("inf")], [2.0]])
    assert make_rule("trimmed_mean", num_byzantine=1)(opposed).isnan().all()


@pytest.mark.parametrize("f", [1, 2, 5])
def test_with_2f_plus_1_rows_the_trimmed_mean_is_the_median(f):
    x = torch.from_numpy(np.random.default_rng(f).standard_normal((2 * f + 1, 99)).astype(np.float32))
    assert torch.equal(make_rule("trimmed_mean", num_byzantine=f)(x), x.median(dim=0).values)


def test_without_byzantine_clients_the_trimmed_mean_is_the_mean():
    x = torch.randint(-999, 999, (6, 77)).float()
    assert torch.equal(make_rule("trimmed_mean", num_byzantine=0)(x), make_rule("mean", num_byzantine=0)(x))


def test_ties_change_nothing():
    x = torch.tensor([[1.0, 0.0], [1.0, -0.0], [1.0, 0.0], [5.0, -0.0], [-7.0, 0.0]])
    assert make_rule("trimmed_mean", num_byzantine=1)(x).tolist() == [1.0, 0.0]


def test_rules_work_above_2_to_the_24_elements():
    x = torch.arange(3, dtype=torch.float32)[:, None].expand(3, (1 << 24) // 3 + 1000)
    for name in ("mean", "trimmed_mean"):
        result = make_rule(name, num_byzantine=1)(x)
        assert bool((result == 1.0).all())


@pytest.mark.parametrize("name", ["mean", "trimmed_mean"])
def test_a_sum_far_above_2_to_the_24_grid_steps_is_still_exact(name):
    x = torch.full((300, 3), 2.0**24 - 1)
    x[:3] = -1.0
    f = 0 if name == "mean" else 2
    total, divisor = make_rule(name, num_byzantine=f).kept_sum(x)
    assert total.dtype == torch.float64
    assert total.tolist() == [(297 - f) * (2.0**24 - 1) - (3 - f)] * 3
    assert divisor == 300 - 2 * f


@pytest.mark.parametrize("name", ["mean", "trimmed_mean"])
def test_the_sum_of_what_is_kept_over_its_divisor_is_the_rule(name):
    rule = make_rule(name, num_byzantine=2)
    assert isinstance(rule, SumRule)
    x = torch.randn(9, 33)
    total, divisor = rule.kept_sum(x)
    assert divisor == (9 if name == "mean" else 5)
    assert torch.equal((total / divisor).float(), rule(x))


def test_the_mean_follows_one_adversary_and_the_trimmed_mean_does_not():
    x = torch.ones(5, 4)
    x[2] = 1e30
    assert bool((make_rule("mean", num_byzantine=1)(x) > 1e29).all())
    assert make_rule("trimmed_mean", num_byzantine=1)(x).tolist() == [1.0] * 4


def test_rules_leave_their_input_as_it_was():
    x = torch.randn(9, 5000)
    x[0, 0] = float("nan")
    before = x.clone()
    for name in ("mean", "trimmed_mean"):
        make_rule(name, num_byzantine=3)(x)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_the_minimum_and_the_sensitivity_are_those_of_the_theorem():
    trimmed, mean = make_rule("trimmed_mean", num_byzantine=4), make_rule("mean", num_byzantine=4)
    assert (trimmed.minimum_clients, mean.minimum_clients) == (9, 1)
    assert trimmed.sensitivity(num_clients=20, clip_norm=1.5) == 3.0 / 12
    assert mean.sensitivity(num_clients=20, clip_norm=1.5) == 3.0 / 20
    assert not trimmed.project_output
    assert not mean.project_output
    for refused in (
        lambda: trimmed.sensitivity(num_clients=8, clip_norm=1.0),
        lambda: trimmed.prepare(8, 3, "cpu"),
        lambda: trimmed(torch.zeros(8, 3)),
    ):
        with pytest.raises(RuleError, match="needs at least 9 rows; given 8"):
            refused()


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 3, 3)])
def test_another_shape_or_type_is_refused(x):
    with pytest.raises(RuleError, match=r"takes float32 \(n, d\)"):
        make_rule("trimmed_mean", num_byzantine=0)(x)


def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(RuleError, match="did you mean 'trimmed_mean'"):
        make_rule("trimed_mean", num_byzantine=1)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(RuleError, match="trimmed_mean has no parameter 'trim': it has none"):
        make_rule("trimmed_mean", num_byzantine=1, trim=0.1)


@pytest.mark.parametrize("f", [-1, 0.2, True, "1"])
def test_a_number_of_byzantine_clients_that_is_none_is_refused(f):
    with pytest.raises(RuleError, match="num_byzantine"):
        make_rule("mean", num_byzantine=f)


USER_MODULE = """
import torch

def median(x):
    return x.median(dim=0).values

def midrange(x, *, num_byzantine, scale=1.0):
    ordered = x.sort(dim=0).values
    return scale * (ordered[num_byzantine] + ordered[-1 - num_byzantine]) / 2

def weighted(x, context):
    return (context.weights[:, None].float() * x).sum(dim=0)
weighted.needs = ("weights",)

def wrong(x):
    return x

class Careful:
    def __init__(self, *, num_byzantine, share):
        self.minimum_clients = 3 * num_byzantine + 1
        self.share = share
    def sensitivity(self, *, num_clients, clip_norm):
        return self.share * clip_norm
    def __call__(self, x):
        return self.share * x[0]

NUMBER = 3
"""


@pytest.fixture
def users(tmp_path):
    (tmp_path / "users_rules.py").write_text(USER_MODULE)

    def make(name, f=1, **parameters):
        return make_rule(f"users_rules:{name}", num_byzantine=f, folders=[tmp_path], **parameters)

    return make


def test_a_users_function_is_a_rule_charged_2c_with_its_output_projected(users):
    rule = users("median")
    x = torch.randn(5, 8)
    assert torch.equal(rule(x), x.median(dim=0).values)
    assert rule.name == "users_rules:median"
    assert rule.project_output
    assert rule.sensitivity(num_clients=1000, clip_norm=0.5) == 1.0
    assert getattr(rule, "kept_sum", None) is None


def test_a_users_function_is_given_f_and_its_parameters(users):
    x = torch.tensor([[-100.0], [1.0], [2.0], [5.0], [100.0]])
    assert users("midrange")(x).item() == 3.0
    assert users("midrange", scale=2.0)(x).item() == 6.0
    with pytest.raises(RuleError, match="no parameter 'scales': did you mean 'scale'"):
        users("midrange", scales=2.0)


def test_a_users_class_states_its_own_minimum_and_sensitivity(users):
    rule = users("Careful", f=2, share=0.25)
    assert rule.minimum_clients == 7
    assert rule.sensitivity(num_clients=7, clip_norm=2.0) == 0.5
    assert not rule.project_output
    with pytest.raises(RuleError, match="needs at least 7"):
        rule(torch.zeros(6, 2))
    with pytest.raises(RuleError, match="needs share"):
        users("Careful")


def test_a_rule_that_needs_a_context_refuses_without_it(users):
    rule = users("weighted")
    x = torch.tensor([[2.0], [4.0]])
    with pytest.raises(RuleError, match="needs a RoundContext with weights"):
        rule(x)
    assert rule(x, RoundContext(weights=torch.tensor([0.25, 0.75]))).item() == 3.5


def test_a_users_mistake_is_named(users):
    with pytest.raises(RuleError, match=r"returned \(3, 2\) .* expected a torch tensor \(2,\)"):
        users("wrong")(torch.zeros(3, 2))
    with pytest.raises(RuleError, match="is a int: expected a function"):
        users("NUMBER")
    with pytest.raises(ConfigError, match="medain"):
        users("medain")

"""Algorithm 1's server: what is released, with which noise, and how the model moves."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from common.aggregation import RoundContext, Rule, make_rule
from common.aggregation.step import grid_of
from common.errors import PrivacyError, RuleError, RunFailed
from ps.privacy.released import Unreleased
from ps.update import Mechanism, advance, initial_state, release

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
DEVICES = ["cpu", CUDA]


def mechanism(n=7, f=2, z=1.0, clip_norm: float | None = 1.0, rule="trimmed_mean") -> Mechanism:
    return Mechanism(make_rule(rule, num_byzantine=f), n, f, clip_norm, z)


def conditioned(given: Mechanism, d: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((given.num_clients, d)).astype(np.float32))
    for row in rows:
        given.condition(row)
    return rows.to(device)


class Anything(Rule):
    """Returns a fixed vector; states S only when told to."""

    name = "anything"

    def __init__(self, vector, stated=None):
        super().__init__(num_byzantine=0)
        self.vector, self.stated = vector, stated
        self.project_output = stated is None
        self.seen = []

    def proved_sensitivity(self, *, num_clients, clip_norm, changed=1):
        proved = super().proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)
        return proved if not self.stated else self.stated * changed

    def aggregate(self, x, context):
        self.seen.append((x.clone(), context))
        return self.vector.to(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_a_private_release_is_the_exact_sum_plus_noise_on_the_grid_then_divided(rule, device):
    given = mechanism(rule=rule, z=3.0)
    rows, noise = conditioned(given, 500, device=device), np.random.default_rng(1).standard_normal(500)
    divisor = 7 if rule == "mean" else 3
    released = release(given, Unreleased(rows), range(7), noise)
    kept = np.sort(rows.cpu().numpy().astype(np.float64), axis=0)[0 if rule == "mean" else 2 :][:divisor].sum(axis=0)
    steps = kept * 2**20 + np.rint(noise * given.sigma * divisor * 2**20)
    assert released.dtype == torch.float32
    assert released.device.type == device
    np.testing.assert_array_equal(released.cpu().numpy(), (steps / 2**20 / divisor).astype(np.float32))


def test_the_noise_has_the_standard_deviation_sigma():
    given = mechanism(n=20, f=4, z=2.0)
    noise = np.random.default_rng(0).standard_normal(200_000)
    released = release(given, Unreleased(torch.zeros(20, 200_000)), [], noise)
    assert given.sensitivity == pytest.approx(2 / 12)
    assert released.std().item() == pytest.approx(2 * 2 / 12 * noise.std(), rel=1e-4)


def test_sigma_is_never_below_z_times_the_true_sensitivity():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n = int(rng.integers(1, 1000))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        clip_norm, z = float(rng.lognormal(0, 2)), float(rng.lognormal(1, 2))
        given = mechanism(n, f, z, clip_norm)
        least = Fraction(z) * 2 * Fraction(clip_norm) / (n - 2 * f)
        assert least <= Fraction(given.sigma) <= least * (1 + Fraction(1, 2**50))


@pytest.mark.parametrize("device", DEVICES)
def test_a_private_release_has_the_same_bits_in_any_client_order(device):
    given = mechanism(n=30, f=4, z=0.5)
    rows, noise = conditioned(given, 3000, device=device), np.random.default_rng(1).standard_normal(3000)
    order = torch.randperm(30, device=device)
    one, other = (release(given, Unreleased(x), range(30), noise) for x in (rows, rows[order]))
    assert torch.equal(one, other)


def test_under_privacy_an_absent_client_is_a_zero_row_and_changes_neither_divisor_nor_noise():
    given = mechanism(n=7, f=1, z=1.0)
    rows, noise = conditioned(given, 50), np.random.default_rng(1).standard_normal(50)
    rows[3] = 0.0
    with_all, with_absent = (
        release(given, Unreleased(rows), range(7), noise),
        release(given, Unreleased(rows), [0, 1, 2, 4, 5, 6], noise),
    )
    assert torch.equal(with_all, with_absent)


def test_a_left_over_row_of_an_absent_client_is_a_defect_that_shows():
    given = mechanism()
    with pytest.raises(ValueError, match="did not answer is not zero"):
        release(given, Unreleased(conditioned(given, 5)), [0, 1, 2], np.zeros(5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [False, True])
def test_without_privacy_the_rule_runs_over_those_who_answered_with_f_unchanged(mask, device):
    given = mechanism(n=9, f=2, z=0.0, clip_norm=None)
    rows = torch.randn(9, 40, device=device)
    answered = [8, 0, 1, 3, 4, 5]
    released = release(given, Unreleased(rows), np.isin(np.arange(9), answered) if mask else answered, None)
    assert torch.equal(released, make_rule("trimmed_mean", num_byzantine=2)(rows[[0, 1, 3, 4, 5, 8]]))
    assert torch.equal(
        release(given, Unreleased(rows), range(9), None), make_rule("trimmed_mean", num_byzantine=2)(rows)
    )


@pytest.mark.parametrize("answered", [[], [0, 1, 2, 3]])
def test_without_privacy_too_few_answers_are_refused(answered):
    with pytest.raises(RuleError, match=f"needs at least 5 rows; given {len(answered)}"):
        release(mechanism(z=0.0), Unreleased(torch.zeros(7, 3)), answered, None)


def test_noise_is_given_exactly_when_there_is_privacy():
    with pytest.raises(PrivacyError, match="noise is needed"):
        release(mechanism(z=1.0), Unreleased(torch.zeros(7, 3)), range(7), None)
    with pytest.raises(PrivacyError, match="noise is needed"):
        release(mechanism(z=0.0), Unreleased(torch.zeros(7, 3)), range(7), np.zeros(3))
    with pytest.raises(ValueError, match=r"noise \(4,\)"):
        release(mechanism(z=1.0), Unreleased(torch.zeros(7, 3)), range(7), np.zeros(4))
    with pytest.raises(ValueError, match="one per identity"):
        release(mechanism(z=1.0), Unreleased(torch.zeros(6, 3)), range(6), np.zeros(3))


def test_releasing_changes_neither_rows_nor_noise():
    given = mechanism()
    rows, noise = conditioned(given, 30), torch.randn(30, dtype=torch.float64)
    kept = rows.clone(), noise.clone()
    release(given, Unreleased(rows), range(7), noise)
    assert torch.equal(rows, kept[0])
    assert torch.equal(noise, kept[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [1e30, 0.9, math.nan])
def test_the_output_of_a_rule_without_a_proof_is_projected_onto_the_ball(value, device):
    rule = Anything(torch.full((10,), value))
    given = Mechanism(rule, 5, 0, 2.0, 1.0)
    assert given.charged_sensitivity(10) == given.sensitivity == 4.0
    released = release(given, Unreleased(torch.zeros(5, 10, device=device)), [0, 2], np.zeros(10))
    expected = 0.0 if math.isnan(value) else 2.0 / math.sqrt(10)
    assert torch.allclose(released.cpu(), torch.full((10,), expected), atol=2 * grid_of(2.0))
    assert released.double().norm().item() <= 2.0
    assert rule.seen[0][0].shape == (2, 10)  # absent rows are left out
    assert rule.vector.isnan().any() or rule.vector[0] == torch.tensor(value)  # not modified


def test_a_rule_with_a_proof_but_no_exact_sum_is_charged_for_its_rounding():
    given = Mechanism(Anything(torch.full((100,), 0.3), stated=0.5), 5, 0, 1.0, 2.0)
    assert given.sensitivity == 0.5
    assert given.charged_sensitivity(100) == pytest.approx(0.5 + 10 * 2.0**-20, rel=1e-12)
    assert given.charged_sigma(100) >= 2.0 * (0.5 + 10 * 2.0**-20) > given.sigma
    noise = np.random.default_rng(0).standard_normal(100)
    released = release(given, Unreleased(torch.zeros(5, 100)), range(5), noise)
    wanted = np.rint(np.float64(np.float32(0.3)) * 2**20) + np.rint(noise * given.charged_sigma(100) * 2**20)
    np.testing.assert_array_equal(released.numpy(), (wanted / 2**20).astype(np.float32))


def test_an_exact_rule_is_charged_its_own_sensitivity_in_any_dimension():
    given = mechanism(n=20, f=4, z=1.5)
    assert given.charged_sensitivity(10**7) == given.sensitivity == 2 / 12
    assert given.charged_sigma(10**7) == given.sigma


def test_the_context_of_a_rule_is_cut_to_those_who_answered():
    rule = Anything(torch.zeros(3))
    release(
        Mechanism(rule, 4, 0, None, 0.0),
        Unreleased(torch.zeros(4, 3)),
        [1, 3],
        None,
        RoundContext(weights=torch.arange(4.0)),
    )
    assert rule.seen[0][1].weights.tolist() == [1.0, 3.0]


def test_rows_are_projected_exactly_when_there_is_noise():
    long = torch.tensor([3.0, 4.0])
    private, plain = mechanism(z=1.0), mechanism(z=0.0)
    assert (private.private, plain.private) == (True, False)
    assert (private.grid, plain.grid) == (2.0**-20, None)
    assert (private.sigma > 0, plain.sigma) == (True, 0.0)
    for given, norm in ((private, 1.0), (plain, 5.0)):
        row = long.clone()
        assert given.condition(row)
        assert row.norm().item() == pytest.approx(norm, abs=1e-5)
        broken = torch.tensor([math.nan, 1.0])
        assert not given.condition(broken)
        assert broken.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf])
def test_a_noise_multiplier_that_is_none_is_refused(z):
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        mechanism(z=z)


def test_a_mechanism_that_cannot_work_is_refused():
    with pytest.raises(PrivacyError, match="clip_norm"):
        mechanism(clip_norm=None)
    with pytest.raises(RuleError, match="needs at least 7 rows; given 6"):
        mechanism(n=6, f=3)
    with pytest.raises(RuleError, match="made for f = 1, the mechanism for 2"):
        Mechanism(make_rule("mean", num_byzantine=1), 7, 2, 1.0, 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_moves_along_the_average_of_what_was_released(device):
    theta = torch.tensor([1.0, 2.0], device=device)
    state = initial_state(theta)
    assert state.round_id == 0
    assert state.momentum.tolist() == [0.0, 0.0]
    one = advance(state, torch.tensor([1.0, -1.0], device=device), 0.5, 0.75)
    two = advance(one, torch.tensor([2.0, 0.0], device=device), 1.0, 0.5)
    assert (one.round_id, two.round_id) == (1, 2)
    assert one.momentum.tolist() == [0.25, -0.25]
    assert one.theta.tolist() == [0.875, 2.125]
    assert two.momentum.tolist() == [1.125, -0.125]
    assert two.theta.tolist() == [-0.25, 2.25]
    assert theta.tolist() == [1.0, 2.0]
    assert one.theta.device.type == device


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_model_that_would_not_be_finite_ends_the_run_by_its_round(bad):
    state = advance(initial_state(torch.zeros(3)), torch.ones(3), 0.1, 0.0)
    with pytest.raises(RunFailed, match="round 1 would publish a non-finite model"):
        advance(state, torch.tensor([0.0, bad, 0.0]), 10.0, 0.0)

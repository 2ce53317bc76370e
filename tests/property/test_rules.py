"""What the aggregation rules promise for every input: order, sensitivity, robustness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.aggregation import make_rule

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
RULES = ["mean", "trimmed_mean"]
SETTINGS = [(n, f) for n in (3, 5, 6, 9, 12) for f in (1, 2, 3) if n > 2 * f]


@st.composite
def grids(draw):
    """Rows of multiples of 2⁻²⁰ inside [-2, 2], f, and two orders of the rows; many ties and signed zeros."""
    n = draw(st.integers(1, 12))
    f = draw(st.integers(0, (n - 1) // 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([2, 100, 2**21]))
    x = (rng.integers(-largest, largest + 1, (n, draw(st.integers(1, 40)))) * 2.0**-20).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = -0.0
    return x, f, rng.permutation(n)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=60)
@given(case=grids())
def test_the_exact_grid_sum_and_the_result_have_the_same_bits_in_any_client_order(name, device, case):
    x, f, order = case
    rule = make_rule(name, num_byzantine=f)
    one, other = torch.from_numpy(x).to(device), torch.from_numpy(x[order]).to(device)
    assert torch.equal(rule.kept_sum(one)[0].view(torch.int64), rule.kept_sum(other)[0].view(torch.int64))
    assert torch.equal(rule(one).view(torch.int32), rule(other).view(torch.int32))


@settings(deadline=None, max_examples=60)
@given(case=grids())
def test_the_grid_sum_of_the_trimmed_mean_is_the_integer_sum(case):
    x, f, _ = case
    steps = np.sort((x * 2.0**20).astype(np.int64), axis=0)[f : len(x) - f].sum(axis=0)
    total, divisor = make_rule("trimmed_mean", num_byzantine=f).kept_sum(torch.from_numpy(x))
    assert (total * 2**20).to(torch.int64).tolist() == steps.tolist()
    assert divisor == len(x) - 2 * f


def in_ball(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=-1, keepdims=True))


def largest_move(name: str, n: int, f: int, d: int, steps: int) -> float:
    """Hill climbing over honest rows, a replaced row in the ball, and unbounded Byzantine rows: max ‖ΔA‖ / S."""
    rng = np.random.default_rng([n, f, d])
    rule = make_rule(name, num_byzantine=f)
    bound = rule.sensitivity(num_clients=n, clip_norm=1.0)
    bad = f if name == "trimmed_mean" else 0

    def ratio(x: np.ndarray, replacement: np.ndarray) -> float:
        changed = np.concatenate([replacement[None], x[1:]])
        both = [rule.kept_sum(torch.from_numpy(v.astype(np.float32)))[0].numpy() for v in (x, changed)]
        return float(np.linalg.norm(both[0] - both[1]) / rule.divisor(n) / bound)

    # The start is the case that attains the bound, disturbed: f honest rows at the far end, f Byzantine ones beyond
    # the near end. The climb has to find its way back, and must never get above it.
    direction = np.abs(in_ball(rng.standard_normal(d)))
    direction /= np.linalg.norm(direction)
    x = np.zeros((n, d))
    x[0], x[1 : 1 + f] = direction, -direction
    if bad:
        x[n - bad :] = 5.0 * direction
    replacement = -direction
    best, worst_case = 0.0, ratio(x, replacement)
    x[: n - bad] = in_ball(x[: n - bad] + 0.3 * rng.standard_normal((n - bad, d)))
    for step in range(steps):
        size = 0.5 * 0.98 ** (step % 200)
        y = x + size * rng.standard_normal(x.shape) * (rng.random((n, 1)) < 0.3)
        y[: n - bad] = in_ball(y[: n - bad])
        new = in_ball(replacement + size * rng.standard_normal(d))
        found = ratio(y, new)
        if found > best:
            best, x, replacement = found, y, new
    assert worst_case >= best - 1e-6
    return max(best, worst_case)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize(("n", "f"), SETTINGS)
@pytest.mark.parametrize("name", RULES)
def test_no_search_exceeds_the_sensitivity_and_its_worst_case_reaches_it(name, n, f, d):
    assert largest_move(name, n, f, d, steps=250) == pytest.approx(1.0, abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), setting=st.sampled_from(SETTINGS), scale=st.sampled_from([1.0, 10.0, 1e6]))
def test_the_trimmed_mean_is_robust_with_its_kappa(seed, setting, scale):
    n, f = setting
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)) * np.where(np.arange(n) < n - f, 1.0, scale)[:, None]
    result = make_rule("trimmed_mean", num_byzantine=f)(torch.from_numpy(x.astype(np.float32))).numpy()
    honest = x[: n - f]
    spread = np.mean(np.sum((honest - honest.mean(axis=0)) ** 2, axis=1))
    kappa = 6 * f / (n - 2 * f) * (1 + f / (n - 2 * f))
    assert np.sum((result - honest.mean(axis=0)) ** 2) <= kappa * spread * (1 + 1e-5)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.1, 10), name=st.sampled_from(RULES))
def test_rules_are_translation_and_scale_equivariant(seed, scale, name):
    rng = np.random.default_rng(seed)
    x, shift = torch.from_numpy(rng.standard_normal((9, 5))).float(), torch.from_numpy(rng.standard_normal(5)).float()
    rule = make_rule(name, num_byzantine=2)
    torch.testing.assert_close(rule(scale * x + shift), scale * rule(x) + shift, rtol=1e-5, atol=1e-5)

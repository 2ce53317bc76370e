"""Conditioning a row: no row ever leaves the ball, whatever arrives."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.aggregation.step import condition_row, grid_of
from common.errors import ConfigError

clip_norms = st.floats(1e-30, 1e30) | st.sampled_from([1.0, 0.1, 0.5, 3.0, 2.25, 1e-30, 1e30, math.nextafter(1.0, 0)])
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exact_square(row: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in row.tolist()), Fraction(0))


@given(clip_norm=clip_norms)
def test_the_grid_is_the_largest_power_of_two_that_fits_2_to_the_20_times(clip_norm):
    grid = grid_of(clip_norm)
    assert math.frexp(grid)[0] == 0.5
    assert Fraction(grid) * 2**20 <= Fraction(clip_norm) < Fraction(grid) * 2**21


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf, 1e-31, 1e31])
def test_a_clip_norm_without_a_grid_is_refused(clip_norm):
    with pytest.raises(ConfigError, match="clip_norm"):
        grid_of(clip_norm)


def check(values: np.ndarray, clip_norm: float) -> None:
    row, grid = torch.from_numpy(values.copy()), grid_of(clip_norm)
    assert condition_row(row, clip_norm, grid)
    assert exact_square(row) <= Fraction(clip_norm) ** 2
    assert np.linalg.norm(row.numpy().astype(np.float64)) <= clip_norm
    assert all((Fraction(value) / Fraction(grid)).denominator == 1 for value in row.tolist())
    assert np.all(np.abs(row.numpy()) <= np.abs(values))
    assert np.all(row.numpy() * np.sign(values) >= 0)
    norm = np.linalg.norm(values.astype(np.float64))
    wanted = values.astype(np.float64) * min(1.0, clip_norm / norm if norm else 1.0)
    assert np.all(np.abs(row.numpy() - wanted) < grid * (1 + 1e-6))
    again = row.clone()
    assert condition_row(again, clip_norm, grid)
    assert torch.equal(again, row)


@settings(deadline=None, max_examples=150)
@given(values=st.lists(floats32, min_size=1, max_size=12), clip_norm=clip_norms)
def test_a_conditioned_row_is_in_the_ball_on_the_grid_near_its_projection_and_stays(values, clip_norm):
    check(np.array(values, dtype=np.float32), clip_norm)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), clip_norm=st.sampled_from([1.0, 0.1, 3.0, 2.25, math.nextafter(1.0, 0), 5.0]))
def test_rows_at_the_very_boundary_stay_in_the_ball(data, clip_norm):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.standard_normal(data.draw(st.integers(1, 50)))
    if data.draw(st.booleans()):  # equal coordinates, which the grid divides evenly
        values = np.ones(data.draw(st.sampled_from([1, 4, 16, 64])))
    values *= clip_norm / np.linalg.norm(values)
    check((values * data.draw(st.sampled_from([1.0, 1 + 1e-7, 1 - 1e-7, 7.0]))).astype(np.float32), clip_norm)


@pytest.mark.parametrize(
    "values", [[3.0, 4.0], [1e30, -1e30], [3.4e38] * 9, [1e-45, 0.0], [0.0, -0.0], [2.0] + [0.0] * 8]
)
def test_particular_rows_stay_in_the_ball(values):
    for clip_norm in (1.0, 5.0, 1e-3, 1e20):
        check(np.array(values, dtype=np.float32), clip_norm)


def test_a_norm_that_rounding_left_too_large_is_taken_back(monkeypatch):
    from common.aggregation import step

    honest_scale = step._truncate
    calls = []

    def one_grid_step_too_far(values, scale, grid):
        calls.append(scale)
        return honest_scale(values, scale if len(calls) > 1 else scale * (1 + 2.0**-19), grid)

    monkeypatch.setattr(step, "_truncate", one_grid_step_too_far)
    row = torch.full((4,), 7.0)
    assert condition_row(row, 1.0)
    assert len(calls) == 2
    assert exact_square(row) <= 1
    assert row.min() > 0.4999


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_000, 69_999])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_row_that_is_not_finite_becomes_zero(poison, place, clip_norm):
    row = torch.ones(70_000)
    row[place] = poison
    assert not condition_row(row, clip_norm)
    assert not row.any()


def test_without_a_clip_norm_a_finite_row_is_left_alone():
    row = torch.tensor([1e30, -3.4e38, 1e-45])
    before = row.clone()
    assert condition_row(row, None, None)
    assert torch.equal(row, before)


def test_a_row_is_conditioned_alike_wherever_it_lies_in_memory():
    values = torch.randn(70_001)
    inbox = torch.empty(3, 70_003)
    results = []
    for offset in (0, 1, 2):
        row = inbox[offset, offset : offset + 70_001]
        row.copy_(values)
        assert condition_row(row, 1.0)
        results.append(row.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_row_on_a_gpu_gets_the_bits_of_the_cpu():
    row = torch.randn(70_001)
    there = row.cuda()
    assert condition_row(row, 1.0) is condition_row(there, 1.0) is True
    assert torch.equal(row, there.cpu())


def test_a_grid_that_does_not_belong_to_the_clip_norm_is_refused():
    for grid in (3.0 * 2.0**-21, 2.0**-3, 2.0**-40):
        with pytest.raises(ConfigError, match="power of two near"):
            condition_row(torch.ones(3), 1.0, grid)

"""The compiled passes over large matrices: what numpy computes in float64, whatever the threads."""

import os

import numpy as np
import pytest
import torch

from common.aggregation.kernels import passes
from common.aggregation.kernels.library import Unavailable, load_library
from common.aggregation.kernels.passes import LARGE, passes_for
from common.aggregation.rows import combine, scale_rows, squared_norms


def large(rows=11, extra=7):
    columns = LARGE // rows + extra
    return torch.from_numpy(np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32))


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if os.environ.get("BYZULDP_KERNEL") == "plain":
        pytest.skip("BYZULDP_KERNEL = plain")
    try:
        load_library(passes._SOURCE, optimisation="-O3")
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert passes_for(large()) is not None, "compiled, and refused as wrong"


def test_small_matrices_other_devices_and_strided_columns_are_left_to_numpy():
    assert passes_for(torch.zeros(3, 5)) is None
    assert passes_for(torch.zeros(2, LARGE, device="meta")) is None
    assert passes_for(torch.zeros(LARGE, 2).t()) is None


def test_norms_combinations_and_scaled_rows_are_those_of_float64():
    x = large()
    exact = x.numpy().astype(np.float64)
    weights = np.linspace(-1.0, 2.0, 11)
    np.testing.assert_allclose(squared_norms(x), (exact**2).sum(axis=1), rtol=1e-13)
    np.testing.assert_allclose(combine(x, weights).numpy(), weights @ exact, rtol=1e-12, atol=1e-12)
    scales = np.linspace(0.0, 1.0, 11)
    assert np.array_equal(scale_rows(x, scales).numpy(), (exact * scales[:, None]).astype(np.float32))


@pytest.mark.parametrize("number", range(1, 12))
def test_any_number_of_rows_is_added_up_one_after_the_other(number):
    x, order = large(), np.random.default_rng(number).permutation(11)[:number]
    weights = np.random.default_rng(5).standard_normal(11)
    wanted = np.zeros(x.shape[1])
    for row in order:
        wanted += weights[row] * x[row].numpy().astype(np.float64)
    assert np.array_equal(combine(x, weights, order).numpy(), wanted)


def test_a_combination_in_float32_is_the_one_in_float64_rounded_once():
    x, weights = large(), np.linspace(-1.0, 2.0, 11)
    x[:, 5] = -0.0
    exact = combine(x, weights)
    rounded = combine(x, weights, dtype=torch.float32)
    assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float32)
    assert torch.equal(rounded, exact.to(torch.float32))
    assert not torch.signbit(exact[5])  # the sign of a zero would depend on the order of rows
    assert not torch.signbit(rounded[5])


def test_rows_too_many_for_the_caches_are_scaled_alike_wherever_they_start():
    size = (1 << 22) // 3 + 5  # an odd number: no two rows are aligned alike
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((3, size + 2), dtype=np.float32))[:, 1:-1]
    scales = np.array([0.3, 1.0, 0.0])
    x[2, 7] = float("inf")
    wanted = (x[:2].numpy().astype(np.float64) * scales[:2, None]).astype(np.float32)
    buffer = torch.full((3 * size + 1,), 7.0)
    for out in (None, buffer[1:].view(3, size)):
        result = scale_rows(x, scales, out)
        assert out is None or result.data_ptr() == out.data_ptr()
        assert np.array_equal(result[:2].numpy(), wanted)
        assert not result[2].any()
    assert buffer[0] == 7.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_do_not_depend_on_threads(threads):
    x, before = large(rows=40), torch.get_num_threads()
    wanted = squared_norms(x), combine(x, np.full(40, 1 / 40))
    torch.set_num_threads(threads)
    try:
        assert np.array_equal(squared_norms(x), wanted[0])
        assert torch.equal(combine(x, np.full(40, 1 / 40)), wanted[1])
    finally:
        torch.set_num_threads(before)


def test_rows_of_a_larger_matrix_and_huge_and_bad_entries_are_read_right():
    x = large(rows=6, extra=31)[:, 5:]
    x[1, 3], x[2, 0], x[3, -1], x[4] = 3e38, float("nan"), float("inf"), 1e30
    norms = squared_norms(x)
    assert np.isfinite(norms).tolist() == [True, True, False, False, True, True]
    weights = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    exact = x[0].double() + x[5].double()
    assert torch.equal(combine(x, weights), exact + 0.0)  # rows that are not finite count as zero
    assert torch.equal(combine(x, weights, dtype=torch.float32), (exact + 0.0).to(torch.float32))
    assert not scale_rows(x, np.where(np.isfinite(norms), 1.0, 0.0))[2:4].any()


@pytest.mark.parametrize("place", [0, 1, 17, 4095, 70_001, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_that_is_not_finite_is_noticed_wherever_it_stands(place, bad):
    x = large()
    x[7, place] = bad
    compiled = passes_for(x)
    assert not compiled.combine(x, np.ones(11), np.arange(11))[1]
    assert compiled.combine(x, np.ones(7), np.arange(7))[1]
    assert np.isfinite(compiled.squared_norms(x)).sum() == 10


def test_without_a_compiler_numpy_gives_the_same(monkeypatch):
    x = large()
    compiled = squared_norms(x), combine(x, np.full(11, 0.5)).numpy()
    monkeypatch.setattr(passes, "_passes", lambda: None)
    np.testing.assert_allclose(squared_norms(x), compiled[0], rtol=1e-13)
    np.testing.assert_allclose(combine(x, np.full(11, 0.5)).numpy(), compiled[1], rtol=1e-12, atol=1e-12)
    assert combine(x, np.full(11, 0.5), dtype=torch.float32).dtype == torch.float32

"""The compiled passes over large matrices: what numpy computes in float64, whatever the threads."""

import numpy as np
import pytest
import torch

from common.aggregation.kernels import passes
from common.aggregation.kernels.passes import LARGE, passes_for
from common.aggregation.rows import combine, scale_rows, squared_norms


def large(rows=11, extra=7):
    columns = LARGE // rows + extra
    return torch.from_numpy(np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32))


@pytest.fixture(autouse=True)
def _compiled():
    if passes_for(large()) is None:
        pytest.skip("no C++ compiler here")


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
    assert not scale_rows(x, np.where(np.isfinite(norms), 1.0, 0.0))[2:4].any()


def test_without_a_compiler_numpy_gives_the_same(monkeypatch):
    x = large()
    compiled = squared_norms(x), combine(x, np.full(11, 0.5)).numpy()
    monkeypatch.setattr(passes, "_passes", lambda: None)
    np.testing.assert_allclose(squared_norms(x), compiled[0], rtol=1e-13)
    np.testing.assert_allclose(combine(x, np.full(11, 0.5)).numpy(), compiled[1], rtol=1e-12, atol=1e-12)

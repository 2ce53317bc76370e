"""Every path of the trimmed mean, on every input, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.aggregation.kernels import library
from common.aggregation.kernels.compiled import straight_line_kernel, table_kernel
from common.aggregation.kernels.plain import sorted_sum, sorted_sum_on_device

# Straight-line code is compiled for each of these; the table serves any.
COMPILED = [(1, 0), (3, 1), (8, 0), (9, 4), (20, 4)]


def plain(x, f):
    return torch.from_numpy(sorted_sum(x.numpy(), f))


def on_device(x, f):
    return sorted_sum_on_device(x, f)


def table(x, f):
    return table_kernel(len(x), f)(x, mean=False)


def straight_line(x, f):
    return straight_line_kernel(len(x), f)(x, mean=False)


def paths(n, f):
    found = [plain, on_device]
    try:
        library._compiler()
    except library.Unavailable:
        return found
    return [*found, table, straight_line] if (n, f) in COMPILED else [*found, table]


def reference(x: np.ndarray, f: int) -> tuple[np.ndarray, np.ndarray]:
    """float64, straight from the definition: the kept values of each column, and their sum."""
    ordered = np.sort(np.where(np.isnan(x), np.inf, x).astype(np.float64), axis=0)[f : len(x) - f]
    with np.errstate(invalid="ignore"):
        return ordered, ordered.sum(axis=0) + 0.0


@st.composite
def shapes(draw):
    if draw(st.booleans()):
        n, f = draw(st.sampled_from(COMPILED))
    else:
        n = draw(st.integers(1, 45))
        f = draw(st.integers(0, (n - 1) // 2))
    return n, f, draw(st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 150])), draw(st.integers(0, 2**32))


@settings(deadline=None, max_examples=150)
@given(shape=shapes(), largest=st.sampled_from([1, 5, 2**21]), zeros=st.sampled_from([0.0, 0.3]))
def test_sums_of_grid_entries_have_the_same_bits_on_every_path_and_in_every_order(shape, largest, zeros):
    n, f, d, seed = shape
    rng = np.random.default_rng(seed)
    x = (rng.integers(-largest, largest + 1, (n, d)) * 2.0**-20).astype(np.float32)
    x[rng.random(x.shape) < zeros] = -0.0
    wanted = reference(x, f)[1].view(np.int64)
    for path in paths(n, f):
        for rows in (x, x[rng.permutation(n)]):
            np.testing.assert_array_equal(path(torch.from_numpy(rows), f).numpy().view(np.int64), wanted, path.__name__)


SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45, 1.0], dtype=np.float32
)


@settings(deadline=None, max_examples=150)
@given(shape=shapes(), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), scale=st.sampled_from([1e-30, 1.0, 1e25]))
def test_any_value_at_any_place_gives_what_the_definition_gives(shape, share, scale):
    n, f, d, seed = shape
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((n, d)) * scale).astype(np.float32)
    x = np.where(rng.random(x.shape) < share, rng.choice(SPECIAL, x.shape), x)
    kept, wanted = reference(x, f)
    finite = np.isfinite(wanted)
    # Relative to what is kept: against 1e30 that is trimmed, nothing may be lost.
    allowed = 2.0**-50 * n * np.abs(kept).max(axis=0)
    for path in paths(n, f):
        result = path(torch.from_numpy(x), f).numpy()
        np.testing.assert_array_equal(result[~finite], wanted[~finite], path.__name__)
        assert (np.abs(result[finite] - wanted[finite]) <= allowed[finite]).all(), path.__name__


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_means_are_within_a_rounding_of_float64(shape, scale):
    n, f, d, seed = shape
    x = (np.random.default_rng(seed).standard_normal((n, d)) * scale).astype(np.float32)
    kept, wanted = reference(x, f)
    for make in (table_kernel, straight_line_kernel) if straight_line in paths(n, f) else ():
        result = make(n, f)(torch.from_numpy(x), mean=True).numpy()
        assert (np.abs(result - wanted / len(kept)) <= 1e-7 * np.abs(kept).max(axis=0) + 1e-45).all()


@pytest.mark.parametrize(("n", "f"), [(65, 3), (100, 20), (130, 64), (301, 15)])
def test_large_n_agree_on_the_bits(n, f):
    x = np.random.default_rng(n).integers(-(2**21), 2**21, (n, 300)).astype(np.float32)
    x[0, ::5], x[n // 2, ::7], x[-1, ::11] = np.nan, np.inf, 1e30
    wanted = reference(x, f)[1]
    for path in paths(n, f):
        np.testing.assert_array_equal(path(torch.from_numpy(x), f).numpy(), wanted, path.__name__)

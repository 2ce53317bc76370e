"""Conditioning with compiled passes: the same bits as without, or they are not used."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from common.aggregation import conditioning, step
from common.aggregation.conditioning import BLOCK, CompiledPasses, NumpyPasses, compiled_passes
from common.aggregation.kernels.library import Unavailable, load_library
from common.aggregation.step import condition_row, prepare_conditioning

SCALES = (1e-42, 1e-20, 1e-6, 1.0, 3e4, 1e30)


@pytest.fixture
def compiled() -> CompiledPasses:
    if os.environ.get("BYZULDP_KERNEL") == "plain":
        pytest.skip("BYZULDP_KERNEL = plain")
    try:
        load_library('extern "C" int byzuldp_one() { return 1; }', optimisation="-O1")
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = compiled_passes()
    assert found is not None  # there is a compiler, so its code has numpy's bits
    return found


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.setattr(step, "_passes", NumpyPasses())


def rows(d: int, scale: float) -> np.ndarray:
    random = np.random.default_rng(d)
    row = scale * random.standard_normal(d) * np.exp(4 * random.standard_normal(d))
    row[random.random(d) < 0.1] = 0.0
    row[random.random(d) < 0.1] *= -1e-9
    return row.clip(-3e38, 3e38).astype(np.float32)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("d", [1, 7, 8, 129, 1000, 26_010, BLOCK + 5, 3 * BLOCK + 77])
def test_a_row_conditioned_by_compiled_code_has_the_same_bits(compiled, as_before, monkeypatch, d, scale):
    without, with_it = torch.from_numpy(rows(d, scale)), torch.from_numpy(rows(d, scale))
    assert condition_row(without, 0.7)
    monkeypatch.setattr(step, "_passes", compiled)
    assert condition_row(with_it, 0.7)
    assert np.array_equal(with_it.numpy().view(np.int32), without.numpy().view(np.int32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 131, 4999])
def test_compiled_code_finds_the_one_entry_that_is_not_finite(compiled, monkeypatch, value, place):
    monkeypatch.setattr(step, "_passes", compiled)
    row = torch.ones(5000)
    row[place] = value
    assert not condition_row(row, 1.0)
    assert not row.any()


def test_a_row_that_is_not_contiguous_is_conditioned_as_any_other(compiled, as_before, monkeypatch):
    every_other, alone = torch.ones(2000), torch.ones(1000)
    condition_row(alone, 1.0)
    monkeypatch.setattr(step, "_passes", compiled)
    condition_row(every_other[::2], 1.0)
    assert torch.equal(every_other[::2], alone)
    assert torch.equal(every_other[1::2], torch.ones(1000))


def test_compiled_code_that_adds_in_another_order_is_not_used(compiled, monkeypatch, caplog):
    monkeypatch.setattr(NumpyPasses, "squares", lambda _, values: float(sum(values.astype("f8") ** 2)))
    compiled_passes.cache_clear()
    try:
        assert compiled_passes() is None
        assert "does not add as numpy does" in caplog.text
    finally:
        compiled_passes.cache_clear()


def test_small_federations_do_not_wait_for_a_compiler(as_before, monkeypatch):
    monkeypatch.setattr(step, "compiled_passes", lambda: pytest.fail("compiled"))
    prepare_conditioning(20, 26_010)
    assert type(step._passes) is NumpyPasses


def test_without_a_compiler_numpy_goes_on(as_before, monkeypatch):
    monkeypatch.setattr(step, "compiled_passes", lambda: None)
    prepare_conditioning(1000, 26_010)
    assert type(step._passes) is NumpyPasses


def test_the_plain_path_can_be_forced(monkeypatch):
    monkeypatch.setenv("BYZULDP_KERNEL", "plain")
    compiled_passes.cache_clear()
    try:
        assert conditioning.compiled_passes() is None
    finally:
        compiled_passes.cache_clear()

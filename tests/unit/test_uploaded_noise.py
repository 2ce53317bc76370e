"""Noise that is uploaded ahead: the same bits as noise that stays on the host, and as strictly used once.

Here the device is the CPU; ``benchmarks/gpu_check.sh`` compares the two where there is a GPU.
"""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

from common.aggregation import make_rule
from common.config import experiment_from
from common.noise import NoiseAhead, RoundedGaussian, SecureGaussian, SeededGaussian
from ps.mechanism import noise_of
from ps.privacy.released import Unreleased
from ps.release import Mechanism, release
from ps.uploaded_noise import UploadAhead, UploadedGaussian

CPU = torch.device("cpu")


class Counting:
    """Vectors that say for which round they were drawn; how many there were."""

    secret = False

    def __init__(self):
        self.drawn = []

    def standard_normal(self, d, *, round_id=None):
        self.drawn.append((round_id, d))
        return np.full(d, float(round_id))


class Failing:
    secret = False

    def standard_normal(self, d, *, round_id=None):  # noqa: ARG002
        raise OSError("no entropy")


@pytest.mark.parametrize(("sigma", "grid"), [(0.7, 2.0**-20), (3e-5, 2.0**-40), (1e4, 1.0), (1.0, 2.0**30)])
def test_scaling_and_rounding_on_the_device_gives_the_bits_of_the_host(sigma, grid):
    draw = np.random.default_rng(0).standard_normal(100_000)
    draw[:4] = [0.0, -0.0, 0.5 * grid / sigma, -1.5 * grid / sigma]
    there = UploadedGaussian(torch.from_numpy(draw.copy())).on_grid(sigma, grid)
    assert there.numpy().tobytes() == RoundedGaussian(draw.copy()).on_grid(sigma, grid).tobytes()


def test_a_release_with_uploaded_noise_has_the_bits_of_one_with_noise_from_the_host():
    mechanism = Mechanism(make_rule("trimmed_mean", num_byzantine=1), 5, 1, 1.0, 0.5)
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 1000), dtype=np.float32))
    for row in rows:
        mechanism.condition(row)
    source = SeededGaussian(3)
    released = [
        release(mechanism, Unreleased(rows), range(5), ahead.of_round(2, 1000))
        for ahead in (NoiseAhead(source), UploadAhead(source, CPU))
    ]
    assert torch.equal(*(vector.view(torch.int32) for vector in released))


def test_uploaded_noise_is_added_once():
    noise = UploadedGaussian(torch.ones(3, dtype=torch.float64))
    noise.on_grid(1.0, 0.5)
    with pytest.raises(RuntimeError, match="added to a release already"):
        noise.on_grid(1.0, 0.5)


@pytest.mark.parametrize(("sigma", "grid"), [(0.0, 1.0), (float("inf"), 1.0), (1.0, 0.3)])
def test_a_scale_that_is_refused_leaves_the_noise_unused(sigma, grid):
    noise = UploadedGaussian(torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"sigma|grid"):
        noise.on_grid(sigma, grid)
    assert noise.on_grid(1.0, 1.0).tolist() == [1.0]


@pytest.mark.parametrize("draw", [torch.ones(3), torch.ones((3, 1), dtype=torch.float64)])
def test_a_draw_that_is_no_float64_vector_is_refused(draw):
    with pytest.raises(ValueError, match="expected a float64 vector"):
        UploadedGaussian(draw)


def test_what_was_begun_is_handed_out_once():
    source = Counting()
    ahead = UploadAhead(source, CPU)
    ahead.start(4, 3)
    ahead.start(4, 3)
    noise = ahead.of_round(4, 3)
    assert noise.on_grid(1.0, 1.0).tolist() == [4.0] * 3
    assert source.drawn == [(4, 3)]
    assert ahead.of_round(4, 3) is not noise
    assert source.drawn == [(4, 3)] * 2


@pytest.mark.parametrize("begun", [(3, 2), (4, 3)])
def test_noise_for_another_round_or_size_is_thrown_away(begun):
    source = Counting()
    ahead = UploadAhead(source, CPU)
    ahead.start(*begun)
    assert ahead.of_round(4, 2).on_grid(1.0, 1.0).tolist() == [4.0, 4.0]
    assert (4, 2) in source.drawn


def test_noise_drawn_before_a_fork_is_thrown_away(monkeypatch):
    source = Counting()
    ahead = UploadAhead(source, CPU)
    ahead.start(4, 2)
    ahead._drawn[0].result.result(10)
    monkeypatch.setattr("common.noise.this_process", lambda: (0, 1))
    ahead.of_round(4, 2)
    assert source.drawn == [(4, 2)] * 2


def test_it_is_drawn_and_uploaded_on_a_thread_of_its_own_and_says_when():
    names = []

    class Named(Counting):
        def standard_normal(self, d, *, round_id=None):
            names.append(threading.current_thread().name)
            return super().standard_normal(d, round_id=round_id)

    ahead = UploadAhead(Named(), CPU)
    ahead.start(7, 2)
    assert ahead.of_round(7, 2).drawing.seconds >= 0.0
    assert names == ["noise-7"]


def test_a_draw_that_fails_is_told_to_whoever_takes_it():
    ahead = UploadAhead(Failing(), CPU)
    ahead.start(0, 2)
    with pytest.raises(OSError, match="no entropy"):
        ahead.of_round(0, 2)


@pytest.mark.parametrize("keep", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_noise_nor_its_source_is_copied(keep):
    for secret in (UploadAhead(SecureGaussian(), CPU), UploadedGaussian(torch.ones(2, dtype=torch.float64))):
        with pytest.raises(TypeError, match="cannot be copied"):
            keep(secret)


def test_noise_is_uploaded_ahead_exactly_where_rounds_are_made_on_cuda():
    experiment = experiment_from({"federation": {"clients": 5}, "training": {"rounds": 2}, "privacy": {"epsilon": 1.0}})
    on_cuda = noise_of(experiment, 10, torch.device("cuda"))
    assert isinstance(on_cuda, UploadAhead)
    assert on_cuda.secret
    for device in (None, CPU):
        assert isinstance(noise_of(experiment, 10, device), NoiseAhead)

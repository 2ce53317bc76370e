"""The exact sampler against the law that its guarantee speaks of, and every way in which it must refuse.

Entropy comes from the operating system: each of some 20 p-values alarms by chance once in a million runs, a few times
that where a central limit is used; the file less than once in 10,000.
"""

import copy
import os
import pickle
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest
from scipy import stats

from common.discrete_noise import MOST_PARAMETERS, DiscreteGaussian, DiscreteNoise
from common.errors import ConfigError, PrivacyError

ALARM = 1e-6
GRID = 2.0**-20


def multiples(scale: float, d: int) -> np.ndarray:
    drawn = DiscreteGaussian(d).on_grid(scale * GRID, GRID)
    assert drawn.shape == (d,)
    assert drawn.dtype == np.float64
    assert np.array_equal(drawn / GRID, np.rint(drawn / GRID))
    return drawn / GRID


def two_sided(score: float) -> float:
    return float(2 * stats.norm.sf(abs(score)))


def fits(values: np.ndarray, scale: float) -> float:
    """The chi-square p-value of "P(k) is proportional to exp(-k² / 2s²)", cells of few expected values in one."""
    k = np.arange(-60 * int(scale + 1), 60 * int(scale + 1) + 1)
    law = np.exp(-(k**2) / (2 * scale**2))
    expected = values.size * law / law.sum()
    counts = np.array([np.sum(values == one) for one in k])
    usual = expected >= 10
    expected, counts = (np.append(x[usual], x[~usual].sum()) for x in (expected, counts))
    assert counts.sum() == values.size
    return float(stats.chi2.sf(np.sum((counts - expected) ** 2 / expected), len(counts) - 1))


@pytest.mark.parametrize("scale", [0.7, 2.0, 5.5])
def test_the_law_is_the_discrete_gaussian(scale):
    assert fits(multiples(scale, 15_000), scale) > ALARM


@pytest.mark.parametrize(
    "bug",
    [
        lambda x: 2.15 * stats.norm.ppf(x),
        lambda x: np.sqrt(2) * stats.norm.ppf(x),  # the variance taken for the deviation
        lambda x: stats.laplace.ppf(x) * np.sqrt(2),
        lambda x: np.abs(2 * stats.norm.ppf(x)),
        lambda x: 2 * stats.norm.ppf(x) + 0.15,
        lambda x: 2 * np.rint(stats.norm.ppf(x)),
    ],
    ids=["wide", "narrow", "Laplace", "one side", "off centre", "even"],
)
def test_this_check_notices_another_law(bug):
    wrong = np.rint(bug(np.random.default_rng(7).random(15_000)))
    assert fits(wrong, 2.0) < ALARM


SCALE = 1e5


def test_wide_noise_has_the_moments_and_tails_of_its_deviation_and_no_favourite_bits():
    values = multiples(SCALE, 40_000)
    scores, n = values / SCALE, values.size
    found = {
        "mean": two_sided(scores.mean() * np.sqrt(n)),
        "variance": 2 * min(stats.chi2.cdf(scores @ scores, n), stats.chi2.sf(scores @ scores, n)),
        "kurtosis": two_sided((np.mean(scores**4) - 3) * np.sqrt(n / 96)),
        "law": stats.kstest(scores, "norm").pvalue,
        "low bits": stats.chisquare(np.bincount(values.astype(np.int64) & 15, minlength=16)).pvalue,
        "parity of large ones": stats.binomtest(
            int(np.sum(values[np.abs(scores) > 1.5] % 2)), int(np.sum(np.abs(scores) > 1.5))
        ).pvalue,
        "neighbours": two_sided(np.sum(scores[1:] * scores[:-1]) / np.sqrt(n - 1)),
        "neighbours' squares": two_sided(np.sum((scores[1:] ** 2 - 1) * (scores[:-1] ** 2 - 1)) / 2 / np.sqrt(n - 1)),
        "halves": two_sided(np.sum(scores[: n // 2] * scores[n // 2 :]) / np.sqrt(n // 2)),
    }
    for threshold in (1.0, 3.0, 4.0):
        count = int(np.sum(np.abs(scores) > threshold))
        found[f"tail {threshold}"] = stats.binomtest(count, n, 2 * stats.norm.sf(threshold)).pvalue
    assert {name: p for name, p in found.items() if p < ALARM} == {}


def test_rounds_are_independent():
    noise = DiscreteNoise(2000)
    noise.start(0, 2000)
    rounds = np.stack([noise.of_round(t, 2000).on_grid(SCALE * GRID, GRID) for t in range(6)]) / (SCALE * GRID)
    pairs = (rounds @ rounds.T)[np.triu_indices(6, 1)] / np.sqrt(2000)
    assert two_sided(np.abs(pairs).max()) * pairs.size > ALARM
    assert noise.secret


@pytest.mark.parametrize("scale", [2.0**44 * 1.1, 2.0**45])
def test_the_widest_noise_is_still_a_sum_of_exact_multiples(scale):
    values = multiples(scale, 2000)
    assert 0.8 < values.std() / scale < 1.2
    assert np.abs(values).max() < 2.0**53
    assert two_sided(2 * (np.mean(values % 2) - 0.5) * np.sqrt(2000)) > ALARM


FORKS = """
import os, sys
from common.discrete_noise import DiscreteGaussian
from common.errors import PrivacyError

def draw():
    return DiscreteGaussian(8).on_grid(0.1, 2.0**-20).tobytes().hex()

ahead = DiscreteGaussian(8)
print(draw())
for _ in range(8):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, f"{draw()} {draw()} {ahead.on_grid(0.1, 2.0**-20).tobytes().hex()}".encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 65536).decode())
    os.wait()
print(draw(), ahead.on_grid(0.1, 2.0**-20).tobytes().hex())
parent = os.getpid()
if os.fork() == 0:
    os.getpid = lambda: parent
    try:
        draw()
    except PrivacyError as refused:
        os._exit(77 if "like one it was forked from" in str(refused) else 1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_eight_forked_workers_draw_nothing_twice_and_a_child_with_its_parents_id_draws_nothing():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 77, done.stderr
    drawn = done.stdout.split()
    assert len(drawn) == 1 + 8 * 3 + 2
    assert len(set(drawn)) == len(drawn)
    assert {len(vector) for vector in drawn} == {8 * 8 * 2}


def test_the_noise_of_a_release_is_given_out_once():
    noise = DiscreteGaussian(3)
    noise.on_grid(1.0, 0.5)
    with pytest.raises(RuntimeError, match="draw new noise"):
        noise.on_grid(1.0, 0.5)


def test_exact_noise_is_drawn_when_it_is_added_and_says_so():
    noise = DiscreteGaussian(3)
    assert noise.drawing is None
    began_at = time.monotonic()
    noise.on_grid(1.0, 0.5)
    assert began_at <= noise.drawing.began_at <= noise.drawing.began_at + noise.drawing.seconds <= time.monotonic()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_noise_of_a_release_cannot_be_copied(copied):
    with pytest.raises(TypeError, match="used once"):
        copied(DiscreteGaussian(1))


@pytest.mark.parametrize(("sigma", "grid"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, 0.75), (1.0, 0.0)])
def test_a_scale_that_has_no_noise_is_refused(sigma, grid):
    with pytest.raises(ValueError, match="expected a"):
        DiscreteGaussian(1).on_grid(sigma, grid)


@pytest.mark.parametrize(("sigma", "grid"), [(2.0**45 * 1.001, 1.0), (1e300, 2.0**-1000), (5e-324, 2.0**1000)])
def test_a_scale_beyond_exact_arithmetic_is_refused(sigma, grid):
    with pytest.raises(PrivacyError, match="no exact draw"):
        DiscreteGaussian(1).on_grid(sigma, grid)


@pytest.mark.parametrize("make", [DiscreteGaussian, DiscreteNoise])
def test_a_model_too_large_for_exact_draws_is_refused_before_the_first_round(make):
    make(MOST_PARAMETERS)
    with pytest.raises(ConfigError, match=r'100,001 parameters.*30 µs.*"gaussian"'):
        make(MOST_PARAMETERS + 1)


def test_without_opendp_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.measurements", None)
    with pytest.raises(PrivacyError, match=r"pip install 'byzuldp\[exact-noise\]'"):
        DiscreteNoise(3)


@pytest.mark.parametrize("version", ["0.14.1", "0.15.1rc2"])
def test_an_opendp_whose_sampler_was_biased_is_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(PrivacyError, match=rf"opendp {version} is installed.*exact-noise"):
        DiscreteNoise(3)


def test_opendp_is_imported_only_when_it_is_asked_for():
    check = "import common.discrete_noise, sys; sys.exit('opendp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0

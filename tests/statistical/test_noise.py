"""The secure source against the standard normal law, and every way in which noise could be used twice.

Entropy comes from the operating system, so a check may fail by chance: each of some 40 p-values on it with
probability ALARM, a few times that where a central limit is used; the file less than once in 5,000 runs.
"""

import copy
import os
import pickle
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from randomgen import ChaCha
from scipy import stats

from common.noise import KEY_BITS, NoiseAhead, RoundedGaussian, SecureGaussian, SeededGaussian

ALARM = 1e-6
ROUNDS, D = 24, 26_010  # the paper's CNN


def p_values(vectors: np.ndarray) -> dict[str, float]:
    """Two-sided p-values of ``(rounds, d)`` under "all entries are independent N(0, 1)"."""
    flat = vectors.ravel()
    rounds, d = vectors.shape
    n, squares = flat.size, flat * flat
    found = {
        "mean": two_sided(flat.mean() * np.sqrt(n)),
        "variance": 2 * min(stats.chi2.cdf(flat @ flat, n), stats.chi2.sf(flat @ flat, n)),
        "skewness": two_sided(np.mean(flat * squares) * np.sqrt(n / 15)),
        "kurtosis": two_sided((np.mean(squares * squares) - 3) * np.sqrt(n / 96)),
        "law": stats.kstest(flat, "norm").pvalue,
    }
    for threshold in (1.0, 2.0, 3.0, 4.0):
        count = int(np.sum(np.abs(flat) > threshold))
        found[f"tail {threshold}"] = stats.binomtest(count, n, 2 * stats.norm.sf(threshold)).pvalue
    for name, values in (("", vectors), ("squared ", (vectors**2 - 1) / np.sqrt(2))):
        for lag in (1, 2, 512):
            products = values[:, :-lag] * values[:, lag:]
            found[f"{name}coordinates {lag} apart"] = two_sided(products.mean() * np.sqrt(products.size))
        gram = values @ values.T / np.sqrt(d)
        pairs = gram[np.triu_indices(rounds, 1)]
        found[f"{name}rounds"] = min(1.0, two_sided(np.abs(pairs).max()) * pairs.size)
    return found


def two_sided(score: float) -> float:
    return float(2 * stats.norm.sf(abs(score)))


def noise(source=None, rounds=ROUNDS, d=D) -> np.ndarray:
    source = source or SecureGaussian()
    return np.stack([source.standard_normal(d, round_id=t) for t in range(rounds)])


def test_the_noise_is_standard_normal_and_independent_across_rounds_and_coordinates():
    found = p_values(noise())
    assert {name: p for name, p in found.items() if p < ALARM} == {}


def test_the_first_draws_of_fresh_keys_are_as_good_as_later_ones():
    vectors = noise(rounds=10_000, d=8)
    assert stats.kstest(vectors[:, 0], "norm").pvalue > ALARM
    scores = vectors.T @ vectors / np.sqrt(len(vectors))
    pairs = scores[np.triu_indices(8, 1)]
    assert two_sided(np.abs(pairs).max()) * pairs.size > ALARM
    consecutive = np.sum(vectors[:-1] * vectors[1:]) / np.sqrt(vectors[1:].size)
    assert two_sided(consecutive) > ALARM


@pytest.mark.parametrize(
    ("bug", "noticed_by"),
    [
        (lambda x: 0.99 * x, "variance"),
        (lambda x: x + 0.01, "mean"),
        (lambda x: np.clip(x, -3.5, 3.5), "tail 4.0"),
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), "kurtosis"),
        (lambda x: stats.norm.ppf(stats.uniform.cdf(x, -3, 6) * 0.98 + 0.01), "law"),
        (lambda x: np.broadcast_to(x[0], x.shape), "rounds"),
        (lambda x: np.concatenate([x[:1], -x[:1], x[2:]]), "rounds"),
        (lambda x: np.concatenate([x[:-1], np.abs(x[:1])]), "squared rounds"),
        (lambda x: np.repeat(x[:, ::2], 2, axis=1), "coordinates 1 apart"),
        (lambda x: np.concatenate([x[:, :512], x[:, :-512]], axis=1), "coordinates 512 apart"),
    ],
)
def test_these_checks_notice_noise_that_is_wrong(bug, noticed_by):
    rng = np.random.default_rng(7)
    assert p_values(bug(rng.standard_normal((ROUNDS // 2, D))))[noticed_by] < ALARM


def chacha20_block(key: bytes, counter: int) -> list[int]:
    """One block of Bernstein's cipher, as eight 64-bit words."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start += [*struct.unpack("<8I", key), *struct.unpack("<4I", counter.to_bytes(16, "little"))]
    x = list(start)

    def quarter(*at: int) -> None:
        a, b, c, d = at
        for i, j, k, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) % 2**32
            x[k] ^= x[i]
            x[k] = (x[k] << turn | x[k] >> (32 - turn)) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    words = [(a + b) % 2**32 for a, b in zip(x, start, strict=True)]
    return [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]


def test_the_bit_generator_is_chacha20_under_the_whole_key():
    key = bytes(range(1, 33))
    raw = ChaCha(key=np.frombuffer(key, dtype=np.uint64), rounds=20).random_raw(8 * 600)
    for counter in (0, 1, 511, 599):
        assert [int(word) for word in raw[8 * counter : 8 * counter + 8]] == chacha20_block(key, counter)


def test_each_of_256_bits_of_the_operating_systems_entropy_matters(monkeypatch):
    asked = []

    def entropy_of(key: bytes):
        return lambda size: asked.append(size) or key

    seen = set()
    for bit in range(-1, KEY_BITS):
        key = int.from_bytes(bytes(range(32)), "little") ^ (1 << bit if bit >= 0 else 0)
        monkeypatch.setattr(os, "urandom", entropy_of(key.to_bytes(32, "little")))
        drawn = SecureGaussian().standard_normal(4)
        assert drawn.tolist() == np.random.Generator(ChaCha(key=key, rounds=20)).standard_normal(4).tolist()
        seen.add(drawn.tobytes())
    assert len(seen) == 257
    assert set(asked) == {32}


def test_a_generator_is_made_anew_for_every_vector_and_only_ever_from_a_key(monkeypatch):
    made = []

    def recorded(*args, **settings):
        made.append((args, settings))
        return ChaCha(*args, **settings)

    monkeypatch.setattr("common.noise.ChaCha", recorded)
    source = SecureGaussian()
    for round_id in range(3):
        source.standard_normal(2, round_id=round_id)
    assert [(args, set(settings), settings["rounds"]) for args, settings in made] == [((), {"key", "rounds"}, 20)] * 3
    assert len({settings["key"].tobytes() for _, settings in made}) == 3
    assert {settings["key"].nbytes * 8 for _, settings in made} == {KEY_BITS}


def test_no_two_draws_are_equal():
    one, other = SecureGaussian(), SecureGaussian()
    drawn = [source.standard_normal(64, round_id=3) for source in (one, one, other, other)]
    assert len({vector.tobytes() for vector in drawn}) == 4
    assert all(vector.dtype == np.float64 and vector.shape == (64,) for vector in drawn)


@pytest.mark.parametrize(
    "held",
    [SecureGaussian(), NoiseAhead(SecureGaussian()), RoundedGaussian(np.zeros(2))],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_secret_noise_cannot_be_pickled_or_copied(held, copied):
    with pytest.raises(TypeError, match=r"drawn in the process|used once"):
        copied(held)


FORKS = """
import os, sys, threading, time
from common.noise import NoiseAhead, SecureGaussian
source = SecureGaussian()
source.standard_normal(8)
ahead = NoiseAhead(source)
ahead.start(0, 8)
while not ahead._drawn[0].result.done():
    time.sleep(0.001)

class Slow(SecureGaussian):
    gate = threading.Event()
    def standard_normal(self, d, *, round_id=None):
        vector = super().standard_normal(d)
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait(30)
        return vector

under_way = NoiseAhead(Slow())
under_way.start(0, 8)

def draws():
    vectors = source.standard_normal(8), ahead.take(0, 8), ahead.take(0, 8), under_way.take(0, 8)
    return [*vectors, ahead.of_round(0, 8).on_grid(1.0, 2.0**-52)]

for _ in range(8):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, " ".join(vector.tobytes().hex() for vector in draws()).encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 65536).decode())
    os.wait()
Slow.gate.set()
print(*(vector.tobytes().hex() for vector in draws()))
"""


def test_eight_forked_workers_and_their_parent_draw_nothing_twice():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    drawn = done.stdout.split()
    assert len(drawn) == 9 * 5
    assert len(set(drawn)) == len(drawn)
    assert {len(vector) for vector in drawn} == {8 * 8 * 2}


GRID = 2.0**-20  # of C = 1


def low_bits(multiples: np.ndarray, bits: int = 6) -> float:
    """The p-value of "all values of the lowest bits are equally likely"."""
    counts = np.bincount(multiples.astype(np.int64) & (2**bits - 1), minlength=2**bits)
    return float(stats.chisquare(counts).pvalue)


def on_grid(draw: np.ndarray, sigma: float) -> np.ndarray:
    return RoundedGaussian(draw).on_grid(sigma, GRID) / GRID


@pytest.mark.parametrize("sigma", [2.0**-14, 0.1, 0.7, 37.3])
def test_noise_on_the_grid_has_the_deviation_asked_for_and_no_multiple_is_preferred(sigma):
    multiples = on_grid(SecureGaussian().standard_normal(400_000), sigma)
    assert np.array_equal(multiples, np.rint(multiples))
    variance = (sigma / GRID) ** 2 + 1 / 12  # Sheppard's correction
    scores = multiples / np.sqrt(variance)
    n = scores.size
    assert 2 * min(stats.chi2.cdf(scores @ scores, n), stats.chi2.sf(scores @ scores, n)) > ALARM
    assert two_sided(scores.mean() * np.sqrt(n)) > ALARM
    if sigma / GRID > 1000:  # else the low bits see the bell
        assert low_bits(multiples) > ALARM
        assert low_bits(multiples[np.abs(scores) > 2.5]) > ALARM


def test_every_multiple_near_zero_is_reached():
    wide, near = 0.1, 32  # of 65 multiples each is missed by 6 million draws with probability exp(-22)
    reached: set[float] = set()
    for _ in range(12):
        multiples = on_grid(SecureGaussian().standard_normal(500_000), wide)
        reached |= set(multiples[np.abs(multiples) <= near].tolist())
    assert reached >= set(range(-near, near + 1))


@pytest.mark.parametrize("sigma", [0.7, 37.3])
@pytest.mark.parametrize(
    "bug",
    [
        lambda x: np.round(x * 2**20) / 2**20,
        lambda x: (x.view(np.uint64) & np.uint64(2**64 - 2**33)).view(np.float64),
    ],
    ids=["a sampler of 20 bits", "a sampler of 20 significant bits"],
)
def test_these_checks_notice_gaps_in_the_sampler(bug, sigma):
    draw = bug(np.random.default_rng(7).standard_normal(400_000))
    assert low_bits(on_grid(draw, 64 * sigma)) < ALARM


def test_float32_normals_leave_gaps_on_a_fine_grid_and_are_refused():
    draw = np.random.default_rng(7).standard_normal(400_000, dtype=np.float32)
    assert low_bits(on_grid(draw.astype(np.float64), 64.0)) < ALARM
    with pytest.raises(ValueError, match="float64 vector"):
        RoundedGaussian(draw)
    with pytest.raises(ValueError, match="float64 vector"):
        RoundedGaussian(np.zeros((2, 2)))


@pytest.mark.parametrize(("sigma", "grid"), [(0.7, GRID), (1.5, 1.0), (1e-3, 2.0**-30), (5e7, 4.0), (1e-30, 2.0**-120)])
def test_rounding_is_to_nearest_and_the_same_bits_as_torch(sigma, grid):
    draw = np.concatenate([np.random.default_rng(1).standard_normal(70_000), [0.0, -0.0, *(np.arange(-9, 10) / 3)]])
    expected = torch.as_tensor(draw) * sigma
    expected.div_(grid).round_().mul_(grid)
    assert RoundedGaussian(draw).on_grid(sigma, grid).tobytes() == expected.numpy().tobytes()


def test_the_noise_of_a_release_is_given_out_once():
    noise = RoundedGaussian(np.ones(3))
    assert noise.on_grid(1.0, 0.5).tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="draw new noise"):
        noise.on_grid(1.0, 0.5)


@pytest.mark.parametrize(
    ("sigma", "grid", "named"),
    [(0.0, 1.0, "sigma"), (float("nan"), 1.0, "sigma"), (float("inf"), 1.0, "sigma"), (-1.0, 1.0, "sigma")]
    + [(1.0, bad, "grid") for bad in (0.0, 3.0, -1.0, float("nan"), float("inf"))],
)
def test_a_scale_that_has_no_noise_is_refused_and_the_noise_is_still_there(sigma, grid, named):
    noise = RoundedGaussian(np.ones(1))
    with pytest.raises(ValueError, match=named):
        noise.on_grid(sigma, grid)
    assert noise.on_grid(1.0, 1.0).tolist() == [1.0]


def test_a_rounds_noise_is_what_was_drawn_ahead_for_it():
    ahead = NoiseAhead(SeededGaussian(11))
    ahead.start(3, 50)
    vector = SeededGaussian(11).standard_normal(50, round_id=3)
    assert ahead.of_round(3, 50).on_grid(0.7, GRID).tolist() == RoundedGaussian(vector).on_grid(0.7, GRID).tolist()


def test_noise_says_when_it_was_drawn_ahead_or_not():
    ahead = NoiseAhead(SecureGaussian())
    began_at = time.monotonic()
    ahead.start(3, 50)
    ahead._drawn[0].result.result(10)
    done_at = time.monotonic()
    drawing = ahead.of_round(3, 50).drawing
    assert began_at <= drawing.began_at <= drawing.began_at + drawing.seconds <= done_at
    assert done_at <= ahead.of_round(4, 50).drawing.began_at
    assert RoundedGaussian(np.zeros(2)).drawing is None


class Counting:
    """Hands out (number of the draw, round), optionally only when told."""

    secret = True

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.drawn = 0
        self.gate = gate

    def standard_normal(self, d: int, *, round_id: int | None = None) -> np.ndarray:
        if self.gate is not None:
            assert self.gate.wait(10)
        self.drawn += 1
        return np.full(d, self.drawn * 100.0 + (round_id or 0))


def test_noise_drawn_ahead_is_handed_out_once():
    ahead = NoiseAhead(Counting())
    ahead.start(5, 3)
    assert ahead.take(5, 3).tolist() == [105.0] * 3
    assert ahead.take(5, 3).tolist() == [205.0] * 3


def test_starting_does_not_wait_and_taking_does():
    gate = threading.Event()
    source = Counting(gate)
    ahead = NoiseAhead(source)
    ahead.start(1, 2)
    assert source.drawn == 0
    threading.Timer(0.05, gate.set).start()
    assert ahead.take(1, 2).tolist() == [101.0] * 2


def test_starting_the_same_round_twice_draws_once():
    source = Counting()
    ahead = NoiseAhead(source)
    ahead.start(1, 2)
    ahead.start(1, 2)
    assert ahead.take(1, 2).tolist() == [101.0] * 2
    assert source.drawn == 1


@pytest.mark.parametrize(("round_id", "d"), [(2, 3), (1, 4)])
def test_noise_of_another_round_or_size_is_dropped(round_id, d):
    ahead = NoiseAhead(Counting())
    ahead.start(1, 3)
    ahead._drawn[0].result.result(10)
    assert ahead.take(round_id, d).tolist() == [200.0 + round_id] * d
    assert ahead.take(1, 3).tolist() == [301.0] * 3


def test_starting_another_round_drops_the_one_before():
    ahead = NoiseAhead(Counting())
    ahead.start(1, 3)
    ahead._drawn[0].result.result(10)
    ahead.start(2, 3)
    assert ahead.take(2, 3).tolist() == [202.0] * 3
    assert ahead.take(1, 3).tolist() == [301.0] * 3


def test_a_draw_that_was_not_started_is_made_when_it_is_taken():
    assert NoiseAhead(Counting()).take(4, 2).tolist() == [104.0, 104.0]


def test_concurrent_takers_never_share_a_draw():
    ahead = NoiseAhead(SecureGaussian())
    taken: list[bytes] = []
    for round_id in range(20):
        ahead.start(round_id, 16)
        takers = [
            threading.Thread(target=lambda t=round_id: taken.append(ahead.take(t, 16).tobytes())) for _ in range(4)
        ]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(10)
    assert len(taken) == len(set(taken)) == 80


def test_a_failure_on_the_thread_reaches_whoever_takes():
    ahead = NoiseAhead(SecureGaussian())
    ahead.start(0, -1)
    with pytest.raises(ValueError, match="negative"):
        ahead.take(0, -1)


def test_only_secret_noise_says_so():
    assert SecureGaussian().secret
    assert NoiseAhead(SecureGaussian()).secret
    assert not SeededGaussian(1).secret
    assert not NoiseAhead(SeededGaussian(1)).secret


def test_seeded_noise_is_a_function_of_seed_and_round():
    ahead = NoiseAhead(SeededGaussian(11))
    ahead.start(3, 50)
    vector = SeededGaussian(11).standard_normal(50, round_id=3)
    assert ahead.take(3, 50).tolist() == vector.tolist() == ahead.take(3, 50).tolist()
    others = [(11, 4), (12, 3), (113, 0)]
    assert all(SeededGaussian(s).standard_normal(50, round_id=t).tolist() != vector.tolist() for s, t in others)
    assert min(p_values(noise(SeededGaussian(11))).values()) > 1e-4  # seeded: the same value every time


def test_seeded_noise_without_a_round_is_refused():
    with pytest.raises(ValueError, match="give round_id"):
        SeededGaussian(1).standard_normal(3)

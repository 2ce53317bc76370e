"""Parameter servers with a privacy bug each: real ones, but for one function that is replaced before they serve.

Each is an entry of :class:`deploy.audit.server.Servers`, named ``planted_bugs:name``. The audit has to find them all.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from common.aggregation.step import condition_row
from common.aggregation.trimmed_mean import TrimmedMean
from common.config import Experiment
from common.noise import SecureGaussian
from ps.main import run_parameter_server
from ps.release import Mechanism

_INHERITED = np.random.default_rng()  # secret, of the best entropy, and the same in every process forked from this one
_product = SecureGaussian.standard_normal

Normals = npt.NDArray[np.float64]


def scaled_for_the_mean(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """σ from 2C/n, which is the mean's sensitivity, while the trimmed mean runs."""

    def sensitivity(_rule: TrimmedMean, *, num_clients: int, clip_norm: float) -> float:
        return 2.0 * clip_norm / num_clients

    TrimmedMean.sensitivity = sensitivity  # type: ignore[method-assign]
    return run_parameter_server(experiment, run_dir, **rest)


def momentum_factor_twice(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """The paper's factor 1 − β on σ, although the noise goes in before server momentum applies it."""
    factor = 1.0 - experiment.training.server_momentum
    return _serve(experiment, run_dir, rest, lambda d, _round_id: factor * _secure(d))


def noise_of_the_first_round(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Drawn once, and used in all rounds."""
    drawn: list[Normals] = []

    def draw(d: int, _round_id: int) -> Normals:
        drawn.extend([] if drawn else [_secure(d)])
        return drawn[0].copy()

    return _serve(experiment, run_dir, rest, draw)


def noise_of_the_round_before(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Drawn in every second round, the odd ones, and used in the next as well."""
    drawn: dict[int, Normals] = {}

    def draw(d: int, round_id: int) -> Normals:
        return drawn.setdefault((round_id + 1) // 2, _secure(d)).copy()

    return _serve(experiment, run_dir, rest, draw)


def ring_of_five(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Five vectors are drawn, and used in turn: no two rounds that are near each other share any."""
    drawn: dict[int, Normals] = {}
    return _serve(experiment, run_dir, rest, lambda d, round_id: drawn.setdefault(round_id % 5, _secure(d)).copy())


def shuffled(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Drawn once, and used in all rounds, in a new order each time and with new signs."""
    drawn: list[Normals] = []
    random = np.random.default_rng()

    def draw(d: int, _round_id: int) -> Normals:
        drawn.extend([] if drawn else [_secure(d)])
        return random.permutation(drawn[0]) * random.choice((-1.0, 1.0), d)

    return _serve(experiment, run_dir, rest, draw)


def tiles(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """A third of the normals are drawn, and repeated until the vector is full."""
    return _serve(experiment, run_dir, rest, lambda d, _round_id: np.resize(_secure(d // 3), d))


def bare_tail(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """The last thousandth of the coordinates gets no noise: a sampler of blocks that forgets the rest."""

    def draw(d: int, _round_id: int) -> Normals:
        normals = _secure(d)
        normals[d - d // 1000 :] = 0.0
        return normals

    return _serve(experiment, run_dir, rest, draw)


def cut_off(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """No value beyond two σ, and the rest widened to the variance claimed: δ is far larger."""

    def draw(d: int, _round_id: int) -> Normals:
        normals = _secure(2 * d)
        return normals[np.abs(normals) < 2.0][:d] / 0.8796

    return _serve(experiment, run_dir, rest, draw)


def one_draw_for_two_neighbours(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Each normal serves two coordinates that follow each other."""
    return _serve(experiment, run_dir, rest, lambda d, _round_id: np.repeat(_secure(d // 2), 2))


def one_block_for_two_halves(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Half of the normals are drawn, and used for both halves of the vector."""
    return _serve(experiment, run_dir, rest, lambda d, _round_id: np.tile(_secure(d // 2), 2))


def keyed_by_the_run(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """A secret key for each run, but every start of the server begins its stream anew."""
    key = sha256(b"".join(rest["token_hashes"].values())).digest()
    generator = np.random.default_rng(int.from_bytes(key, "little"))
    return _serve(experiment, run_dir, rest, lambda d, _round_id: generator.standard_normal(d))


def inherited_generator(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """A generator of the module, seeded when it was imported: before the server was forked."""
    return _serve(experiment, run_dir, rest, lambda d, _round_id: _INHERITED.standard_normal(d))


def no_projection(experiment: Experiment, run_dir: Path, **rest: Any) -> object:
    """Momenta are taken as they come, though finite."""

    def condition(mechanism: Mechanism, row: Tensor) -> bool:
        return condition_row(row, None, mechanism.grid)

    Mechanism.condition = condition  # type: ignore[method-assign]
    return run_parameter_server(experiment, run_dir, **rest)


def _secure(d: int) -> Normals:
    return _product(SecureGaussian(), d)


def _serve(experiment: Experiment, run_dir: Path, rest: dict[str, Any], draw: Callable[[int, int], Normals]) -> object:
    def standard_normal(_source: SecureGaussian, d: int, *, round_id: int | None = None) -> Normals:
        assert round_id is not None
        return draw(d, round_id)

    SecureGaussian.standard_normal = standard_normal  # type: ignore[method-assign]
    return run_parameter_server(experiment, run_dir, **rest)

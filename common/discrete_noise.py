"""Exact noise for small models: the discrete Gaussian, drawn by OpenDP without a floating-point number.

Integers with P(k) ∝ exp(-k² / 2s²), s = σ/g, times the grid g. There are no gaps, and no probability is rounded: the
law is exactly the one of the theorem. The price is some 30 µs a parameter, whatever σ is: for small d.

Formal guarantees
-----------------
Adding it to a function with values on the grid and L2 sensitivity S gives ρ-zCDP with ρ = S² / (2σ²) = 1 / (2z²): its
Rényi divergence of every order α is at most αρ, the Gaussian's own (Canonne, Kamath & Steinke 2020, Theorem 14). T
releases add up to Tρ. It is *not* a Gaussian mechanism: sums of discrete Gaussians are none, and nothing says that its
hypothesis tests are no easier than the Gaussian's. So what is claimed of it comes from the Rényi divergence alone
(``privacy.calibration = "renyi"``); the Gaussian's exact curve is refused with it.

Entropy. OpenDP asks OpenSSL's generator, which the operating system seeds, once per thread, and which seeds itself
anew when it finds the process id changed. That covers a fork, but not a child with its ancestor's process id (a fork
into a new PID namespace, or a number that came round again): there a draw is refused. It does not cover a snapshot of
the running process that is restored twice; :class:`common.noise.SecureGaussian` asks the system for every vector.

References
----------
Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy" (NeurIPS 2020; arXiv 2004.00010).
Bun, Steinke, "Concentrated differential privacy: simplifications, extensions, and lower bounds" (TCC 2016).
OpenDP, https://opendp.org, ``make_gaussian`` over integer vectors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib import metadata
from typing import NoReturn

import numpy as np

from common.errors import ConfigError, PrivacyError
from common.noise import Drawing, Vector, check_scale, this_process

__all__ = ["LARGEST_SCALE", "MOST_PARAMETERS", "DiscreteGaussian", "DiscreteNoise"]

MOST_PARAMETERS = 100_000
"""Some three seconds a round (benchmarks/results/noise.md)."""

LARGEST_SCALE = 2.0**45
"""Of σ/g: 2^53, up to which float64 holds every integer, is then 256 σ away."""

_OLDEST = (0, 16)
"""Earlier ones are biased (opendp/opendp, issue 2638: 0.14.1 is off by some per cent at s = 2), or were not tested."""

_drawn_in: dict[int, int] = {}
"""Forks behind each process id that has drawn, here and in the processes this one was forked from."""


class DiscreteGaussian:
    """The noise of one release, exactly on its grid: a :class:`common.noise.GridNoise`.

    Parameters
    ----------
    num_parameters
        d, at most :data:`MOST_PARAMETERS`.

    Raises
    ------
    PrivacyError
        OpenDP is not installed, or too old.
    ConfigError
        d is too large: every round would wait many seconds for its noise.

    Notes
    -----
    σ is the parameter of the law; for σ/g ≥ 1 it is the standard deviation too, to six digits and more, and below
    the standard deviation is smaller. The guarantee speaks of the parameter.
    """

    def __init__(self, num_parameters: int) -> None:
        if not 0 <= num_parameters <= MOST_PARAMETERS:
            raise ConfigError(
                f'privacy.noise = "discrete" with {num_parameters:,} parameters: it takes some 30 µs a parameter in '
                f'every round, so at most {MOST_PARAMETERS:,} are accepted; use a smaller model, or "gaussian"'
            )
        self._sampler = _sampler()
        self._d: int | None = num_parameters
        self.drawing: Drawing | None = None

    def on_grid(self, sigma: float, grid: float) -> Vector:
        """See :meth:`common.noise.GridNoise.on_grid`.

        Raises
        ------
        PrivacyError
            σ/g is too large for exact arithmetic; or this process has the id of one that it was forked from.
        """
        check_scale(sigma, grid)
        scale = sigma / grid
        if scale > LARGEST_SCALE or scale * grid != sigma:
            raise PrivacyError(
                f"sigma = {sigma!r} on a grid of {grid!r}: their ratio has no exact draw; expected at most 2^45, so "
                "use a smaller noise multiplier (a larger epsilon)"
            )
        d, self._d = self._d, None
        if d is None:
            raise RuntimeError("this noise was added to a release already: draw new noise for another")
        _refuse_repeated_process_id()
        began_at = time.monotonic()
        noise = np.array(self._sampler(scale, d), dtype=np.int64).astype(np.float64)
        noise *= grid
        self.drawing = Drawing(began_at, time.monotonic() - began_at)
        return noise

    def __reduce__(self) -> NoReturn:
        raise TypeError("the noise of a release is used once: it cannot be copied")


class DiscreteNoise:
    """A run's noise from :class:`DiscreteGaussian`: a :class:`common.noise.RoundNoise`.

    Nothing is drawn ahead: exact draws are made for one σ, and σ may follow what was released before.

    Parameters
    ----------
    num_parameters
        d. What cannot be drawn is refused here, before the first round.

    Raises
    ------
    PrivacyError, ConfigError
        See :class:`DiscreteGaussian`.
    """

    secret = True

    def __init__(self, num_parameters: int) -> None:
        DiscreteGaussian(num_parameters)

    def start(self, round_id: int, d: int) -> None:
        """Nothing."""

    def of_round(self, round_id: int, d: int) -> DiscreteGaussian:  # noqa: ARG002  (see RoundNoise)
        """New noise, whatever the round."""
        return DiscreteGaussian(d)


def _refuse_repeated_process_id() -> None:
    process_id, forks = this_process()
    if _drawn_in.setdefault(process_id, forks) != forks:
        raise PrivacyError(
            f"this process has id {process_id}, like one it was forked from that drew exact noise, so OpenSSL's "
            'generator would repeat that noise: start the parameter server anew, or use privacy.noise = "gaussian"'
        )


def _sampler() -> Callable[[float, int], list[int]]:
    """Exact integers of scale s, d of them.

    Raises
    ------
    PrivacyError
        OpenDP is missing, or too old.
    """
    try:
        version = metadata.version("opendp")
        from opendp.domains import atom_domain, vector_domain
        from opendp.measurements import make_gaussian
        from opendp.metrics import l2_distance
        from opendp.mod import enable_features
    except ImportError as missing:
        raise PrivacyError(
            'privacy.noise = "discrete" is drawn by OpenDP, which is not installed: pip install '
            "'byzuldp[exact-noise]', or use privacy.noise = \"gaussian\""
        ) from missing
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise PrivacyError(
            f"opendp {version} is installed, whose discrete Gaussian is biased or was not tested with this program: "
            "pip install 'byzuldp[exact-noise]', or use privacy.noise = \"gaussian\""
        )
    enable_features("contrib")  # OpenDP's word for what its own committee has not vetted to the end

    def sample(scale: float, d: int) -> list[int]:
        mechanism = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale)
        drawn: list[int] = mechanism([0] * d)
        return drawn

    return sample

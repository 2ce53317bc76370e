"""Gaussian noise that carries privacy: from the operating system's entropy, through a cryptographic generator.

Public randomness (:mod:`common.randomness`) is meant to be reproduced; this is meant never to be. Each vector comes
from ChaCha20 under 256 bits of ``os.urandom`` of its own, so there is no generator state that a fork, a copy or a
pickle could carry from one round, or one process, to another, and none from which earlier noise could be computed.

Floating point. The samples are the usual floating-point normals, and an observer of their raw bits could tell from the
gaps between them what they were added to (Mironov 2012). So noise reaches a release as multiples of a public grid
(:class:`GridNoise`), beside values that are multiples of it themselves: then the sum has no bits of its own.

- :class:`RoundedGaussian` rounds normals to the grid. Every multiple near zero is reached, and stands for 2^50 g/σ or
  more of the sampler's values (2^28 at z = 1). That defends against reading a value off its low bits. It is no proof:
  each probability is right to that share only, and no draw is beyond 13.7 σ.
- :class:`common.discrete_noise.DiscreteGaussian` draws from exactly the law that its guarantee speaks of.

Neither hides how long a draw took, nor defends against whoever reads the memory of this process.

References
----------
Bernstein, "ChaCha, a variant of Salsa20" (2008).
Mironov, "On significance of the least significant bits for differential privacy" (CCS 2012).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from randomgen import ChaCha

from common.randomness import stream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KEY_BITS",
    "Drawing",
    "DrawnAhead",
    "GridNoise",
    "NoiseAhead",
    "NoiseSource",
    "RoundNoise",
    "RoundedGaussian",
    "SecureGaussian",
    "SeededGaussian",
    "check_scale",
    "this_process",
]

KEY_BITS = 256
BLOCK = 1 << 15
"""Elements that are scaled and rounded at a time."""

Vector = npt.NDArray[np.float64]

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def this_process() -> tuple[int, int]:
    """Process id, forks behind it. An id alone may be used again by a grandchild; forks made in C are not counted."""
    return os.getpid(), _forks


class Drawing(NamedTuple):
    """When noise was drawn: :func:`time.monotonic` when that began, and how many seconds it took."""

    began_at: float
    seconds: float


class GridNoise(Protocol):
    """The noise of one release, ``(d,)``; how much is said when it is added."""

    @property
    def drawing(self) -> Drawing | None:
        """When it was drawn, for the operator's record; None as long as it has not been, or if nobody looked."""

    def on_grid(self, sigma: float, grid: float) -> Vector | Tensor:
        """``(d,)`` float64, owned by the caller: independent multiples of ``grid`` of standard deviation ``sigma``.

        A tensor where the noise is on a device already.

        Once: a second call is refused, for the difference of two releases with one noise has none.

        Parameters
        ----------
        sigma
            σ, positive and finite.
        grid
            g, a power of two.

        Raises
        ------
        ValueError
            ``sigma`` or ``grid`` is out of range.
        RuntimeError
            The noise was given out before.
        """


class RoundNoise(Protocol):
    """Where a run's noise comes from, round by round."""

    @property
    def secret(self) -> bool:
        """Whether the noise may carry a privacy guarantee."""

    def start(self, round_id: int, d: int) -> None:
        """The round has opened: begin what can be done ahead."""

    def of_round(self, round_id: int, d: int) -> GridNoise:
        """The noise of the round's release, ``(d,)``, never given before."""


class RoundedGaussian:
    """Normals, scaled and rounded to the nearest multiple of the grid (halves to even).

    Parameters
    ----------
    draw
        ``(d,)`` float64, standard normal, fresh, and no longer the caller's: it becomes the noise.
    drawing
        When it was drawn.

    Raises
    ------
    ValueError
        The draw is not a float64 vector: float32 has too few bits to reach every multiple.

    Formal guarantees
    -----------------
    A Gaussian mechanism on a function with values on the grid, then rounding, which is post-processing: with exact
    normals, T releases of multiplier z = σ / S are μ-GDP with μ = √T / z.

    References
    ----------
    Dong, Roth, Su, "Gaussian differential privacy" (JRSS-B 2022), Theorem 2.7 and Corollary 3.3.
    """

    def __init__(self, draw: Vector, drawing: Drawing | None = None) -> None:
        if draw.dtype != np.float64 or draw.ndim != 1:
            raise ValueError(f"draw: {draw.dtype} of shape {draw.shape}, expected a float64 vector (d,)")
        self._draw: Vector | None = draw
        self.drawing = drawing

    def on_grid(self, sigma: float, grid: float) -> Vector:
        """See :meth:`GridNoise.on_grid`."""
        check_scale(sigma, grid)
        draw, self._draw = self._draw, None
        if draw is None:
            raise RuntimeError("this noise was added to a release already: draw new noise for another")
        for start in range(0, draw.size, BLOCK):  # in the cache, not through memory four times
            part = draw[start : start + BLOCK]
            part *= sigma
            part /= grid
            np.rint(part, out=part)
            part *= grid
        return draw

    def __reduce__(self) -> NoReturn:
        raise TypeError("the noise of a release is used once: it cannot be copied")


def check_scale(sigma: float, grid: float) -> None:
    """Refuse a σ or a grid that :meth:`GridNoise.on_grid` is not defined for.

    Raises
    ------
    ValueError
        ``sigma`` is not positive and finite, or ``grid`` not a power of two.
    """
    if not 0.0 < sigma < math.inf:
        raise ValueError(f"sigma = {sigma!r}: expected a positive finite number")
    if not 0.0 < grid < math.inf or math.frexp(grid)[0] != 0.5:
        raise ValueError(f"grid = {grid!r}: expected a power of two")


class NoiseSource(Protocol):
    """Where standard normal vectors come from."""

    @property
    def secret(self) -> bool:
        """Whether the draws may carry a privacy guarantee."""

    def standard_normal(self, d: int, *, round_id: int | None = None) -> Vector:
        """``(d,)`` float64, independent N(0, 1)."""


class SecureGaussian:
    """Standard normals nobody can predict or repeat.

    Notes
    -----
    Every call keys a new generator with 256 bits of the operating system's entropy. ``ChaCha(seed=…)`` is never used:
    it stretches a seed from a 128-bit pool, by a hash that is not cryptographic. A key costs some 20 µs, a vector
    of a million normals some 30 ms.
    """

    secret = True

    def standard_normal(self, d: int, *, round_id: int | None = None) -> Vector:  # noqa: ARG002  (see NoiseSource)
        """``(d,)`` float64, independent N(0, 1); never the same twice, whatever the round.

        Raises
        ------
        ValueError
            ``d`` is negative.
        """
        key = np.frombuffer(os.urandom(KEY_BITS // 8), dtype=np.uint64)
        return np.random.Generator(ChaCha(key=key, rounds=20)).standard_normal(d)

    def __reduce__(self) -> NoReturn:
        raise TypeError("secret noise is drawn in the process that uses it: create a SecureGaussian there")


@dataclass(frozen=True)
class SeededGaussian:
    """Standard normals anyone who knows the seed can repeat: for research; a run that uses it is *not private*.

    The vector of a round is a function of (seed, round) alone, so a resumed run continues the same trajectory.
    """

    seed: int
    purpose: str = "noise"
    secret: bool = field(default=False, init=False)

    def standard_normal(self, d: int, *, round_id: int | None = None) -> Vector:
        """``(d,)`` float64, the same for the same seed, round and ``d``.

        Raises
        ------
        ValueError
            No round is given (all rounds would get the same noise), or ``d`` is negative.
        """
        if round_id is None:
            raise ValueError("seeded noise is keyed by the round: give round_id")
        return stream(self.seed, self.purpose, round_id=round_id).standard_normal(d)


V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class _Draw(Generic[V]):
    round_id: int
    d: int
    process: tuple[int, int]
    result: Future[tuple[V, Drawing]]


class DrawnAhead(Generic[V]):
    """Draws a round's noise on a background thread while the clients compute, so that it costs the round nothing.

    A vector is handed out once and forgotten. One that was drawn for another round, for another size, or before a
    fork is thrown away: it was never released, so nothing is lost.

    Parameters
    ----------
    source
        Where the normals come from.
    placed
        Puts a fresh draw where it will be used, still in the background.
    """

    def __init__(self, source: NoiseSource, placed: Callable[[Vector], V]) -> None:
        self.source, self._placed = source, placed
        # At most one draw. A deque needs no lock of ours (popping is atomic), so no fork can leave one held.
        self._drawn: deque[_Draw[V]] = deque(maxlen=1)

    @property
    def secret(self) -> bool:
        """Whether the source's draws may carry a privacy guarantee."""
        return self.source.secret

    def start(self, round_id: int, d: int) -> None:
        """Begin drawing ``(d,)`` for ``round_id``, unless that is under way; a draw for another round is dropped."""
        for waiting in tuple(self._drawn):
            if (waiting.round_id, waiting.d, waiting.process) == (round_id, d, this_process()):
                return
        draw = _Draw[V](round_id, d, this_process(), Future())
        self._drawn.append(draw)
        threading.Thread(target=self._draw, args=(draw,), name=f"noise-{round_id}", daemon=True).start()

    def take(self, round_id: int, d: int) -> V:
        """The normals of ``round_id``, ``(d,)`` float64, owned by the caller.

        Waits for a draw that is under way; draws now if none was started.
        """
        return self.taken(round_id, d)[0]

    def taken(self, round_id: int, d: int) -> tuple[V, Drawing]:
        """As :meth:`take`, with when they were drawn."""
        try:
            draw = self._drawn.popleft()
        except IndexError:
            return self._draw_now(round_id, d)
        if (draw.round_id, draw.d, draw.process) != (round_id, d, this_process()):
            return self._draw_now(round_id, d)
        return draw.result.result()

    def _draw_now(self, round_id: int, d: int) -> tuple[V, Drawing]:
        began_at = time.monotonic()
        vector = self.source.standard_normal(d, round_id=round_id)
        drawing = Drawing(began_at, time.monotonic() - began_at)
        return self._placed(vector), drawing

    def _draw(self, draw: _Draw[V]) -> None:
        try:
            draw.result.set_result(self._draw_now(draw.round_id, draw.d))
        except BaseException as problem:  # belongs to whoever takes the draw
            draw.result.set_exception(problem)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("noise drawn ahead belongs to one process and is used once: it cannot be copied")


class NoiseAhead(DrawnAhead[Vector]):
    """:class:`DrawnAhead` in the host's memory."""

    def __init__(self, source: NoiseSource) -> None:
        super().__init__(source, lambda draw: draw)

    def of_round(self, round_id: int, d: int) -> RoundedGaussian:
        """The noise of ``round_id`` as a release takes it: to be rounded to the release's grid."""
        return RoundedGaussian(*self.taken(round_id, d))

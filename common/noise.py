"""Gaussian noise that carries privacy: from the operating system's entropy, through a cryptographic generator.

Public randomness (:mod:`common.randomness`) is meant to be reproduced; this is meant never to be. Each vector comes
from ChaCha20 under 256 bits of ``os.urandom`` of its own, so there is no generator state that a fork, a copy or a
pickle could carry from one round, or one process, to another, and none from which earlier noise could be computed.

What this does not give: the samples are the usual floating-point normals, whose gaps an observer of the raw bits could
exploit (Mironov 2012); the mechanism that adds them must round to a public grid.

References
----------
Bernstein, "ChaCha, a variant of Salsa20" (2008).
Mironov, "On significance of the least significant bits for differential privacy" (CCS 2012).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from randomgen import ChaCha

from common.randomness import stream

__all__ = ["KEY_BITS", "NoiseAhead", "NoiseSource", "SecureGaussian", "SeededGaussian"]

KEY_BITS = 256

Vector = npt.NDArray[np.float64]

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """This process. A process id alone may be used again by a grandchild; forks made in C are not counted."""
    return os.getpid(), _forks


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


@dataclass(frozen=True, eq=False)
class _Draw:
    round_id: int
    d: int
    process: tuple[int, int]
    vector: Future[Vector]


class NoiseAhead:
    """Draws a round's noise on a background thread while the clients compute, so that it costs the round nothing.

    A vector is handed out once and forgotten. One that was drawn for another round, for another size, or before a
    fork is thrown away: it was never released, so nothing is lost.
    """

    def __init__(self, source: NoiseSource) -> None:
        self.source = source
        # At most one draw. A deque needs no lock of ours (popping is atomic), so no fork can leave one held.
        self._drawn: deque[_Draw] = deque(maxlen=1)

    @property
    def secret(self) -> bool:
        """Whether the source's draws may carry a privacy guarantee."""
        return self.source.secret

    def start(self, round_id: int, d: int) -> None:
        """Begin drawing ``(d,)`` for ``round_id``, unless that is under way; a draw for another round is dropped."""
        for waiting in tuple(self._drawn):
            if (waiting.round_id, waiting.d, waiting.process) == (round_id, d, _process()):
                return
        draw = _Draw(round_id, d, _process(), Future())
        self._drawn.append(draw)
        threading.Thread(target=self._draw, args=(draw,), name=f"noise-{round_id}", daemon=True).start()

    def take(self, round_id: int, d: int) -> Vector:
        """The noise of ``round_id``, ``(d,)`` float64, owned by the caller.

        Waits for a draw that is under way; draws now if none was started.
        """
        try:
            draw = self._drawn.popleft()
        except IndexError:
            return self.source.standard_normal(d, round_id=round_id)
        if (draw.round_id, draw.d, draw.process) != (round_id, d, _process()):
            return self.source.standard_normal(d, round_id=round_id)
        return draw.vector.result()

    def _draw(self, draw: _Draw) -> None:
        try:
            draw.vector.set_result(self.source.standard_normal(draw.d, round_id=draw.round_id))
        except BaseException as problem:  # belongs to whoever takes the draw
            draw.vector.set_exception(problem)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("noise drawn ahead belongs to one process and is used once: it cannot be copied")

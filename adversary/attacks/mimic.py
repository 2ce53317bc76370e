"""Mimic: copy one honest client, so that its data counts many times."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Collusion, Setting
from common.errors import AttackError
from common.randomness import stream

__all__ = ["Mimic"]


class Mimic(Collusion):
    """The momentum of one honest client, the one furthest along the direction in which honest momenta vary most.

    Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing". In the first
    ``warmup`` rounds the direction z is learnt by a power iteration on the honest covariance, with a running mean μ,
    and the client is chosen anew, i* = argmax ⟨m_i, z⟩; from then on i* stays. In round t of the warm-up::

        μ = (t μ + mean) / (t + 1)
        u = Σ ⟨m_i - μ, z⟩ (m_i - μ), normalised        (u = z when all are equal)
        z = u in the first round, else (t z + u) / (t + 1), normalised

    Parameters
    ----------
    setting
        For the seed of the first direction.
    warmup
        Rounds of learning, at least 1.
    argmax
        False takes the client furthest in the opposite direction.
    target
        Copy this row of the estimate from the start, and learn nothing.

    Attributes
    ----------
    rounds, mean, direction, chosen
        The state: rounds seen, μ, z and i*.

    Notes
    -----
    Rows are taken to be the same clients in every round. If later rounds have fewer, the last row stands in for i*.
    """

    name = "mimic"

    def __init__(self, setting: Setting, *, warmup: int = 1, argmax: bool = True, target: int | None = None) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise AttackError(f"mimic: warmup = {warmup!r}: expected an integer of at least 1")
        if not isinstance(argmax, bool):
            raise AttackError(f"mimic: argmax = {argmax!r}: expected true or false")
        if target is not None and (isinstance(target, bool) or not isinstance(target, int) or target < 0):
            raise AttackError(f"mimic: target = {target!r}: expected the number of a row, from 0")
        self._seed, self._warmup, self._argmax, self._target = setting.seed, warmup, argmax, target
        self.rounds = 0
        self.mean: Tensor | None = None
        self.direction: Tensor | None = None
        self.chosen = 0

    def vector(self, honest: Tensor) -> Tensor:
        if self._target is not None:
            if self._target >= honest.shape[0]:
                raise AttackError(f"mimic: target = {self._target}: the estimate has only {honest.shape[0]} rows")
            return honest[self._target]
        if self.rounds < self._warmup:
            along = honest @ self._learn(honest)
            self.chosen = int(along.argmax() if self._argmax else along.argmin())
        self.rounds += 1
        return honest[min(self.chosen, honest.shape[0] - 1)]

    def _learn(self, honest: Tensor) -> Tensor:
        """One more round of the power iteration: the new direction."""
        t, mean = self.rounds, honest.mean(dim=0)
        if self.mean is None or self.direction is None:
            start = stream(self._seed, "attack/mimic").standard_normal(honest.shape[1])
            self.mean = mean
            self.direction = _power_step(honest - mean, torch.from_numpy(start).to(honest))
            return self.direction
        self.mean = (t * self.mean + mean) / (t + 1)
        step = _power_step(honest - self.mean, self.direction)
        self.direction = torch.nn.functional.normalize((t * self.direction + step) / (t + 1), dim=0)
        return self.direction


def _power_step(centred: Tensor, direction: Tensor) -> Tensor:
    """Xᵀ X z normalised, or z where that is zero."""
    step = centred.T @ (centred @ direction)
    norm = torch.linalg.vector_norm(step)
    return step / norm if norm > 0 else direction

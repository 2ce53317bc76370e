"""Mimic: copy one honest client, so that its data counts many times."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Collusion, Setting, Sight
from adversary.attacks.parameters import count, flag
from common.errors import AttackError
from common.randomness import stream

__all__ = ["Mimic"]


class Mimic(Collusion):
    """A copy of one honest momentum: that furthest along the direction in which they vary most.

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
    What is sent is an honest momentum, so no rule can leave it out rightly; harm comes from heterogeneous data alone.
    """

    name = "mimic"
    source = "Karimireddy et al. 2022"

    def __init__(self, setting: Setting, *, warmup: int = 1, argmax: bool = True, target: int | None = None) -> None:
        count(self.name, "warmup", warmup, least=1)
        flag(self.name, "argmax", argmax)
        if target is not None:
            count(self.name, "target", target, least=0)
        self._seed, self._warmup, self._argmax, self._target = setting.seed, warmup, argmax, target
        self.rounds = 0
        self._round = -1
        self.mean: Tensor | None = None
        self.direction: Tensor | None = None
        self.chosen = 0

    def vector(self, sight: Sight) -> Tensor:
        honest = sight.honest
        if self._target is not None:
            if self._target >= honest.shape[0]:
                raise AttackError(f"mimic: target = {self._target}: the estimate has only {honest.shape[0]} rows")
            return honest[self._target]
        if sight.round_id > self._round:
            if self.rounds < self._warmup:
                along = honest @ self._learn(honest)
                self.chosen = int(along.argmax() if self._argmax else along.argmin())
            self.rounds, self._round = self.rounds + 1, sight.round_id
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

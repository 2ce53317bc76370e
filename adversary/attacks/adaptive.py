"""Adaptive: a small, constant pull against what training has achieved, invisible in a round and summed by momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from adversary.attacks.parameters import length, number
from common.errors import AttackError

__all__ = ["Adaptive"]


class Adaptive(Attack):
    """A steady pull against the direction in which the published models have moved.

    Made for server momentum and DP noise, and of this project. The steps of the published models, θ_{t-1} - θ_t, are
    the server's momentum: what all clients agree on, plus noise. Their weighted sum S = a_t - θ_t, where

        a_0 = θ_0        a_t = ρ a_{t-1} + (1 - ρ) θ_{t-1}

    grows with the agreement in proportion to time, and with noise only to its root, so it is a better estimate of the
    descent direction than any one release. What is sent is -c S/‖S‖, the same for all adversaries. A round's share of
    it, c k/n, is far below the noise of a round; but it hardly changes from round to round, so momentum passes it whole
    while it averages noise away by √((1 - β)/(1 + β)).

    Parameters
    ----------
    setting
        For the clip norm.
    memory
        ρ, in [0, 1]: 1 pulls back to where training began, which is steady whatever the attack itself does; 0 opposes
        the last step, 1 - 1/H about the last H. Below 1 the attack sees its own success as descent, and lets go.
    norm
        c; default the clip norm, which every honest momentum stays within.

    Raises
    ------
    AttackError
        ``memory`` is outside [0, 1], or no norm is given, and there is no clip norm.

    Notes
    -----
    Knows only published models: no estimate, whatever ``attack.knowledge`` says, so it keeps the premise of the privacy
    guarantee. In the round in which it first sees a model, and while models do not move, it behaves.
    """

    name = "adaptive"
    needs = "published models"
    source = "this project"

    def __init__(self, setting: Setting, *, memory: float = 1.0, norm: float | None = None) -> None:
        self._memory = number(self.name, "memory", memory)
        if not 0.0 <= self._memory <= 1.0:
            raise AttackError(f"adaptive: memory = {memory!r}: expected a number from 0 to 1")
        self._norm = length(self.name, "norm", norm, setting)
        self._round = -1
        self._anchor: Tensor | None = None
        self._last: Tensor | None = None

    def __call__(self, sight: Sight) -> Tensor:
        self._remember(sight)
        assert self._anchor is not None  # noqa: S101 - remembered
        moved = (self._anchor - sight.theta).to(torch.float64)
        norm = float(torch.linalg.vector_norm(moved))
        if norm == 0.0:
            return sight.own.clone()
        return moved.mul_(-self._norm / norm).to(torch.float32).expand(sight.own.shape[0], -1).clone()

    def _remember(self, sight: Sight) -> None:
        if sight.round_id <= self._round:
            return
        if self._anchor is None or self._last is None:
            self._anchor = sight.theta.clone()
        else:
            self._anchor.lerp_(self._last, 1.0 - self._memory)
        self._round, self._last = sight.round_id, sight.theta.clone()

"""Gaussian noise in place of a momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from adversary.attacks.parameters import flag, non_negative, number
from common.randomness import stream

__all__ = ["Gaussian"]


class Gaussian(Attack):
    """Independent normal coordinates, N(mean, std²).

    Xie et al. 2018, "Generalized Byzantine-tolerant SGD". Fed-NGA has a standard deviation of 9, the ByzFL library 1.

    Parameters
    ----------
    setting
        For the seed: round t draws from the stream (seed, "attack/gaussian", t).
    mean, std
        Of a coordinate.
    shared
        One draw for all adversaries, which adds up; otherwise a draw for each.

    Notes
    -----
    Directions are random and new in each round, so momentum averages them out. It breaks a mean if the server does not
    clip, since √d is large; and nothing else.
    """

    name = "gaussian"
    source = "Xie et al. 2018"

    def __init__(self, setting: Setting, *, mean: float = 0.0, std: float = 1.0, shared: bool = False) -> None:
        self._seed = setting.seed
        self._mean, self._std = number(self.name, "mean", mean), non_negative(self.name, "std", std)
        self._shared = flag(self.name, "shared", shared)

    def __call__(self, sight: Sight) -> Tensor:
        k, d = sight.own.shape
        random = stream(self._seed, "attack/gaussian", round_id=sight.round_id)
        drawn = random.standard_normal((1 if self._shared else k, d), dtype="float32")
        return torch.from_numpy(drawn).mul_(self._std).add_(self._mean).expand(k, -1).clone()

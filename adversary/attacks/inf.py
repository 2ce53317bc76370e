"""Infinity in every coordinate: does the server survive?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from adversary.attacks.parameters import flag

__all__ = ["Infinity"]


class Infinity(Attack):
    """Infinity in every coordinate.

    The ByzFL library. This parameter server takes a row with a non-finite entry for the zero momentum, before any rule
    sees it, so that here the attack is no worse than :class:`~adversary.attacks.zero.Zero`.

    Parameters
    ----------
    negative
        -∞ instead.
    """

    name = "inf"
    source = "ByzFL library"

    def __init__(self, setting: Setting, *, negative: bool = False) -> None:  # noqa: ARG002 - the interface
        self._value = -math.inf if flag(self.name, "negative", negative) else math.inf

    def __call__(self, sight: Sight) -> Tensor:
        return torch.full_like(sight.own, self._value)

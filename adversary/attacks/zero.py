"""Nothing, in time: the zero vector."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight

__all__ = ["Zero"]


class Zero(Attack):
    """The zero vector.

    What an absent client counts as under DP, and a non-finite row always: the least an adversary can do while it
    answers in time. It shortens a mean by k/n, and can be nearest to all others when honest momenta disagree.
    """

    name = "zero"
    source = "folklore"

    def __init__(self, setting: Setting) -> None:
        pass

    def __call__(self, sight: Sight) -> Tensor:
        return torch.zeros_like(sight.own)

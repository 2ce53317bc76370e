"""No attack: the adversaries behave."""

from __future__ import annotations

from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight

__all__ = ["NoAttack"]


class NoAttack(Attack):
    """Each sends its own momentum, honestly computed."""

    name = "none"
    needs = "its own data"

    def __init__(self, setting: Setting) -> None:
        pass

    def __call__(self, sight: Sight) -> Tensor:
        return sight.own

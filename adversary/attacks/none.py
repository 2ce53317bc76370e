"""No attack: the adversaries behave."""

from __future__ import annotations

from torch import Tensor

from adversary.attacks.attack import Setting

__all__ = ["NoAttack"]


class NoAttack:
    """Each sends its own momentum, honestly computed."""

    name = "none"
    needs_estimate = False

    def __init__(self, setting: Setting) -> None:
        pass

    def __call__(self, honest: Tensor, own: Tensor, round_id: int) -> Tensor:  # noqa: ARG002 - the interface
        return own

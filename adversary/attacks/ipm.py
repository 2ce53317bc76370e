"""Inner-product manipulation: turn the aggregate against the gradient with as little as it takes."""

from __future__ import annotations

from torch import Tensor

from adversary.attacks.attack import Collusion, Setting
from common.errors import AttackError
from common.parameters import finite_number

__all__ = ["InnerProductManipulation"]


class InnerProductManipulation(Collusion):
    """-ε μ, with μ the mean of the honest momenta (Xie et al. 2019, "Fall of Empires").

    Parameters
    ----------
    epsilon
        ε. A small one (0.1, as Karimireddy et al. 2022 use) hides among short vectors; 2 and more shouts down a mean.
    """

    name = "ipm"

    def __init__(self, setting: Setting, *, epsilon: float = 0.1) -> None:  # noqa: ARG002 - the interface
        self.epsilon = finite_number(self.name, "epsilon", epsilon, error=AttackError)

    def vector(self, honest: Tensor) -> Tensor:
        return honest.mean(dim=0).mul_(-self.epsilon)

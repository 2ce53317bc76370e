"""Inner-product manipulation: turn the aggregate against the gradient with as little as it takes."""

from __future__ import annotations

from torch import Tensor

from adversary.attacks.attack import Collusion, Setting, Sight
from adversary.attacks.parameters import factor
from adversary.attacks.search import FactorSearch, chosen

__all__ = ["InnerProductManipulation"]

USUAL_EPSILON = 0.1


class InnerProductManipulation(Collusion):
    """The honest mean, reversed and scaled: -ε μ ("fall of empires").

    Xie et al. 2019, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation".

    Parameters
    ----------
    setting
        The rule, to search for ε.
    epsilon
        ε: a number, or "optimised", the ε of at least 0 that moves the aggregate furthest, by
        :class:`~adversary.attacks.search.FactorSearch`. A small one (0.1, as Karimireddy et al. 2022 and, against
        selection rules, Fed-NGA use) hides among short vectors; 2 and more (the ByzFL library's) shouts down a mean.

    Notes
    -----
    A mean over n of which k send this still points the right way while ε < (n - k)/k: 4 for 4 of 20. The small ε works
    against rules that pick few vectors, when honest ones lie far from each other.
    """

    name = "ipm"
    source = "Xie et al. 2019"

    def __init__(self, setting: Setting, *, epsilon: float | str = USUAL_EPSILON) -> None:
        self.epsilon = factor(self.name, "epsilon", epsilon)
        self._search = None if self.epsilon is not None else FactorSearch(setting, self.name, usual=USUAL_EPSILON)

    def vector(self, sight: Sight) -> Tensor:
        mean = sight.honest.mean(dim=0)
        return chosen(self.epsilon, self._search, sight, lambda epsilon: mean.mul(-epsilon))

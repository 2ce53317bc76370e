"""ALIE, "a little is enough": stay inside the honest spread, where no rule can tell."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

from adversary.attacks.attack import Collusion, Setting, Sight
from adversary.attacks.parameters import factor, flag
from adversary.attacks.search import FactorSearch, chosen
from common.errors import AttackError

__all__ = ["ALittleIsEnough", "closed_form_z"]

USUAL_Z = 1.5


class ALittleIsEnough(Collusion):
    """The honest mean, moved by z standard deviations in every coordinate: μ - z s.

    Baruch et al. 2019, "A Little Is Enough: Circumventing Defenses for Distributed Learning". s is the sample standard
    deviation of the honest momenta.

    Parameters
    ----------
    setting
        n, and k in the place of f, for the closed form; the rule, to search for z.
    z
        How many standard deviations: default :func:`closed_form_z`; a number (the ByzFL library has 1.5, Fed-NGA's
        "LIE" 0.7, both with ``add``; a negative one is as if added); or "optimised", the z of at least 0 that moves
        the aggregate furthest, by :class:`~adversary.attacks.search.FactorSearch`.
    add
        μ + z s instead.

    Notes
    -----
    With few adversaries the closed form is small and the attack weak: 0.16 for 4 of 20. At z = 0 it sends the mean,
    and so it does whenever the estimate is a single momentum, which has no spread. The searched z is large where a
    rule can be dragged without limit (a mean), and about where the rule starts to leave the vector out elsewhere.
    """

    name = "alie"
    source = "Baruch et al. 2019"

    def __init__(self, setting: Setting, *, z: float | str | None = None, add: bool = False) -> None:
        if z is None:
            z = closed_form_z(setting.num_clients, setting.num_adversaries)
        self.z = factor(self.name, "z", z)
        self._sign = 1.0 if flag(self.name, "add", add) else -1.0
        self._search = None if self.z is not None else FactorSearch(setting, self.name, usual=USUAL_Z)

    def vector(self, sight: Sight) -> Tensor:
        mean = sight.honest.mean(dim=0)
        if sight.honest.shape[0] == 1:
            return mean
        spread = sight.honest.std(dim=0, correction=1)

        def with_z(z: float) -> Tensor:
            return mean.add(spread, alpha=self._sign * z)

        return chosen(self.z, self._search, sight, with_z)


def closed_form_z(num_clients: int, num_byzantine: int) -> float:
    """z = Φ⁻¹((n - f - s)/(n - f)) with s = ⌊n/2 + 1⌋ - f, the honest votes a majority lacks; at least 0.

    Raises
    ------
    AttackError
        The argument is not inside (0, 1).
    """
    n, f = num_clients, num_byzantine
    lacking = n // 2 + 1 - f
    if f >= n or not 0 < (n - f - lacking) / (n - f) < 1:
        raise AttackError(f"alie has no closed-form z for {f} adversaries among {n} clients: set attack.z")
    return max(0.0, NormalDist().inv_cdf((n - f - lacking) / (n - f)))

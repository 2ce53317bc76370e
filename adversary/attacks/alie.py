"""ALIE, "a little is enough": stay inside the honest spread, where no rule can tell."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

from adversary.attacks.attack import Collusion, Setting
from common.errors import AttackError
from common.parameters import finite_number

__all__ = ["ALittleIsEnough", "closed_form_z"]


class ALittleIsEnough(Collusion):
    """μ - z s, with μ and s the coordinate-wise mean and sample standard deviation of the honest momenta.

    Baruch et al. 2019, "A Little Is Enough". A negative z gives the variant that adds.

    Parameters
    ----------
    setting
        n, and k in the place of f, for the closed form.
    z
        How many standard deviations; default :func:`closed_form_z`.

    Notes
    -----
    With few adversaries the closed form is small and the attack weak: 0.16 for 4 of 20. At z = 0 it sends the mean,
    and so it does whenever the estimate is a single momentum, which has no spread.
    """

    name = "alie"

    def __init__(self, setting: Setting, *, z: float | None = None) -> None:
        if z is None:
            self.z = closed_form_z(setting.num_clients, setting.num_adversaries)
        else:
            self.z = finite_number(self.name, "z", z, error=AttackError)

    def vector(self, honest: Tensor) -> Tensor:
        mean = honest.mean(dim=0)
        if honest.shape[0] == 1:
            return mean
        return mean.sub_(honest.std(dim=0, correction=1), alpha=self.z)


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

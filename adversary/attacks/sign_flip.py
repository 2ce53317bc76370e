"""Sign flip: the honest sum, reversed and scaled up."""

from __future__ import annotations

from torch import Tensor

from adversary.attacks.attack import Collusion, Setting, Sight
from adversary.attacks.parameters import choice, number

__all__ = ["SignFlip"]


class SignFlip(Collusion):
    """The sum of the honest momenta, reversed and scaled: -3 Σ m_i; or their mean.

    Zuo et al. 2025, "Fed-NGA" (the sum, and 3). The ByzFL library's sign flip is ``of = "mean"`` with ``scale = 1``.

    Parameters
    ----------
    setting
        For the number n - k of honest clients: an estimate with fewer rows stands for all, so that the sum is n - k
        times the mean of the estimate.
    scale
        3 by default. A negative one does not reverse.
    of
        "sum" or "mean".

    Notes
    -----
    It outweighs any mean at once; clipping, normalising or trimming leaves a reversed vector of ordinary length. In
    Fed-NGA's tables "fall of empires" is this very vector for the mean, MCA, centered clipping and Fed-NGA.
    """

    name = "sign_flip"
    source = "Fed-NGA, NeurIPS 2025"

    def __init__(self, setting: Setting, *, scale: float = 3.0, of: str = "sum") -> None:
        honest = setting.num_clients - setting.num_adversaries
        scale = number(self.name, "scale", scale)
        self._factor = -scale * (honest if choice(self.name, "of", of, ("sum", "mean")) == "sum" else 1)

    def vector(self, sight: Sight) -> Tensor:
        return sight.honest.mean(dim=0).mul_(self._factor)

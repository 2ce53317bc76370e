"""The coordinate-wise median."""

from __future__ import annotations

import torch
from torch import Tensor

from common.aggregation.rule import SumRule
from common.aggregation.trimmed_mean import TrimmedMean

__all__ = ["Median"]


class Median(SumRule):
    """In each coordinate the middle of n values; for even n the midpoint of the middle two.

    Yin et al. 2018, "Byzantine-Robust Distributed Learning". It is the trimmed mean with everything trimmed that can
    be, ⌊(n - 1)/2⌋ at each end, and computed as that. NaN counts as +inf.

    Sensitivity
        That of this trimmed mean: 2C for odd n, C for even n. It does not fall with n. Attained. (The lower median,
        which some libraries return, has 2C for even n too.)
    Robustness
        (f, κ)-robust with κ = 4 (1 + f/(n - 2f))² (Allouah et al. 2023, "Fixing by Mixing").
    Complexity
        As :class:`~common.aggregation.trimmed_mean.TrimmedMean`.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    n = 2f + 1                     the trimmed mean
    f = 0                          still the median
    ties, all equal                equal values are interchangeable
    ±inf, NaN or 1e30, ≤ f rows    at the ends, where nothing is read
    the same in half of the rows   the coordinate may be ±inf, or NaN between both signs
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "median"

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        super().prepare(n, d, device)
        _as_trimmed_mean(n).prepare(n, d, device)

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        return self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm)

    def kappa(self, num_clients: int) -> float:
        self.require(num_clients)
        return 4.0 * (1.0 + self.num_byzantine / (num_clients - 2 * self.num_byzantine)) ** 2

    def divisor(self, num_clients: int) -> int:
        return 2 - num_clients % 2

    def sum_of_kept(self, x: Tensor) -> Tensor:
        return _as_trimmed_mean(x.shape[0]).sum_of_kept(x)


def _as_trimmed_mean(num_clients: int) -> TrimmedMean:
    return TrimmedMean(num_byzantine=(num_clients - 1) // 2)

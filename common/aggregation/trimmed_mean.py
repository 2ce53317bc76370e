"""The coordinate-wise trimmed mean (CWTM), the rule of ByzULDP."""

from __future__ import annotations

import torch
from torch import Tensor

from common.aggregation.kernels import trimmed
from common.aggregation.rule import RoundContext, SumRule

__all__ = ["TrimmedMean"]


class TrimmedMean(SumRule):
    """In each coordinate, drop the f smallest and the f largest of n values and average the n - 2f others.

    Yin et al. 2018, "Byzantine-Robust Distributed Learning"; Algorithm 1 of ByzULDP. NaN counts as +inf.

    Sensitivity
        2C/(n - 2f), in any dimension, whatever the other rows are. Fix them in one coordinate: the kept sum is a
        constant plus the inserted value clamped between two of them, so it moves by no more than the value does;
        adding up squares gives ‖ΔΣ‖ ≤ ‖x - x'‖ ≤ 2C. Attained.
    Robustness
        (f, κ)-robust with κ = 6 f/(n - 2f) · (1 + f/(n - 2f)) (Allouah et al. 2023, "Fixing by Mixing").
    Complexity
        O(n d log² n) vector operations by a selection network (:mod:`common.aggregation.kernels`), O(n d log n) by
        sorting where that cannot be compiled or n is above 2048; O(n) memory beside the result. What is kept is added
        up in float64, never the total minus what is dropped, which would lose everything against a value of 1e30.
        Entries whose float64 sum is exact give the same bits in any order and on any path; others within 2^-50 of
        their scale before the result is rounded to float32.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    f = 0                          the mean
    n = 2f + 1                     the median
    n < 2f + 1                     RuleError
    ties                           equal values are interchangeable: nothing to choose
    ±inf, NaN or 1e30, ≤ f rows    trimmed
    the same in more than f rows   the coordinate may be ±inf, or NaN when both signs are kept
    d = 1, d = 0                   as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "trimmed_mean"

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        self.require(num_clients)
        return 2.0 * clip_norm / self.divisor(num_clients)

    def divisor(self, num_clients: int) -> int:
        return num_clients - 2 * self.num_byzantine

    def kappa(self, num_clients: int) -> float:
        """6 r (1 + r) with r = f/(n - 2f) (Allouah et al. 2023, "Fixing by Mixing")."""
        self.require(num_clients)
        r = self.num_byzantine / self.divisor(num_clients)
        return 6.0 * r * (1.0 + r)

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        super().prepare(n, d, device)
        trimmed.prepare(n, self.num_byzantine, d, device)

    def sum_of_kept(self, x: Tensor) -> Tensor:
        return trimmed(x, self.num_byzantine, mean=False)

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return trimmed(x, self.num_byzantine, mean=True)

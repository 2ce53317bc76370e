"""The coordinate-wise trimmed mean (CWTM), the rule of ByzULDP."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.aggregation.rule import SumRule

__all__ = ["TrimmedMean"]

_COLUMNS = 2048  # of a block on the CPU: a transposed block of a few hundred rows stays in the cache
_ELEMENTS = 1 << 26  # of a block elsewhere: bounds the sort's values and 64-bit indices to 0.75 GiB


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
        O(n d log n) time; on the CPU O(n) memory per column of a block. What is kept is added up, never the total
        minus what is dropped, which would lose everything against a value of 1e30.

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

    def sum_of_kept(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.from_numpy(_sum_on_cpu(x.numpy(), self.num_byzantine))
        return _sum_on_device(x, self.num_byzantine)


def _sum_on_cpu(x: np.ndarray, f: int) -> np.ndarray:
    """numpy sorts short contiguous runs with vector instructions: 5 to 10 times faster than torch.sort."""
    n, d = x.shape
    total = np.empty(d)
    with np.errstate(invalid="ignore"):  # inf - inf
        for start in range(0, d, _COLUMNS):
            block = x[:, start : start + _COLUMNS].T.copy()
            block.sort(axis=1)  # NaN last, after +inf
            kept = block[:, f : n - f]
            if np.isnan(kept[:, -1]).any():
                kept[np.isnan(kept)] = np.inf
            kept.sum(axis=1, dtype=np.float64, out=total[start : start + _COLUMNS])
    return total


def _sum_on_device(x: Tensor, f: int) -> Tensor:
    n, d = x.shape
    total = torch.empty(d, dtype=torch.float64, device=x.device)
    columns = max(1, _ELEMENTS // n)
    for start in range(0, d, columns):
        block = x[:, start : start + columns].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        kept = block.sort(dim=0).values[f : n - f]
        total[start : start + columns] = kept.sum(dim=0, dtype=torch.float64)
    return total.add_(0.0)  # as numpy's sums do: of -0.0 it makes 0.0, or the sign would depend on the order of rows

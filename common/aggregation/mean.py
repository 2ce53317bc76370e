"""The plain mean: what federated learning does without adversaries, and what one adversary ruins."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.kernels import trimmed
from common.aggregation.rows import combine
from common.aggregation.rule import RoundContext, SumRule

__all__ = ["Mean"]


class Mean(SumRule):
    """The arithmetic mean, (1/n) Σ x_i. Not robust for any f > 0.

    Sensitivity
        2C/n: only the replaced summand moves, by at most 2C. Attained by antipodal rows.
    Complexity
        O(n d) time, O(d) memory.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    any f                          ignored; the baseline stands beside robust rules
    ±inf or NaN in a column        that coordinate is not finite: the caller's concern
    1e30 in a row                  the mean follows it; float64 sums, so no overflow
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "mean"

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        self.require(num_clients)
        return 2.0 * clip_norm / num_clients

    def divisor(self, num_clients: int) -> int:
        return num_clients

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        super().prepare(n, d, device)
        trimmed.prepare(n, 0, d, device)

    def sum_of_kept(self, x: Tensor) -> Tensor:
        return trimmed(x, 0, mean=False)  # nothing trimmed

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return trimmed(x, 0, mean=True)

    def aggregate_scaled(
        self,
        x: Tensor,
        scales: NDArray[np.float64],
        context: RoundContext | None,  # noqa: ARG002 - needs none
    ) -> Tensor:
        """float64 (d,): the mean of scales_i x_i; a row of scale 0 counts as zero, whatever stands there."""
        return combine(x, scales / x.shape[0])

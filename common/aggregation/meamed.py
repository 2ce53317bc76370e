"""The mean around the median (MeaMed)."""

from __future__ import annotations

from torch import Tensor

from common.aggregation.rule import RoundContext, Rule
from common.aggregation.sorting import mean_around_median

__all__ = ["MeaMed"]


class MeaMed(Rule):
    """In each coordinate, the mean of the n - f values nearest the median.

    Xie et al. 2018, "Generalized Byzantine-tolerant SGD". Of two values equally far from the median the smaller is
    kept.

    Sensitivity
        2C, by projecting the output: nothing smaller is proved, and changes above those of the trimmed mean are known.
        It does not fall with n.
    Complexity
        O(n d log n) time; on the CPU O(n) memory per column of a block.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 1                     RuleError
    f = 0                          the mean
    n = 2f + 1                     the mean of the f + 1 nearest, the median among them
    ties                           the smaller value
    ±inf, NaN or 1e30, ≤ f rows    not kept: NaN counts as +inf, and what is kept is added up
    the same in more than f rows   the coordinate may be ±inf or NaN
    all equal, d = 1               nothing special
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "meamed"
    equivariant = True

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + 1

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return mean_around_median(x, self.num_byzantine)

"""Bucketing: the means of a few clients at a time, dealt at random."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.aggregation.before.preparation import FLOAT32_ROUNDING, Preparation
from common.aggregation.checks import count
from common.aggregation.rows import combine
from common.aggregation.rule import RoundContext

__all__ = ["Bucketing"]


class Bucketing(Preparation):
    """Deal n rows at random into B = ⌊n/s⌋ buckets whose sizes differ by at most one; average each.

    Karimireddy, He & Jaggi 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing"; there the last
    bucket may be short. Up to f buckets hold a Byzantine row, so the rule behind it needs enough for that.

    Parameters
    ----------
    size
        s, the smallest size of a bucket.

    The permutation comes from the context's generator, a public stream of the round, whose state is left as it was:
    the same context gives the same buckets. It permutes places, never contents, or else one client's vector would
    decide where the others go, and the sensitivity below would be wrong.

    Sensitivity
        One client moves one bucket, by 2C/s_min with s_min = ⌊n/B⌋ and 2⁻²² C for rounding to float32. So a rule whose
        sensitivity bounds how far it follows a row has that for B rows and radius C/s_min: for the trimmed mean
        2C/(s_min (B - 2f)), for the median 2C/s_min or, for even B, C/s_min. These are larger than without buckets.
        For any other rule 2C, by projecting the output.
    Complexity
        O(n d) time; a float32 (B, d) for the result.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < s                          RuleError
    s = 1                          the rows, permuted
    no generator in the context    RuleError
    non-finite row                 the zero vector, and counts in its bucket's size
    1e30 in a row                  its bucket's mean; float64 sums, so no overflow
    f = 0, n = 2f + 1, d = 1       nothing special; f is not used
    ties, all equal, zero norm     nothing to choose
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "bucketing"
    needs = frozenset({"generator"})

    def __init__(self, *, num_byzantine: int, size: int = 2) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.size = count(self.name, "size", size)

    @property
    def minimum_clients(self) -> int:
        return self.size

    def rows_after(self, num_clients: int) -> int:
        return num_clients // self.size

    def moved(self, num_clients: int, radius: float, bound: float) -> float:
        return radius / (num_clients // self.rows_after(num_clients)) + bound * FLOAT32_ROUNDING

    def bound_after(self, bound: float) -> float:
        return bound * (1.0 + FLOAT32_ROUNDING)

    def context_after(self, context: RoundContext | None) -> RoundContext | None:
        return None if context is None else replace(context, weights=None)

    def apply(self, x: Tensor, context: RoundContext | None) -> Tensor:
        n = x.shape[0]
        assert context is not None and context.generator is not None  # noqa: S101, PT018 - checked by the call
        places = copy.deepcopy(context.generator).permutation(n)
        buckets = np.array_split(places, self.rows_after(n))
        result = torch.empty((len(buckets), x.shape[1]), dtype=torch.float32, device=x.device)
        for bucket, members in enumerate(buckets):
            weights = np.zeros(n)
            weights[members] = 1.0 / len(members)
            result[bucket] = combine(x, weights)
        return result

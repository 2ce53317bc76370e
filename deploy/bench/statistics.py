"""Quantiles of rounds, and whether two measurements differ by more than their noise.

Rounds that follow one another are not independent: whatever slows one of them (another tenant of the machine, a slow
disk) slows the next. So rounds are never compared one by one. They are cut into blocks of several correlation times,
whose medians are nearly independent, and the medians of the blocks are compared by ranks.

Formal guarantees
-----------------
If both measurements come from the same stationary process with short memory, a difference is claimed with probability
of :data:`ALPHA` at most for all points of a grid together (Holm 1979). (With strongly correlated rounds a few blocks
are not quite independent; each test is therefore held to half of that.) With a single run of each nothing is known
of what changes from run to run; with several, the spread between runs has to be exceeded as well.

References
----------
Mann & Whitney 1947, "On a test of whether one of two random variables is stochastically larger than the other".
Hodges & Lehmann 1963, "Estimates of location based on rank tests". Welch 1947, "The generalization of Student's
problem". Holm 1979, "A simple sequentially rejective multiple test procedure".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ALPHA", "FEWEST_BLOCKS", "LEVEL", "Difference", "block_medians", "difference", "holm", "quantiles"]

ALPHA = 0.01
"""Of claiming a difference where there is none, in a whole comparison."""
LEVEL = ALPHA / 2
"""That each p-value is held to."""
SHORTEST_BLOCK = 5
CORRELATION_TIMES = 2.0
"""In a block."""
FEWEST_BLOCKS = 6
"""On either side: with fewer, no arrangement of ranks is as rare as :data:`LEVEL`."""

Series = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How much longer the rounds of B are than those of A.

    Attributes
    ----------
    ratio
        Of B to A, by the Hodges–Lehmann estimate on logarithms; NaN without a round.
    low, high
        The ratios that the ranks of the blocks do not rule out at :data:`LEVEL`; NaN with too few blocks.
    p_blocks
        Of the rank test on blocks, two-sided; 1 with too few blocks.
    p_runs
        Of the test between runs; None with fewer than two runs on either side.
    blocks
        How many there are of each.
    block_rounds
        How long each is.
    """

    ratio: float
    low: float
    high: float
    p_blocks: float
    p_runs: float | None
    blocks: tuple[int, int]
    block_rounds: int

    @property
    def enough(self) -> bool:
        """Whether a difference could have been found at all."""
        return min(self.blocks) >= FEWEST_BLOCKS

    @property
    def p(self) -> float:
        """Both tests have to be passed, so the larger one counts."""
        return self.p_blocks if self.p_runs is None else max(self.p_blocks, self.p_runs)


def quantiles(values: Series) -> dict[str, float]:
    """``p50``, ``p95``, ``p99``, ``max`` and ``mean``; quantiles between two values are interpolated.

    Raises
    ------
    ValueError
        There is no value.
    """
    if not len(values):
        raise ValueError("no quantile of nothing")
    p50, p95, p99, largest = np.quantile(np.asarray(values, dtype=np.float64), (0.5, 0.95, 0.99, 1.0))
    mean = float(np.mean(values))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(largest), "mean": mean}


def block_length(runs: Sequence[Series]) -> int:
    """Rounds in a block: several correlation times of the rounds, of whose ranks the correlation is taken."""
    lengths = [_length(np.asarray(run, dtype=np.float64)) for run in runs if len(run) >= 2 * SHORTEST_BLOCK]
    return max(lengths, default=SHORTEST_BLOCK)


def _length(run: npt.NDArray[np.float64]) -> int:
    ranks = np.argsort(np.argsort(run, kind="stable"), kind="stable").astype(np.float64)
    ranks -= ranks.mean()
    phi = float(ranks[1:] @ ranks[:-1]) / max(float(ranks @ ranks), 1e-300)
    phi += (1.0 + 3.0 * phi) / len(run)  # the estimate's bias (Kendall 1954)
    phi = min(max(phi, 0.0), 0.98)
    return max(SHORTEST_BLOCK, math.ceil(CORRELATION_TIMES * (1.0 + phi) / (1.0 - phi)))


def block_medians(runs: Sequence[Series], length: int) -> npt.NDArray[np.float64]:
    """Medians of whole blocks of successive rounds; a block never spans two runs, and what is left over is left out."""
    medians = [
        float(np.median(run[start : start + length]))
        for run in runs
        for start in range(0, len(run) - length + 1, length)
    ]
    return np.asarray(medians, dtype=np.float64)


def difference(a: Sequence[Series], b: Sequence[Series]) -> Difference:
    """Compare two measurements of the same setting: each one or several runs, seconds of round after round."""
    from scipy import stats

    length = max(block_length(a), block_length(b))
    left, right = (np.log(block_medians(runs, length)) for runs in (a, b))
    blocks = (len(left), len(right))
    if min(blocks) < FEWEST_BLOCKS:
        ratio = _median_of(b) / _median_of(a)
        return Difference(ratio, math.nan, math.nan, 1.0, None, blocks, length)
    p_blocks = float(stats.mannwhitneyu(left, right, alternative="two-sided", method="auto").pvalue)
    p_runs: float | None = None
    if min(len(a), len(b)) >= 2:
        of_runs = [[math.log(float(np.median(run))) for run in runs] for runs in (a, b)]
        found = float(stats.ttest_ind(*of_runs, equal_var=False).pvalue)
        p_runs = 1.0 if math.isnan(found) else found
    pairs = np.sort(np.subtract.outer(right, left), axis=None)
    n, m = blocks
    spread = float(stats.norm.isf(LEVEL / 2)) * math.sqrt(n * m * (n + m + 1) / 12.0)
    cut = min(max(math.floor(n * m / 2.0 - spread), 0), (n * m - 1) // 2)
    ratio, low, high = (math.exp(value) for value in (np.median(pairs), pairs[cut], pairs[-1 - cut]))
    return Difference(ratio, low, high, p_blocks, p_runs, blocks, length)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Each p-value as it counts among all of them."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = largest
    return adjusted


def _median_of(runs: Sequence[Series]) -> float:
    rounds = [value for run in runs for value in run]
    return float(np.median(rounds)) if rounds else math.nan

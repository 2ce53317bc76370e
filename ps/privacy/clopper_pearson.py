"""Confidence limits for a probability, from counts of independent trials whose probabilities may differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv, betaincinv

__all__ = ["Counts", "lower", "upper"]

Counts = npt.NDArray[np.float64] | npt.NDArray[np.int64] | float


def lower(successes: Counts, trials: int, level: float) -> npt.NDArray[np.float64]:
    """Below the true probability, but with probability at most ``level``.

    Clopper & Pearson's one-sided limit (1934). If the trials' probabilities differ, it is one for their mean: tails of
    the sum are then below those of the binomial of the same mean, from the mean on downwards and from mean + 1 on
    upwards (Hoeffding 1956, "On the distribution of the number of successes in independent trials", Theorem 4), and
    counts nearer to it never decide, since P(Bin(n, p) ≥ n p) ≥ 1/4 for p ≥ 1/n (Greenberg & Mohri 2014). One case is
    left: a *first* success can be likelier than with equal probabilities. There the limit is ``level / trials``, by
    the union bound; the classical 1 − (1 − level)^(1/trials) is larger by at most a factor 1 + ``level``.

    Parameters
    ----------
    successes
        From 0 to ``trials``; any shape. Need not be whole where a limit is only foreseen.
    trials
        At least 1.
    level
        Inside (0, 1/4).
    """
    limit = betaincinv(np.maximum(successes, 1), trials - np.asarray(successes) + 1, level)
    return np.where(np.less(successes, 1), 0.0, np.where(np.equal(successes, 1), level / trials, limit))


def upper(successes: Counts, trials: int, level: float) -> npt.NDArray[np.float64]:
    """Above the true probability, but with probability at most ``level``: the mirror image of :func:`lower`."""
    failures = trials - np.asarray(successes)
    limit = betainccinv(np.asarray(successes) + 1, np.maximum(failures, 1), level)
    return np.where(failures < 1, 1.0, np.where(failures == 1, 1 - level / trials, limit))

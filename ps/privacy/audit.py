"""The statistics of a privacy audit: lower bounds on ε from the outcomes of many trials.

An audit plays one game many times. In world + the mechanism runs on one data set, in world − on a neighbouring one;
each trial gives one number, standardised so that under the claim it is N(+μ/2, 1) in world + and N(−μ/2, 1) in
world −, at most that far apart. A *test* guesses the world from that number, or abstains; how often it is right and
wrong bounds the ε of any mechanism that could have produced the numbers. With a threshold c ≥ 0 there are three tests:

=========  ================================  ==========================  ==========================  ==============
side       guess                             right                       wrong                       out of
=========  ================================  ==========================  ==========================  ==============
``above``  + if s > c                        s > c in world +            s > c in world −            N
``below``  − if s < −c                       s < −c in world −           s < −c in world +           N
``both``   + if s > c, − if s < −c           the sum of the two          the sum of the two          2 N
=========  ================================  ==========================  ==========================  ==============

**Bounds.** Let r be the probability of a right and w that of a wrong guess (for ``both``: the means over the two
worlds), and r_low, w_up their one-sided Clopper-Pearson limits.

- *direct*: (ε, δ)-DP means r ≤ e^ε w + δ for ``above`` and ``below``, and, as their mean, for ``both``. Hence
  ε ≥ log((r_low − δ) / w_up). Nothing is assumed of the mechanism. It needs tests far in the tail, so many trials.
- *curve*: μ-GDP means r ≤ Φ(Φ⁻¹(w) + μ) (Dong, Roth & Su 2022, Definition 2.6); that curve is the same for both
  orders of the worlds and concave, so it holds for the mean too. Hence μ ≥ Φ⁻¹(r_low) − Φ⁻¹(w_up), best in the middle,
  where few trials suffice. This refutes *μ-GDP*, which a Gaussian mechanism of known multiplier claims. Its conversion
  to ε by the exact formula **assumes that the mechanism's trade-off curve is Gaussian**, of whatever μ: for a
  mechanism of another kind the ε of a curve bound is not a bound (its μ still refutes the claimed μ).

**Swapped worlds.** Differential privacy is symmetric, so a test that is wrong too often betrays as much as one that is
right too often: every bound is also computed with right and wrong exchanged, and the better of the two is reported,
marked ``swapped``. A mechanism, or a caller, that turns the sign around is measured all the same.

**Confidence.** Thresholds are chosen in advance, from the claim and the number of trials alone. Each test has four
limits (r and w, from below and from above); each is taken at level α / (4 × tests), so all hold together with
probability at least 1 − α, and then so does every bound computed from them, the largest included. For ``both`` the
2 N guesses have two probabilities of success; :mod:`ps.privacy.clopper_pearson` says why its limits hold for such sums.

**Independence.** All of this is for *independent* trials, N fixed in advance. In the mechanism as it is claimed they
are: its noise is independent in every coordinate and round. So a *fail* refutes that claim at level α in any case. But
if a fault makes trials dependent (one noise value used for many coordinates), then the counts vary more than the
limits allow for, and the *number* is not a confidence bound on the ε of the faulty mechanism. Nor need such a fault
show: every single trial may still have the law that was claimed. It takes a statistic in which the shared noise
cancels, for instance the difference of two coordinates with canaries of opposite signs, one trial for each pair.

*Pass* means that nothing was found, not that there is nothing: a fault that shows in few of many trials, or in another
statistic, stays unseen. ``expected_epsilon`` is about what the same audit finds in a Gaussian mechanism that attains
the claim; an audit far below it has tested something weaker.

References
----------
Jagielski, Ullman & Oprea 2020 (direct bounds by Clopper-Pearson); Nasr et al. 2023 (bounds through the trade-off
curve); Steinke, Nasr & Jagielski 2023 (guesses with abstentions, many trials in one run).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from common.errors import PrivacyError
from common.privacy.conversions import epsilon_of
from ps.privacy import clopper_pearson
from ps.privacy.clopper_pearson import Counts

__all__ = [
    "AuditResult",
    "Bound",
    "Tally",
    "lower_bounds",
    "thresholds_for",
]

Kind = Literal["direct", "curve"]
Side = Literal["above", "below", "both"]

_SIDES: tuple[Side, ...] = ("above", "below", "both")
_KINDS: tuple[Kind, ...] = ("direct", "curve")
_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the outermost threshold
_LIMITS = 4 * len(_SIDES) * len(_FRACTIONS)  # that have to hold together
_LUCK = 2.5  # the outermost threshold is the best one for counts so many standard deviations to the worse


@dataclass(frozen=True)
class Bound:
    """One lower bound; all bounds of an :class:`AuditResult` hold together with probability 1 − α.

    Attributes
    ----------
    kind
        ``direct`` or ``curve``.
    epsilon
        ε is at least this, at the result's δ; 0 if nothing can be said. For ``curve``: if the trade-off is Gaussian.
    mu
        μ is at least this (``curve``), or None (``direct``).
    threshold, side
        The test, as in the module's table; the threshold in units of the standardised statistic.
    true_positives, false_positives
        Right and wrong guesses, out of ``trials`` each (``both``: out of twice as many).
    trials
        N, per world.
    swapped
        The bound is from wrong guesses being too many.
    """

    kind: Kind
    epsilon: float
    mu: float | None
    threshold: float
    side: Side
    true_positives: int
    false_positives: int
    trials: int
    swapped: bool


@dataclass(frozen=True)
class AuditResult:
    """What an audit found about the claim "(ε, δ)-DP, by μ-GDP", with error probability ``alpha``."""

    claimed_epsilon: float
    claimed_mu: float
    delta: float
    alpha: float
    expected_epsilon: float
    bounds: tuple[Bound, ...]

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """``fail`` if a bound exceeds the claim, in ε or in μ; by chance with probability at most ``alpha``."""
        exceeded = any(
            bound.epsilon > self.claimed_epsilon or (bound.mu is not None and bound.mu > self.claimed_mu)
            for bound in self.bounds
        )
        return "fail" if exceeded else "pass"

    @property
    def epsilon_lower(self) -> float:
        """The largest lower bound on ε, of either kind."""
        return max(bound.epsilon for bound in self.bounds)

    def best(self, kind: Kind) -> Bound:
        """The largest bound of one kind."""
        return max((bound for bound in self.bounds if bound.kind == kind), key=lambda bound: bound.epsilon)


class Tally:
    """Counts of the outcomes of all tests, from statistics that arrive in chunks and are not kept.

    Parameters
    ----------
    mu, epsilon, delta
        The claim: every trial is μ-GDP and (ε, δ)-DP; statistics are standardised by the same μ.
    trials_planned
        N, the number of trials in each world, fixed before the first: stopping when the numbers look good would
        make the confidence untrue, so no other number gives a result.
    alpha
        The probability with which a bound may be wrong, over all of them.

    Raises
    ------
    PrivacyError
        The claim, α or N is out of range.
    """

    def __init__(self, mu: float, epsilon: float, delta: float, trials_planned: int, alpha: float) -> None:
        _require(0 < epsilon < math.inf, f"epsilon = {epsilon!r}: expected a positive, finite number")
        self.thresholds = thresholds_for(mu, delta=delta, trials=trials_planned, alpha=alpha)
        self._claim = mu, epsilon, delta
        self._planned = trials_planned
        self._alpha = alpha
        self._trials = {1: 0, -1: 0}
        self._above = {world: np.zeros(len(self.thresholds), dtype=np.int64) for world in (1, -1)}
        self._below = {world: np.zeros(len(self.thresholds), dtype=np.int64) for world in (1, -1)}

    def add(self, world: int, statistics: npt.ArrayLike) -> None:
        """Count more trials of world ``+1`` or ``-1``.

        Parameters
        ----------
        world
            1 for the world of mean +μ/2, -1 for that of −μ/2.
        statistics
            Any shape, read as float64; one standardised number for each trial.

        Raises
        ------
        PrivacyError
            The world is unknown, a statistic is not finite, or there are more than were planned; nothing is counted.
        """
        _require(world in (1, -1), f"world = {world!r}: expected 1 or -1")
        values = np.asarray(statistics, dtype=np.float64).ravel()
        finite = np.isfinite(values)
        if not finite.all():
            first = int(np.argmin(finite))
            raise PrivacyError(
                f"world {world:+d}: statistic {first} of these {values.size} is {values[first]}: expected finite "
                "numbers; look for the round that released it"
            )
        trials = self._trials[world] + values.size
        _require(
            trials <= self._planned,
            f"world {world:+d}: {trials} trials, but {self._planned} were planned: the number is part of the claim's "
            "confidence; plan all trials before the first",
        )
        self._trials[world] = trials
        for place, threshold in enumerate(self.thresholds):
            self._above[world][place] += np.count_nonzero(values > threshold)
            self._below[world][place] += np.count_nonzero(values < -threshold)

    def result(self) -> AuditResult:
        """All bounds, once both worlds are complete.

        Raises
        ------
        PrivacyError
            A world does not have as many trials as were planned.
        """
        _require(
            self._trials == {1: self._planned, -1: self._planned},
            f"{self._trials[1]} and {self._trials[-1]} trials in worlds + and -: expected {self._planned} in each, as "
            "planned; run the rest",
        )
        mu, epsilon, delta = self._claim
        level = self._alpha / _LIMITS
        return AuditResult(
            claimed_epsilon=epsilon,
            claimed_mu=mu,
            delta=delta,
            alpha=self._alpha,
            expected_epsilon=_expected_epsilon(self.thresholds, mu, delta, self._planned, level),
            bounds=tuple(self._bounds(delta, level)),
        )

    def _bounds(self, delta: float, level: float) -> Iterator[Bound]:
        for side in _SIDES:
            right, wrong = np.zeros((2, len(self.thresholds)), dtype=np.int64)
            if side != "below":
                right, wrong = right + self._above[1], wrong + self._above[-1]
            if side != "above":
                right, wrong = right + self._below[-1], wrong + self._below[1]
            guesses = self._planned * (2 if side == "both" else 1)
            for kind in _KINDS:
                as_labelled = _bounds_of(kind, right, wrong, guesses, delta, level)
                exchanged = _bounds_of(kind, wrong, right, guesses, delta, level)
                for place, threshold in enumerate(self.thresholds):
                    value = float(max(as_labelled[place], exchanged[place]))
                    yield Bound(
                        kind=kind,
                        epsilon=epsilon_of(value, delta, "exact") if kind == "curve" else value,
                        mu=value if kind == "curve" else None,
                        threshold=threshold,
                        side=side,
                        true_positives=int(right[place]),
                        false_positives=int(wrong[place]),
                        trials=self._planned,
                        swapped=bool(exchanged[place] > as_labelled[place]),
                    )


def lower_bounds(
    world_plus: npt.NDArray[np.float64],
    world_minus: npt.NDArray[np.float64],
    *,
    mu: float,
    epsilon: float,
    delta: float,
    alpha: float,
) -> AuditResult:
    """The bounds of one audit whose statistics are at hand; see the module for what they mean and assume.

    Parameters
    ----------
    world_plus, world_minus
        ``(N,)`` float64 each, standardised: N(+μ/2, 1) and N(−μ/2, 1) under the claim. N was fixed in advance.
    mu, epsilon, delta, alpha
        As for :class:`Tally`.

    Raises
    ------
    PrivacyError
        The worlds differ in size or are empty, a statistic is not finite, or the claim or α is out of range.
    """
    tally = Tally(mu, epsilon, delta, max(np.size(world_plus), np.size(world_minus)), alpha)
    tally.add(1, world_plus)
    tally.add(-1, world_minus)
    return tally.result()


def thresholds_for(mu: float, *, delta: float, trials: int, alpha: float) -> tuple[float, ...]:
    """The thresholds c of all tests, ascending from 0, in units of the standardised statistic.

    0 is the best for curve bounds. The outermost is the one at which a mechanism that attains the claim is expected to
    give the largest direct bound, even with somewhat unlucky counts: further out the ratio of probabilities grows, but
    too few trials are left to show it. Those between are for mechanisms with less noise than was claimed.

    Raises
    ------
    PrivacyError
        The claim, α or the number of trials is out of range.
    """
    _require(0 < mu < math.inf, f"mu = {mu!r}: expected a positive, finite number")
    _require(0 < delta < 1, f"delta = {delta!r}: expected a number inside (0, 1), below 1/clients")
    _require(0 < alpha < 1, f"alpha = {alpha!r}: expected a number inside (0, 1), such as 0.01")
    _require(trials >= 1, f"trials = {trials!r}: expected at least 1 in each world")
    candidates = np.linspace(0, mu / 2 + 8, 801)
    expected = _expected("direct", candidates, mu, delta, trials, alpha / _LIMITS, luck=_LUCK)
    outermost = float(candidates[np.argmax(expected)])
    return tuple(sorted({fraction * outermost for fraction in _FRACTIONS}))


def _bounds_of(
    kind: Kind, right: Counts, wrong: Counts, guesses: int, delta: float, level: float
) -> npt.NDArray[np.float64]:
    """ε (direct) or μ (curve), at least 0, from the counts of one test."""
    low, high = clopper_pearson.lower(right, guesses, level), clopper_pearson.upper(wrong, guesses, level)
    if kind == "direct":
        return np.asarray(np.log(np.maximum((low - delta) / high, 1.0)))
    apart = ndtri(low) - ndtri(high)  # -inf where nothing was seen; +inf nowhere, since low < 1 and high > 0
    return np.asarray(np.maximum(apart, 0.0))


def _expected(
    kind: Kind, thresholds: npt.NDArray[np.float64], mu: float, delta: float, trials: int, level: float, luck: float
) -> npt.NDArray[np.float64]:
    """The bounds of ``both`` where the claim is met and attained, with counts ``luck`` standard deviations short."""
    guesses = 2 * trials
    p, q = ndtr(mu / 2 - thresholds), ndtr(-mu / 2 - thresholds)
    right = guesses * p - luck * np.sqrt(guesses * p * (1 - p))
    wrong = guesses * q + luck * np.sqrt(guesses * q * (1 - q))
    return _bounds_of(kind, np.clip(right, 0, guesses), np.clip(wrong, 0, guesses), guesses, delta, level)


def _expected_epsilon(thresholds: tuple[float, ...], mu: float, delta: float, trials: int, level: float) -> float:
    places = np.array(thresholds)
    direct = _expected("direct", places, mu, delta, trials, level, luck=0)
    curve = _expected("curve", places, mu, delta, trials, level, luck=0)
    return max(float(np.max(direct)), epsilon_of(float(np.max(curve)), delta, "exact"))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)

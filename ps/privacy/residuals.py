"""Whether the noise of many releases is independent N(0, σ²), from the noise itself.

Whoever sent all momenta of a release knows its aggregate A, and so its *residuals* (Y − A)/σ. Under the claim they are
independent N(0, 1), but for rounding to the noise's grid, in every coordinate of every release. A canary asks how far
one client can be told; residuals show faults it does not happen to touch. With R releases of d coordinates:

=====================  ==============================================================  ===================  ==========
check                  statistic                                                       largest or least of  law
=====================  ==============================================================  ===================  ==========
all variances          mean square of everything (too little)                          1                    χ²
variance of release    mean square of one release (too little)                         R                    χ²
variance of coord.     mean square of one coordinate over the releases (too little)    d                    χ²
zeros                  values of one release that have hardly any noise                R                    binomial
pairs of releases      correlation, coordinate by coordinate                           R (R − 1)/2          Beta
lags                   correlation with itself, k coordinates on, over all releases    ⌊d/2⌋                ≈ normal
lags of one release    the same in each release                                        R ⌊d/2⌋              ≈ normal
values again           values that two releases, or one, have more often in common     R (R + 1)/2          ≈ Poisson
shape                  distance of the distribution of |x|, over all, from the normal  1                    ≈ DKW
mean of coord.         mean of one coordinate over the releases                        d                    normal
mean of release        mean of one release                                             R                    normal
canary                 mean of one release in the direction of its canary              R                    normal
too much noise         mean square of everything (too much): a note, not a fault       1                    χ²
=====================  ==============================================================  ===================  ==========

*Values again* finds noise used again in another order, or with another sign: |x| is dealt to bins that are equally
likely, and pairs in one bin are counted. *Zeros* finds coordinates left bare in a single release.

**Confidence.** Each check is tested at α / checks, divided by how often it is tested (Bonferroni, which needs no
independence), at a threshold that follows from R, d, the grid and α. Where the law is approximate (≈) a hundredth
of that is used, since tails so far out are some times as heavy as their approximation.

**What is not seen**: noise that is predictable but looks like new (a weak generator), noise shared with releases
that are not among these, values that depend on each other without being equal (but for the sign) and lie neither in
one coordinate of two releases nor at one distance in one, dependence that takes three values to see, and whatever is
too small for so few releases.

References
----------
Massart 1990, "The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import fft, stats
from scipy.special import ndtr, ndtri

from common.errors import PrivacyError

__all__ = ["CHECKS", "SMALLEST", "Check", "Residuals"]

CHECKS = 13
SMALLEST = 1000
"""Coordinates: with fewer the approximate laws are not good enough."""

_APPROXIMATE = 0.01
_MOST_BINS = 8192
_BARE = 2e-4  # as good as no noise; float32 keeps what a model says of a release finer than that

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One check, at its largest or least value.

    Attributes
    ----------
    name
        As in the module's table.
    statistic, threshold
        At the place where it is furthest out; ``side`` says on which side of the threshold it must not be.
    tested
        How many statistics there were.
    where
        The place, in words; empty where there is only one.
    means
        What it would mean.
    subject
        Of what it speaks; ``excess``, more noise than claimed, is no fault of privacy.
    """

    name: str
    statistic: float
    threshold: float
    side: Literal["above", "below"]
    tested: int
    where: str
    means: str
    subject: Literal["noise", "aggregate", "excess"] = "noise"

    @property
    def verdict(self) -> Literal["pass", "fail", "note"]:
        """``fail`` beyond the threshold; ``note`` if all it says is that there is more noise than claimed."""
        beyond = self.statistic > self.threshold if self.side == "above" else self.statistic < self.threshold
        return "pass" if not beyond else "note" if self.subject == "excess" else "fail"

    def __str__(self) -> str:
        limit = "at most" if self.side == "above" else "at least"
        place = f" in {self.where}" if self.where else ""
        return f"{self.name} {self.statistic:.4g}{place}, {limit} {self.threshold:.4g} expected: {self.means}"


class Residuals:
    """The residuals of all releases of an audit: kept, in float32, and checked once all are there.

    Parameters
    ----------
    planned
        R, fixed before the first release.
    num_parameters
        d.
    alpha
        The probability that any check fails though the claim holds.

    Raises
    ------
    PrivacyError
        d is below :data:`SMALLEST`, R below 1, or α out of range.
    """

    def __init__(self, planned: int, num_parameters: int, alpha: float) -> None:
        _require(planned >= 1, f"planned = {planned!r}: expected at least one release")
        _require(num_parameters >= SMALLEST, f"{num_parameters} coordinates: expected at least {SMALLEST}")
        _require(0 < alpha < 1, f"alpha = {alpha!r}: expected a number inside (0, 1), such as 0.001")
        self.level = alpha / CHECKS
        self._values = np.empty((planned, num_parameters), dtype=np.float32)
        self._along, self._grid = np.empty(planned), np.empty(planned)
        self._names: list[str] = []

    def add(self, name: str, values: Floats, *, along: Floats, grid: float) -> None:
        """Keep the residuals of more releases.

        Parameters
        ----------
        name
            For the report.
        values
            ``(k, d)``, in units of the noise that was claimed for each.
        along
            ``(k, d)``: what the canary added to each aggregate, up to a factor; 0 where it added nothing.
        grid
            What the noise was rounded to, in the same unit as the values.

        Raises
        ------
        PrivacyError
            More releases than planned, of another size, or not finite; none is kept.
        """
        first, last = len(self._names), len(self._names) + len(values)
        planned, d = self._values.shape
        _require(last <= planned, f"{last} releases, but {planned} were planned: plan all before the first")
        _require(values.shape[1:] == (d,) == along.shape[1:], f"residuals {values.shape}: expected {d} of each release")
        _require(bool(np.isfinite(values).all()), f"{name}: a residual is not finite; look for the round that released")
        self._values[first:last] = values
        norms = np.sqrt(np.einsum("rd,rd->r", along, along))
        self._along[first:last] = np.einsum("rd,rd->r", values, along) / np.where(norms > 0, norms, 1.0)
        self._grid[first:last] = grid
        self._names += [f"{name}, release {number}" for number in range(len(values))]

    def checks(self) -> tuple[Check, ...]:
        """All of them, once all releases are there.

        Raises
        ------
        PrivacyError
            Releases are missing.
        """
        _require(
            len(self._names) == len(self._values),
            f"{len(self._names)} releases: expected {len(self._values)}, as planned; run the rest",
        )
        squares = np.array([float(np.einsum("d,d->", row, row, dtype=np.float64)) for row in self._values])
        scale = np.maximum(np.sqrt(squares / self._values.shape[1]), 1e-6)  # of releases that are bare, any will do
        found = [*self._variances(squares), self._zeros(), self._pairs(scale), *self._lags(scale)]
        return (*found, *self._bins(scale), *self._means())

    def _variances(self, squares: Floats) -> Iterator[Check]:
        (releases, d), everything = self._values.shape, self._values.size
        total, columns = float(squares.sum()) / everything, np.zeros(d)
        for row, grid in zip(self._values, self._grid, strict=True):
            columns += np.square(np.abs(row) + grid)  # before rounding it was no larger; of few values all may be small
        little = "too little noise"
        lower = float(stats.chi2.ppf(self.level, everything)) / everything
        yield Check("all variances", total, lower, "below", 1, "", little)
        least = int(np.argmin(squares))
        lower = float(stats.chi2.ppf(self.level / releases, d)) / d
        yield Check("variance of release", squares[least] / d, lower, "below", releases, self._names[least], little)
        least = int(np.argmin(columns))
        lower = float(stats.chi2.ppf(self.level / d, releases)) / releases
        bare = "coordinates with too little noise, or none"
        where = f"coordinate {least}"
        yield Check("variance of coord.", columns[least] / releases, lower, "below", d, where, bare)
        upper = float(stats.chi2.isf(self.level, everything)) / everything
        yield Check("too much noise", total, upper, "above", 1, "", "more noise than claimed", "excess")

    def _zeros(self) -> Check:
        releases, d = self._values.shape
        window = np.maximum(_BARE, 2 * self._grid)
        counts = np.array([np.count_nonzero(np.abs(row) < w) for row, w in zip(self._values, window, strict=True)])
        chance = 2 * ndtr(window + self._grid / 2) - 1  # nothing further out is rounded into the window
        limits = stats.binom.isf(self.level / releases, d, chance)
        worst = int(np.argmax(counts - limits))
        means = "coordinates without noise"
        return Check("zeros", float(counts[worst]), float(limits[worst]), "above", releases, self._names[worst], means)

    def _pairs(self, scale: Floats) -> Check:
        """The square of a correlation about 0 of two such vectors is Beta(1/2, (d − 1)/2)."""
        releases, d = self._values.shape
        among = max(releases * (releases - 1) // 2, 1)
        correlations = np.abs(np.triu(self._values @ self._values.T, 1)) / (d * np.outer(scale, scale))
        threshold = math.sqrt(stats.beta.isf(self.level / among, 0.5, (d - 1) / 2))
        first, second = np.unravel_index(int(np.argmax(correlations)), correlations.shape)
        where = f"{self._names[first]} and {self._names[second]}"
        means = "noise that releases share"
        return Check("pairs of releases", float(correlations.max()), threshold, "above", among, where, means)

    def _lags(self, scale: Floats) -> Iterator[Check]:
        """Correlations at all circular lags from 1, in standard deviations, each of about 1/√d."""
        releases, d = self._values.shape
        lags = d // 2
        summed, worst, where = np.zeros(lags), 0.0, ""
        for row, root_mean_square, name in zip(self._values, scale, self._names, strict=True):
            power = np.square(np.abs(fft.rfft(row.astype(np.float64) / root_mean_square)))
            found = fft.irfft(power, d)[1 : lags + 1] / math.sqrt(d)
            if d % 2 == 0:
                found[-1] /= math.sqrt(2)  # each product is in the sum twice
            summed += found
            furthest = int(np.argmax(np.abs(found)))
            if abs(found[furthest]) > worst:
                worst, where = abs(float(found[furthest])), f"{name}, {furthest + 1} coordinates on"
        summed = np.abs(summed) / math.sqrt(releases)
        furthest = int(np.argmax(summed))
        means, level = "noise that coordinates share", _APPROXIMATE * self.level / 2
        place = f"all, {furthest + 1} coordinates on"
        yield Check("lags", float(summed[furthest]), _sigmas(level / lags), "above", lags, place, means)
        among = releases * lags
        yield Check("lags of one release", worst, _sigmas(level / among), "above", among, where, means)

    def _bins(self, scale: Floats) -> Iterator[Check]:
        """Pairs of values in one bin, and the distribution over the bins, which are equally likely."""
        releases, d = self._values.shape
        # A bin near 0 is 1.25 / bins wide: some steps of the grid, or values used again would not meet.
        bins = max(64, int(min(_MOST_BINS, 0.3 / max(float(np.median(self._grid)), 1e-9))))
        random, counts = np.random.default_rng(0), np.empty((releases, bins), dtype=np.float32)
        for number, (row, root_mean_square, grid) in enumerate(zip(self._values, scale, self._grid, strict=True)):
            spread = row + grid * (random.random(d) - 0.5)  # multiples of the grid would favour some bins
            places = (bins * (2 * ndtr(np.abs(spread) / root_mean_square) - 1)).astype(np.intp)
            counts[number] = np.bincount(np.minimum(places, bins - 1), minlength=bins)
        expected, within = d * d / bins, d * (d - 1) / 2 / bins
        common = (counts @ counts.T - expected) / math.sqrt(expected * (1 - 1 / bins))
        own = (np.square(counts, dtype=np.float64).sum(axis=1) - d) / 2
        np.fill_diagonal(common, (own - within) / math.sqrt(within * (1 - 1 / bins)))
        common = np.triu(common)
        first, second = np.unravel_index(int(np.argmax(common)), common.shape)
        among, level = releases * (releases + 1) // 2, _APPROXIMATE * self.level
        threshold = (float(stats.poisson.isf(level / among, within)) - within) / math.sqrt(within)
        same = self._names[first]
        where = same if first == second else f"{same} and {self._names[second]}"
        means = "noise used again, in whatever order"
        yield Check("values again", float(common.max()), threshold, "above", among, where, means)
        shares = np.cumsum(counts.sum(axis=0, dtype=np.float64)) / self._values.size
        distance = float(np.abs(shares - np.arange(1, bins + 1) / bins).max())
        threshold = math.sqrt(math.log(2 / level) / (2 * self._values.size))
        yield Check("shape", distance, threshold, "above", 1, "", "noise that is not normal, or of changing scale")

    def _means(self) -> Iterator[Check]:
        releases, d = self._values.shape
        coordinates = self._values.sum(axis=0, dtype=np.float64) / math.sqrt(releases)
        rows = self._values.sum(axis=1, dtype=np.float64) / math.sqrt(d)
        for name, values in (("mean of coord.", coordinates), ("mean of release", rows), ("canary", self._along)):
            furthest = int(np.argmax(np.abs(values)))
            where = f"coordinate {furthest}" if name == "mean of coord." else self._names[furthest]
            yield Check(
                name,
                abs(float(values[furthest])),
                _sigmas(self.level / len(values) / 2),
                "above",
                len(values),
                where,
                "a shift that neither the momenta nor the noise explain",
                "aggregate",
            )


def _sigmas(chance: float) -> float:
    """What a standard normal exceeds so rarely."""
    return -float(ndtri(chance))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)

"""What a whole search would cost: ε is stated for each run, and choosing among runs looks at all of them.

Under user-level privacy every run on the same people spends again. Runs that are Gaussian mechanisms compose exactly:
μ² = Σ T/z² over all of them, and ε at δ follows from μ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.privacy.conversions import epsilon_of
from deploy.sweep.points import Point
from deploy.sweep.results import Row

__all__ = ["Spent", "spent_on"]


@dataclass(frozen=True)
class Spent:
    """The privacy of several runs together, on the same people.

    Attributes
    ----------
    runs
        How many were begun, repeated attempts included.
    without
        How many of them had no privacy: then nothing bounds the whole.
    epsilon, delta
        Of all the runs together; None where nothing bounds it.
    """

    runs: int
    without: int
    epsilon: float | None
    delta: float | None

    def words(self) -> str:
        """As a table says it."""
        if not self.runs:
            return "nothing was run"
        if self.without:
            return f"no ε: {self.without} of {self.runs} runs have no privacy"
        return f"ε = {self.epsilon:.4g} at δ = {self.delta:.3g} ({self.runs} runs)"


def spent_on(runs: Iterable[tuple[Point, Row]]) -> Spent:
    """Compose what these runs released: each finished one its rounds, each attempt before it as many as were planned.

    At the largest δ among them; by Mironov's conversion if a run asks for it, else by the exact one.
    """
    total, number, without, delta, conversion = 0.0, 0, 0, 0.0, "exact"
    for point, row in runs:
        privacy, planned = point.experiment.privacy, point.experiment.training.rounds
        made = row.results.get("rounds") if row.done else 0
        releases = (planned if made is None else made) + planned * (row.attempts - 1)
        if not row.done and not releases:  # refused, or cut short at an unknown round
            releases = planned
        z = row.results.get("noise_multiplier") or 0.0
        number += row.attempts
        if privacy.epsilon is None:
            without += row.attempts
            continue
        if z == 0.0:  # it never began, or what it released is not known: charge its whole budget
            from common.privacy.calibration import calibrate

            z = calibrate(privacy.epsilon, privacy.delta, planned, privacy.calibration)
        total += releases / z**2
        delta = max(delta, privacy.delta)
        if privacy.calibration == "renyi":
            conversion = "renyi"
    if without or not number:
        return Spent(number, without, None, None)
    epsilon = epsilon_of(math.sqrt(total), delta, "renyi" if conversion == "renyi" else "exact") if total else 0.0
    return Spent(number, 0, epsilon, delta)

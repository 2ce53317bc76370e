"""When a fault comes and for how long: by rounds, or by seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["START", "Moment", "Span", "parse_moment", "parse_span"]

_ROUNDS = re.compile(r"(\d+) rounds?")
_ROUND = re.compile(r"round (\d+)")


@dataclass(frozen=True)
class Moment:
    """A point of a run.

    Attributes
    ----------
    unit
        ``start``: before any process of the run exists. ``round``: as soon as so many rounds are done. ``s``: so many
        seconds after the first round was done.
    """

    unit: Literal["start", "round", "s"]
    value: float = 0.0

    def scaled(self, rounds: float, seconds: float) -> Moment:
        """The same in a run that has ``rounds`` times as many rounds, and whose seconds are ``seconds`` as long."""
        match self.unit:
            case "round":
                return Moment("round", max(1, round(self.value * rounds)))
            case "s":
                return Moment("s", self.value * seconds)
        return self

    def __str__(self) -> str:
        return {"start": "start", "round": f"round {self.value:.0f}", "s": f"{self.value:.4g} s"}[self.unit]


START = Moment("start")


@dataclass(frozen=True)
class Span:
    """How long something holds: rounds that are done meanwhile, or seconds."""

    unit: Literal["rounds", "s"]
    value: float

    def scaled(self, rounds: float, seconds: float) -> Span:
        if self.unit == "rounds":
            return Span("rounds", max(1, round(self.value * rounds)))
        return Span("s", self.value * seconds)

    def __str__(self) -> str:
        return f"{self.value:.4g} s" if self.unit == "s" else f"{self.value:.0f} round{'s' if self.value != 1 else ''}"


def parse_moment(value: Any) -> Moment:
    """``"start"``, ``"round 10"``, or seconds as a number.

    Raises
    ------
    ValueError
        It is none of them.
    """
    if isinstance(value, Moment):
        return value
    if value == "start":
        return START
    if isinstance(value, str) and (match := _ROUND.fullmatch(value)):
        if int(match[1]) < 1:
            raise ValueError('the first is "round 1", when one round is done; before all rounds is "start"')
        return Moment("round", int(match[1]))
    if (seconds := _seconds(value)) is not None:
        return Moment("s", seconds)
    raise ValueError('expected "start", "round 10", or seconds after the first round as a number')


def parse_span(value: Any) -> Span:
    """``"5 rounds"``, or seconds as a number.

    Raises
    ------
    ValueError
        It is neither.
    """
    if isinstance(value, Span):
        return value
    if isinstance(value, str) and (match := _ROUNDS.fullmatch(value)) and int(match[1]) > 0:
        return Span("rounds", int(match[1]))
    seconds = _seconds(value)
    if seconds is not None and seconds > 0:
        return Span("s", seconds)
    raise ValueError('expected "5 rounds", or a positive number of seconds')


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None

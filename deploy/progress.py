"""What an onlooker knows of a run, from the events of the parameter server and the launcher. No terminal here."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

__all__ = ["Progress", "missing_words", "seconds_words"]

LATENCIES = 20  # the latest ones, of which the median is shown
WARNINGS = 4

_COUNTDOWN = re.compile(r"\bin [\d.,]+ s$")


class Progress:
    """The state of a run as far as it has been told.

    Parameters
    ----------
    name
        The experiment's.
    rounds
        T, as configured; the events say it again.
    """

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.of = name, rounds
        self.round = 0
        self.address = self.run_id = self.run_dir = ""
        self.note = "starting"
        self.wait: tuple[str, float] | None = None  # message, and when it ends
        self.answered = self.clients = 0
        self.missing: Sequence[int] = ()
        self.epsilon: float | None = None
        self.wiretap = False
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.curve: list[tuple[int, float]] = []
        self.loss = math.nan
        self.warnings: deque[str] = deque(maxlen=WARNINGS)
        self.num_warnings = 0
        self.end: tuple[str, str] | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        """Learn from an event; an unknown one teaches nothing."""
        match event.get("event"):
            case "listening":
                self.address, self.run_id, self.run_dir = event["address"], event["run_id"], event["run_dir"]
                self.note, self.wiretap = "", bool(event.get("wiretap"))
            case "resumed":
                self.round = int(event["round"])
            case "note":
                self.note = event["message"]
            case "wait":
                self.wait = event["message"], now + event["seconds"]
            case "round":
                self._take_round(event)
            case "evaluation":
                self.curve.append((event["round"], event["accuracy"]))
                self.loss = event["loss"]
            case "warning" | "client_error" | "suspended":
                self.num_warnings += 1
                self.warnings.append(event["message"])
            case "end":
                self.end = event["status"], event["message"]
                self.wait = None

    def _take_round(self, event: dict[str, Any]) -> None:
        self.wait, self.note = None, ""
        self.round, self.of = event["round"], event["of"]
        self.latencies.append(event["latency_s"])
        self.answered, self.clients, self.missing = event["answered"], event["clients"], event["missing"]
        self.epsilon = event["epsilon"]

    @property
    def latency_s(self) -> float | None:
        """Median of the last rounds."""
        return median(self.latencies) if self.latencies else None

    @property
    def left_s(self) -> float | None:
        """How long the remaining rounds take if they are like the last ones."""
        return None if self.latency_s is None else (self.of - self.round) * self.latency_s

    def waiting(self, now: float) -> str | None:
        """The wait that is on, with the seconds that are left now."""
        if self.wait is None:
            return None
        message, until = self.wait
        left = f"in {max(0.0, until - now):.0f} s"
        return _COUNTDOWN.sub(left, message) if _COUNTDOWN.search(message) else f"{message} (ends {left})"

    def accuracy_words(self) -> str:
        """``71.2% (round 30)``, or that there is none yet."""
        if not self.curve:
            return "not evaluated yet"
        round_id, accuracy = self.curve[-1]
        return f"{accuracy:.1%} (round {round_id})"

    def privacy_words(self) -> str:
        if self.wiretap:
            return "NOT PRIVATE: the wiretap is on"
        if self.epsilon is not None:
            return f"ε = {self.epsilon:.3g} spent"
        return "no DP" if self.latencies else "–"  # a resumed run has rounds behind it that told us nothing

    def answered_words(self) -> str:
        return f"{self.answered} of {self.clients}" + missing_words(self.missing) if self.clients else "–"


def missing_words(ids: Sequence[int], most: int = 6) -> str:
    """``, missing 12, 17 and 3 others``; empty when nobody is."""
    if not ids:
        return ""
    others = f" and {len(ids) - most} others" if len(ids) > most else ""
    return f", missing {', '.join(map(str, ids[:most]))}{others}"


def seconds_words(seconds: float | None) -> str:
    """A duration at the precision one reads it with: ``43 ms``, ``1.27 s``, ``3:20``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

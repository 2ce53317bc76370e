"""What an onlooker knows of a run, from the events of the parameter server and the launcher. No terminal here."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["Progress", "missing_words", "seconds_words"]

LATENCIES = 20  # the latest ones, of which the median is shown
POINTS = 128  # of a curve

_COUNTDOWN = re.compile(r"\bin [\d.,]+ s$")


class Curve:
    """Values of a whole run, evenly spread, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._every = self._since = 1
        self._last: float | None = None

    def add(self, value: float) -> None:
        self._last, self._since = value, self._since + 1
        if self._since >= self._every:
            self._since, self._last = 0, None
            self._kept.append(value)
            if len(self._kept) > POINTS:
                self._kept, self._every = self._kept[::-2][::-1], 2 * self._every

    @property
    def values(self) -> Sequence[float]:
        """From the first to the latest."""
        return self._kept if self._last is None else [*self._kept, self._last]


class Progress:
    """The state of a run as far as it has been told.

    Parameters
    ----------
    name
        The experiment's.
    rounds
        T, as configured; the events say it again.
    budget
        ε, if privacy was asked for.
    """

    def __init__(self, name: str, rounds: int, budget: float | None = None) -> None:
        self.name, self.of, self.budget = name, rounds, budget
        self.round = 0
        self.address = self.run_id = self.run_dir = ""
        self.note = "starting"
        self.wait: tuple[str, float] | None = None  # message, and when it ends
        self.answered = self.clients = 0
        self.missing: Sequence[int] = ()
        self.epsilon: float | None = None
        self.wiretap = False
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.segments: Mapping[str, float] = {}  # of the last round
        self.evaluated: tuple[int, float] | None = None  # round, accuracy
        self.accuracies, self.epsilons = Curve(), Curve()
        self.live: int | None = None
        self.refusals: Mapping[str, int] = {}
        self.status_url = ""
        self.faults: Counter[str] = Counter()
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
                self.evaluated = event["round"], event["accuracy"]
                self.accuracies.add(event["accuracy"])
            case "refusals":
                self.refusals = event["counts"]
            case "status_page":
                self.status_url = event.get("operator_url") or event["url"]
            case "warning" | "client_error" | "suspended" as kind:
                self.faults[kind] += 1
            case "end":
                self.end = event["status"], event["message"]
                self.wait = None

    def _take_round(self, event: dict[str, Any]) -> None:
        self.wait, self.note = None, ""
        self.round, self.of = event["round"], event["of"]
        self.latencies.append(event["latency_s"])
        self.answered, self.clients, self.missing = event["answered"], event["clients"], event["missing"]
        self.epsilon = event["epsilon"]
        if self.epsilon is not None:
            self.epsilons.add(self.epsilon)
        self.segments, self.live = event.get("segments") or {}, event.get("live")

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
        if self.evaluated is None:
            return "not evaluated yet"
        round_id, accuracy = self.evaluated
        return f"{accuracy:.1%} (round {round_id})"

    def privacy_words(self) -> str:
        if self.wiretap:
            return "NOT PRIVATE: the wiretap is on"
        if self.epsilon is not None:
            return f"ε = {self.epsilon:.3g} spent"
        return "no DP" if self.latencies else "–"  # a resumed run has rounds behind it that told us nothing

    def spent_words(self) -> str:
        """:meth:`privacy_words`, with the budget."""
        if self.budget is None or self.epsilon is None or self.wiretap:
            return self.privacy_words()
        return f"ε = {self.epsilon:.3g} of {self.budget:.4g} spent"

    def refusals_words(self) -> str:
        """``late 3, stale_round 1``, the most frequent first."""
        counts = sorted(self.refusals.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind} {count}" for kind, count in counts) or "none"

    @property
    def num_warnings(self) -> int:
        """Warnings of any kind."""
        return self.faults.total()

    def faults_words(self) -> str:
        """``3 warnings, 1 client error``; empty when there were none."""
        names = {"warning": "warning", "suspended": "suspension", "client_error": "client error"}
        return ", ".join(
            f"{self.faults[kind]} {name}{'s' * (self.faults[kind] > 1)}"
            for kind, name in names.items()
            if self.faults[kind]
        )

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

"""What the page says, made of what happened; one thread uses it.

Two parts: the public one has what ``public/summary.json`` may have and nothing else; the operator's has the rest.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

from common.errors import publicly
from ps.privacy.odometer import odometer
from ps.reader import RunReader
from ps.records import RefusalCount, RoundMetrics
from ps.status.curve import MOST, Curve
from ps.status.facts import RunFacts
from ps.status.members import Look, rows_of

__all__ = ["RECENT", "View"]

RECENT = 40
"""Rounds whose phases are shown."""

_LATENCIES = 20
_WARNINGS, _LONGEST = 5, 400
_WATERFALL_CLIENTS = 40
_RUNNING, _FINISHING, _STOPPED = "running", "finishing", "stopped"


class View:
    """The state of a run, as far as its page shows it.

    Parameters
    ----------
    facts
        What was fixed before; :meth:`remember` adds what earlier lives of the run recorded.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self.round = facts.ledger.next_round
        self.accuracy, self.spent = Curve(), Curve()
        self.latest: RoundMetrics | None = None
        self.recent: deque[RoundMetrics] = deque(maxlen=RECENT)
        self._claim = facts.claim(0)
        self._end: tuple[str, str] | None = None
        self._wait: tuple[str, float] | None = None
        self._suspended: dict[int, float] = {}
        self._warnings: deque[str] = deque(maxlen=_WARNINGS)

    # ---------------------------------------------------------------- learning

    def remember(self, rounds: Sequence[RoundMetrics], reader: RunReader) -> None:
        """What the run folder tells of rounds before this life of the parameter server."""
        budget, done = self._facts.budget, self._facts.ledger.next_round
        if budget is not None:
            places = sorted({round(k * done / (MOST // 4)) for k in range(MOST // 4 + 1)})
            self.spent = Curve(zip(places, odometer(self._facts.ledger, budget, places), strict=True))
        for record in reader.evaluations():
            self.accuracy.add(record.round_id, record.accuracy)
        for metrics in rounds[-RECENT:]:
            self.take_round(metrics)
        self.refresh_claim(reader)

    def refresh_claim(self, reader: RunReader) -> None:
        """A model that was late changes what the run may claim."""
        if self._facts.on_schedule:
            self._claim = self._facts.claim(reader.late_models())

    def take_round(self, metrics: RoundMetrics) -> None:
        """A round was published."""
        self.latest = metrics
        self.recent.append(replace(metrics, spans=()))
        self.round = max(self.round, metrics.round_id + 1)

    def take_event(self, event: Mapping[str, Any], now: float) -> None:
        """Something was reported; what is unknown teaches nothing."""
        match event.get("event"):
            case "round":
                self._wait = None
                self.round = max(self.round, int(event["round"]))
                if event["epsilon"] is not None:
                    self.spent.add(int(event["round"]), float(event["epsilon"]))
            case "evaluation":
                self.accuracy.add(int(event["round"]), float(event["accuracy"]))
            case "wait":
                self._wait = str(event["message"]), now + float(event["seconds"])
            case "suspended":
                self._suspended[int(event["client"])] = now + float(event["seconds"])
                self._warnings.append(str(event["message"])[:_LONGEST])
            case "warning" | "client_error":
                self._warnings.append(str(event["message"])[:_LONGEST])
            case "end":
                self._end, self._wait = (str(event["status"]), str(event["message"])), None

    def stop(self) -> None:
        """Nothing more will come; without a reported end, nobody knows how the run ended."""
        if self._end is None:
            self._end, self._wait = (_STOPPED, "the parameter server has stopped"), None

    # ---------------------------------------------------------------- telling

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def epsilon(self) -> float | None:
        """Spent by the releases so far; None without DP."""
        return self.spent.last[1] if self.spent.last else None

    def public(self) -> dict[str, Any]:
        """For everybody: functions of what was released, and of the public configuration."""
        facts, federation = self._facts, self._facts.experiment.federation
        status = self._end[0] if self._end else _FINISHING if self.round >= facts.rounds else _RUNNING
        return {
            "run_id": facts.run_id,
            "status": status,
            "message": _sentence(status),
            "ended": self.ended,
            "round": self.round,
            "rounds": facts.rounds,
            "clients": federation.clients,
            "byzantine": federation.byzantine,
            "rule": facts.rule,
            "parameters": facts.parameters,
            "accuracy": _finite(self.accuracy.points),
            "privacy": self._claim | {"spent": _finite(self.spent.points)},
        }

    def operator(self, now: float, look: Look | None, refusals: Sequence[RefusalCount]) -> dict[str, Any]:
        """For the operator: the public part, and ``operator`` with everything measured."""
        latencies = [metrics.latency_s for metrics in self.recent][-_LATENCIES:]
        latency_s = median(latencies) if latencies else None
        left = max(0, self._facts.rounds - self.round)
        members, more = self._members(now, look, refusals)
        by_kind: Counter[str] = Counter()
        for refusal in refusals:
            by_kind[refusal.kind] += refusal.count
        return self.public() | {
            "operator": {
                "now": time.time(),
                "end": self._end[1] if self._end else None,
                "wait": None if self._wait is None else [self._wait[0], max(0.0, self._wait[1] - now)],
                "latency_s": latency_s,
                "left_s": None if latency_s is None or self.ended else left * latency_s,
                "answered": self.latest.answered if self.latest else None,
                "live": look.live if look else None,
                "members": members,
                "members_left_out": more,
                "recent": [
                    {"round": m.round_id, "latency_s": m.latency_s, "segments": dict(m.segments)} for m in self.recent
                ],
                "waterfall": self._waterfall(),
                "refusals": sorted(by_kind.items(), key=lambda item: (-item[1], item[0])),
                "warnings": list(self._warnings),
            }
        }

    def _members(
        self, now: float, look: Look | None, refusals: Sequence[RefusalCount]
    ) -> tuple[list[dict[str, Any]] | None, int]:
        if look is None:
            return None, 0
        missed = Counter(client_id for metrics in self.recent for client_id in metrics.missing)
        refused: Counter[int] = Counter()
        for refusal in refusals:
            if refusal.client_id is not None:
                refused[refusal.client_id] += refusal.count
        suspended = {client_id: until - now for client_id, until in self._suspended.items()}
        return rows_of(look, self._facts.clients, suspended=suspended, missed=missed, refusals=refused)

    def _waterfall(self) -> dict[str, Any] | None:
        """The spans of the last round, of the clients that took longest."""
        latest = self.latest
        if latest is None:
            return None
        ends: dict[int, float] = {}
        spans = [span for span in latest.spans if span.client_id is not None]
        for span in spans:
            client_id = -1 if span.client_id is None else span.client_id
            ends[client_id] = max(ends.get(client_id, 0.0), span.start_s + span.seconds)
        shown = sorted(ends, key=lambda client_id: (-ends[client_id], client_id))[:_WATERFALL_CLIENTS]
        return {
            "round": latest.round_id,
            "latency_s": latest.latency_s,
            "segments": dict(latest.segments),
            "clients": sorted(shown),
            "left_out": len(ends) - len(shown),
            "spans": [
                [span.name, span.client_id, round(span.start_s, 6), round(span.seconds, 6), span.num_bytes]
                for span in spans
                if span.client_id in shown
            ],
        }


def _sentence(status: str) -> str:
    match status:
        case "running":
            return "the run is going on"
        case "finishing":
            return "all rounds are done; the final model is being evaluated"
        case "stopped":
            return "the parameter server has stopped"
    try:
        return publicly(status)
    except KeyError:
        return status


def _finite(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    return [[x, y] for x, y in points if isfinite(y)]

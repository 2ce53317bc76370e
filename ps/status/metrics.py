"""The figures for Prometheus, in a registry of their own. Nothing here is by client. docs/monitoring.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ps.records import RefusalCount, RoundMetrics
from ps.status.view import View

__all__ = ["CONTENT_TYPE", "Exposition"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds."""


class Exposition:
    """Everything of one run, those of its rounds that an earlier life of the parameter server recorded included.

    Parameters
    ----------
    view
        Where round, ε and accuracy are read when somebody asks.
    rounds
        T.
    """

    def __init__(self, run_id: str, view: View, rounds: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry(auto_describe=False)
        self._round = Histogram(
            "byzuldp_round_seconds",
            "From one model to the next.",
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._segment = Histogram(
            "byzuldp_segment_seconds",
            "Parts of a round that follow one another and add up to it.",
            ["phase"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._run_id, self._view, self._rounds = run_id, view, rounds
        self._count = self._down = self._up = 0
        self._live: int | None = None
        self._refusals: Sequence[RefusalCount] = ()
        self._registry.register(self)

    def observe(self, metrics: RoundMetrics) -> None:
        """A round was published."""
        self._round.observe(metrics.latency_s)
        for phase, seconds in metrics.segments.items():
            self._segment.labels(phase).observe(seconds)
        self._count += 1
        self._down += metrics.bytes_down
        self._up += metrics.bytes_up

    def text(self, live: int | None, refusals: Sequence[RefusalCount]) -> bytes:
        """In Prometheus' text format."""
        self._live, self._refusals = live, refusals
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """What is not a histogram; a value that is not known has no sample."""
        view = self._view
        yield InfoMetricFamily("byzuldp_run", "Which run this is.", value={"run_id": self._run_id})
        answers = view.latest.answered if view.latest else None
        accuracy = view.accuracy.last[1] if view.accuracy.last else None
        for name, value, about in (
            ("byzuldp_round", view.round, "Rounds published so far."),
            ("byzuldp_rounds_planned", self._rounds, "Rounds of the whole run."),
            ("byzuldp_live_members", self._live, "Identities that are alive."),
            ("byzuldp_answers", answers, "Identities that answered in the last round."),
            ("byzuldp_epsilon", view.epsilon, "Spent by the releases so far, from the ledger."),
            ("byzuldp_accuracy_ratio", accuracy, "Of the model that was evaluated last, on the test set."),
        ):
            family = GaugeMetricFamily(name, about)
            if value is not None and isfinite(value):
                family.add_metric([], value)
            yield family
        yield CounterMetricFamily("byzuldp_rounds", "Rounds that were recorded.", value=self._count)
        yield CounterMetricFamily("byzuldp_sent_bytes", "Models to clients.", value=self._down)
        yield CounterMetricFamily("byzuldp_received_bytes", "Momenta from clients.", value=self._up)
        refusals = CounterMetricFamily("byzuldp_refusals", "Messages that were refused.", labels=["kind"])
        by_kind: Counter[str] = Counter()
        for refusal in self._refusals:
            by_kind[refusal.kind] += refusal.count
        for kind, count in sorted(by_kind.items()):
            refusals.add_metric([kind], count)
        yield refusals

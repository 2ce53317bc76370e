"""Rounds as OpenTelemetry traces, as a collector receives them; and a collector that is slow, wrong or gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from ps import tracing
from ps.records import RoundMetrics, Span
from ps.tracing import Tracing

pytest.importorskip("opentelemetry.sdk")
from collector import Collector, attributes
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ReceivedSpan

SEGMENTS = {"open": 0.001, "first": 0.2, "collect": 0.25, "grace": 0.0, "commit": 0.0125, "publish": 0.0365}
LATENCY_S = 0.5
SPANS = (
    Span("download", 3, 0.125, 0.25, 104_040),
    Span("training", 3, -0.25, 0.5),
    Span("upload", 4, 0.25, 0.125, 104_040),
    Span("noise", None, 0.125, 0.0625),
)
BEGAN_AT = 1_700_000_000.25


def metrics(round_id: int = 0) -> RoundMetrics:
    began_at = BEGAN_AT + round_id
    return RoundMetrics(round_id, began_at, LATENCY_S, SEGMENTS, 4, (7,), 1000, 2000, SPANS)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def sent(collector: Collector, *rounds: RoundMetrics) -> list[ReceivedSpan]:
    traces = Tracing(collector.address)
    traces.start("ab12")
    for record in rounds:
        traces.observe(record)
    traces.close()
    return collector.spans


def test_a_round_is_a_span_and_its_segments_below_it_add_up_to_it(collector: Collector) -> None:
    spans = sent(collector, metrics())
    (root,) = [span for span in spans if not span.parent_span_id]
    assert (root.name, root.start_time_unix_nano) == ("round", 1_700_000_000_250_000_000)
    assert root.end_time_unix_nano - root.start_time_unix_nano == LATENCY_S * 1e9
    assert attributes(root) == {
        "byzuldp.round": 0,
        "byzuldp.answered": 4,
        "byzuldp.missing": 1,
        "byzuldp.bytes_down": 1000,
        "byzuldp.bytes_up": 2000,
    }
    assert all(span.parent_span_id == root.span_id for span in spans if span is not root)
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert len({span.span_id for span in spans}) == len(spans)
    segments = [span for span in spans if attributes(span).get("byzuldp.kind") == "segment"]
    assert [span.name for span in segments] == [name for name, seconds in SEGMENTS.items() if seconds]
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in segments)]
    assert [span.start_time_unix_nano for span in segments] == ends[:-1]
    assert ends[-1] == root.end_time_unix_nano


def test_a_clients_spans_say_whose_they_are_how_much_travelled_and_what_nobody_has_verified(
    collector: Collector,
) -> None:
    spans = [span for span in sent(collector, metrics(5)) if attributes(span).get("byzuldp.kind") == "span"]
    found = [{**attributes(span), "name": span.name} for span in spans]
    common = {"byzuldp.kind": "span", "byzuldp.round": 5}
    assert found == [
        {**common, "name": "download", "byzuldp.client": 3, "byzuldp.bytes": 104_040},
        {**common, "name": "training", "byzuldp.client": 3, "byzuldp.unverified": True},
        {**common, "name": "upload", "byzuldp.client": 4, "byzuldp.bytes": 104_040},
        {**common, "name": "noise drawn"},
    ]
    began = 1_700_000_005_250_000_000
    times = [(span.start_time_unix_nano - began, span.end_time_unix_nano - began) for span in spans]
    assert times == [(span.start_s * 1e9, (span.start_s + span.seconds) * 1e9) for span in SPANS]


def test_each_round_is_a_trace_of_its_own_sent_at_once_and_named_after_the_run(collector: Collector) -> None:
    spans = sent(collector, metrics(0), metrics(1), metrics(2))
    assert len({span.trace_id for span in spans}) == len(collector.requests) == 3
    for path, request in collector.requests:
        assert path == "/v1/traces"
        about = {item.key: item.value.string_value for item in request.resource_spans[0].resource.attributes}
        assert (about["service.name"], about["service.instance.id"]) == ("byzuldp", "ab12")


def test_rounds_that_a_slow_collector_cannot_keep_up_with_are_dropped_counted_and_told_once(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "QUEUED", 4)
    collector.open.clear()
    traces = Tracing(collector.address)
    traces.start("ab12")
    for round_id in range(50):
        traces.observe(metrics(round_id))  # were it to wait for the collector, this would never end
    collector.open.set()
    traces.close()
    assert 3 <= len(collector.requests) <= 5  # those that were queued, and one that was on its way
    slow, missing = caplog.messages
    assert "too slow" in slow
    assert missing.startswith(f"{50 - len(collector.requests)} rounds are missing")


@pytest.mark.parametrize("how", ["gone", "refusing", "silent"])
def test_a_run_goes_on_and_ends_without_its_collector_and_says_so_once(
    collector: Collector, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "REQUEST_S", 0.2)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.3)
    collector.code = 403
    if how == "gone":
        collector.close()
    elif how == "silent":
        collector.open.clear()
    traces = Tracing(collector.address)
    traces.start("ab12")
    for round_id in range(3):
        traces.observe(metrics(round_id))
    time.sleep(0.3)
    traces.close()
    complaint, missing = caplog.messages
    assert "takes no traces" in complaint
    assert "3 rounds are missing" in missing


def test_nothing_is_sent_and_nothing_needed_where_no_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    traces = Tracing("")
    traces.start("ab12")
    traces.observe(metrics())
    traces.close()
    assert traces._thread is None


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"byzuldp\[otel\]"):
        Tracing("http://localhost:4318")


@pytest.mark.parametrize("address", ["collector:4318", "grpc://collector:4317", "http://", "http://x:port", "x"])
def test_what_is_no_address_of_a_collector_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.otlp"):
        Tracing(address)


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_the_usual_path_is_added_where_there_is_none(address: str, endpoint: str) -> None:
    assert tracing._endpoint(address) == endpoint


@pytest.mark.parametrize(
    ("address", "warns"),
    [("http://collector:4318", True), ("http://10.0.0.7:4318", True)]
    + [
        (f"{safe}:4318", False)
        for safe in ("https://collector", "http://localhost", "http://127.0.0.2", "http://[::1]")
    ],
)
def test_times_of_single_clients_do_not_travel_in_the_open_without_a_word(
    address: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    traces = Tracing(address)
    traces.start("ab12")
    traces.close()
    assert any("unencrypted" in message for message in caplog.messages) == warns

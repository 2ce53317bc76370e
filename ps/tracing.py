"""Every round as an OpenTelemetry trace, for whoever has a collector: optional, and never in a round's way.

A round is a span from θ_t available to θ_{t+1} available. Below it are its segments, which follow one another and add
up to it, and what happened beside them: transfers, training, the drawing of noise. All of it is made from the round's
record, once that is over, on a thread of its own; what the thread cannot keep up with is dropped and counted. Spans of
clients tell about single clients, so a collector is the operator's.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.errors import ConfigError
from ps.records import RoundMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Tracing"]

log = logging.getLogger("byzuldp.ps.tracing")

QUEUED = 64  # rounds that wait for the thread
REQUEST_S, CLOSE_S = 5.0, 3.0
PATH = "/v1/traces"
NANO = 1e9
NAMES = {"noise": "noise drawn"}  # the segment of that name is the wait for it


class Tracing:
    """Sends rounds to a collector.

    Parameters
    ----------
    address
        ``http://host:4318`` of a collector that speaks OTLP over HTTP; ``/v1/traces`` is added where there is no path.
        Empty: nothing is sent, and OpenTelemetry need not be installed.

    Raises
    ------
    ConfigError
        The address is none, or OpenTelemetry is not installed.
    """

    def __init__(self, address: str) -> None:
        self._address = _endpoint(address) if address else ""
        if address:
            _refuse_without_packages()
        self._queue: queue.Queue[RoundMetrics | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._observed = self._sent = 0
        self._late = False
        self._stop_at = float("inf")

    def start(self, run_id: str) -> None:
        """Begin; the rounds of this run are given to :meth:`observe`."""
        if not self._address:
            return
        if not _is_encrypted_or_local(self._address):
            log.warning("times of single clients travel unencrypted to %s; use https to keep them", self._address)
        self._thread = threading.Thread(target=self._send_all, args=(run_id,), name="tracing", daemon=True)
        self._thread.start()

    def observe(self, metrics: RoundMetrics) -> None:
        """Take a round's record; returns at once."""
        if self._thread is None:
            return
        self._observed += 1
        try:
            self._queue.put_nowait(metrics)
        except queue.Full:
            if not self._late:
                self._late = True
                log.warning("the collector at %s is too slow: rounds are left out of its traces", self._address)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most."""
        if self._thread is None:
            return
        self._stop_at = time.monotonic() + CLOSE_S
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:  # the end has to be told, so one more round is not
                with suppress(queue.Empty):
                    self._queue.get_nowait()
        self._thread.join(CLOSE_S + 0.5)
        if missing := self._observed - self._sent:
            log.warning("%d rounds are missing in the traces at %s", missing, self._address)
        self._thread = None

    def _send_all(self, run_id: str) -> None:
        try:
            exporter = _Exporter(self._address, run_id)
        except Exception as defect:  # for instance a certificate that OTEL_… names, and that cannot be read
            log.warning("no traces are sent to %s: %s", self._address, defect)
            return
        complained = False
        while (metrics := self._queue.get()) is not None:
            problem = exporter.send(metrics) if time.monotonic() < self._stop_at else "no time is left"
            self._sent += not problem
            if problem and not complained and time.monotonic() < self._stop_at:
                log.warning("the collector at %s takes no traces (%s); the run goes on", self._address, problem)
            complained = complained or bool(problem)
        exporter.close()


class _Exporter:
    """OpenTelemetry, all of it.

    Spans are made whole, as a tracer would leave them: a tracer's own would take twice as long, and ids from the
    process's common random state, which is not ours to change.
    """

    def __init__(self, address: str, run_id: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._said = _LastWords()
        self._resource = Resource.create({"service.name": "byzuldp", "service.instance.id": run_id})
        self._scope = InstrumentationScope("byzuldp.ps")
        self._exporter = OTLPSpanExporter(endpoint=address, timeout=REQUEST_S)

    def send(self, metrics: RoundMetrics) -> str:
        """One round; returns what went wrong, if anything did."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._said.message = ""
        try:
            done = self._exporter.export(self._spans(metrics))
        except Exception as problem:  # whatever a collector answers, and whatever becomes of it: a round is no worse
            return f"{type(problem).__name__}: {problem}"
        return "" if done is SpanExportResult.SUCCESS else self._said.message or "it was refused"

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._said.close()

    def _spans(self, metrics: RoundMetrics) -> Sequence[ReadableSpan]:
        """The round, its segments, and its spans."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        trace_id, flags = secrets.randbits(128) or 1, TraceFlags(TraceFlags.SAMPLED)
        root = SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=flags)
        whole, rest = divmod(metrics.started_at, 1.0)
        began = int(whole) * int(NANO) + round(rest * NANO)

        def span(name: str, start_s: float, end_s: float, attributes: dict[str, Any], is_root: bool = False) -> None:
            own = SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=flags)
            spans.append(
                ReadableSpan(
                    name,
                    context=root if is_root else own,
                    parent=None if is_root else root,
                    resource=self._resource,
                    attributes=attributes,
                    instrumentation_scope=self._scope,
                    start_time=began + round(start_s * NANO),
                    end_time=began + round(end_s * NANO),
                )
            )

        spans: list[ReadableSpan] = []
        facts = {
            "byzuldp.round": metrics.round_id,
            "byzuldp.answered": metrics.answered,
            "byzuldp.missing": len(metrics.missing),
            "byzuldp.bytes_down": metrics.bytes_down,
            "byzuldp.bytes_up": metrics.bytes_up,
        }
        span("round", 0.0, metrics.latency_s, facts, is_root=True)
        at = 0.0
        for name, seconds in metrics.segments.items():
            if seconds > 0.0:
                span(name, at, at + seconds, {"byzuldp.kind": "segment", "byzuldp.round": metrics.round_id})
            at += seconds
        for name, client_id, start_s, seconds, num_bytes in metrics.spans:
            about: dict[str, Any] = {"byzuldp.kind": "span", "byzuldp.round": metrics.round_id}
            if client_id is not None:
                about["byzuldp.client"] = client_id
            if num_bytes:
                about["byzuldp.bytes"] = num_bytes
            if name == "training":
                about["byzuldp.unverified"] = True
            span(NAMES.get(name, name), start_s, start_s + seconds, about)
        return spans


class _LastWords(logging.Handler):
    """What OpenTelemetry logs last: why a collector did not take what it was sent. It is not printed for each round."""

    def __init__(self) -> None:
        super().__init__()
        self.message = ""
        self._logger = logging.getLogger("opentelemetry")
        self._before = self._logger.propagate
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.message = " ".join(record.getMessage().split())[:300]

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._before
        super().close()


def _endpoint(address: str) -> str:
    """Where traces are posted to.

    Raises
    ------
    ConfigError
        It is no address of a collector.
    """
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        valid = False
    if not valid:
        raise ConfigError(
            f"monitoring.otlp = {address!r}: expected the address of an OpenTelemetry collector that takes OTLP over "
            "HTTP, for instance http://localhost:4318"
        )
    return address if parts.path.strip("/") else f"{address.rstrip('/')}{PATH}"


def _refuse_without_packages() -> None:
    """Refuse to go on without OpenTelemetry.

    Raises
    ------
    ConfigError
        It is not installed.
    """
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as missing:
        raise ConfigError(
            f"monitoring.otlp is set, and OpenTelemetry is not installed ({missing}): pip install 'byzuldp[otel]', or "
            "leave it out"
        ) from missing


def _is_encrypted_or_local(address: str) -> bool:
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return parts.scheme == "https" or local

"""A whole run's traces, as a collector receives them, against what the run recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.reader import RunReader

pytest.importorskip("opentelemetry.sdk")
from collector import Collector, attributes
from federations import ServerProcess, client_process, small_experiment

ROUNDS = 3


@pytest.mark.system  # for the time it takes
def test_every_round_of_a_run_is_a_trace_that_adds_up_to_what_was_recorded(tmp_path: Path) -> None:
    with Collector() as collector:
        experiment = small_experiment(training={"rounds": ROUNDS}, monitoring={"otlp": collector.address})
        with (
            ServerProcess(experiment, tmp_path).listening() as server,
            client_process(tmp_path, experiment, server.address, server.tokens()),
        ):
            server.finish()
        spans = collector.spans
    roots = {attributes(span)["byzuldp.round"]: span for span in spans if not span.parent_span_id}
    assert sorted(roots) == list(range(ROUNDS))
    reader = RunReader(server.run_dir)
    for record in reader.rounds():
        root = roots[record.round_id]
        below = [span for span in spans if span.parent_span_id == root.span_id]
        segments = [span for span in below if attributes(span)["byzuldp.kind"] == "segment"]
        took = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in (root, *segments)]
        assert took[0] == pytest.approx(record.latency_s, abs=1e-6)
        assert sum(took[1:]) == pytest.approx(took[0], abs=1e-6)
        assert len(below) - len(segments) == len(reader.spans(record.round_id))
        uploads = {attributes(span)["byzuldp.client"] for span in below if span.name == "upload"}
        assert uploads == set(range(5))

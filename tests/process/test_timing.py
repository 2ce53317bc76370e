"""What is recorded of a round's time is what an onlooker sees; a delay shows where it was, and there only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import ServerProcess, client_process, small_experiment, until
from stock_client import Federation

from ps.reader import RunReader
from ps.timing import SEGMENTS

DELAY_S = 0.2
ROOM_S = 0.1
"""For a machine that is busy with other things."""


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    network = {"grace_factor": 1.0, "grace_floor_s": 30.0}
    with ServerProcess(small_experiment(network=network), tmp_path).listening() as server:
        federation = Federation(server)
        yield federation
        federation.close()


def test_a_slow_upload_shows_in_its_span_and_in_the_wait_for_the_rest_and_nowhere_else(federation: Federation) -> None:
    round_id = federation.fresh_round()
    rows, slow = federation.rows(round_id), federation.clients[2]
    reader = RunReader(federation.server.run_dir)
    messages = slow.messages(round_id, rows[slow.client_id], chunk_bytes=8)
    push = slow.begin_push(messages[:2])
    federation.push_all(round_id, rows, but=[slow.client_id])
    began_at = time.monotonic()
    time.sleep(DELAY_S)
    push.send(*messages[2:])
    assert push.reply().HasField("accepted")
    waited_s = time.monotonic() - began_at
    until(lambda: len(reader.rounds()) > round_id, "the round to be recorded")

    record, spans = reader.rounds()[round_id], reader.spans(round_id)
    uploads = {span.client_id: span for span in spans if span.name == "upload"}
    assert set(uploads) == {client.client_id for client in federation.clients}
    assert uploads[slow.client_id].seconds >= DELAY_S
    assert all(upload.seconds < DELAY_S for who, upload in uploads.items() if who != slow.client_id)
    assert DELAY_S - 0.01 <= record.segments["grace"] <= waited_s + ROOM_S
    assert all(seconds < DELAY_S for name, seconds in record.segments.items() if name in SEGMENTS[4:])
    assert all(upload.num_bytes == 4 * federation.server.num_parameters for upload in uploads.values())


def test_the_latency_is_what_a_client_sees_from_one_model_to_the_next(federation: Federation) -> None:
    client, reader = federation.clients[0], RunReader(federation.server.run_dir)
    seen: list[float] = []
    first = federation.fresh_round()
    for round_id in range(first, first + 6):
        client.pull(round_id)
        seen.append(time.monotonic())
        federation.push_all(round_id, federation.rows(round_id))
    client.pull(first + 6)
    seen.append(time.monotonic())
    until(lambda: len(reader.rounds()) > first + 5, "the rounds to be recorded")
    recorded = sum(record.latency_s for record in reader.rounds()[first : first + 6])
    assert abs(recorded - (seen[-1] - seen[0])) < 6 * 0.05 + ROOM_S


def test_real_clients_tell_how_long_they_computed_and_all_of_it_adds_up(tmp_path: Path) -> None:
    experiment = small_experiment(training={"rounds": 4})
    with (
        ServerProcess(experiment, tmp_path).listening() as server,
        client_process(tmp_path, experiment, server.address, server.tokens()),
    ):
        server.finish()
    reader = RunReader(server.run_dir)
    for record in reader.rounds():
        assert [name for name in SEGMENTS if name in record.segments] == list(record.segments)
        assert sum(record.segments.values()) == pytest.approx(record.latency_s, abs=1e-6)
        spans = reader.spans(record.round_id)
        for name in ("training", "upload", "conditioning"):
            assert {span.client_id for span in spans if span.name == name} == set(range(5))
        assert any(span.name == "download" for span in spans)  # one for the process
        assert all(0.0 < span.seconds < record.latency_s for span in spans if span.name == "training")

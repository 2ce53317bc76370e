"""One call that brings the models of all rounds, to a client made of the generated stubs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import ServerProcess, small_experiment
from stock_client import CALL_S, Federation, Row, StockClient

from common.rpc.digests import digest_of
from common.rpc.v1 import parameter_server_pb2 as pb


@contextmanager
def following(client: StockClient, round_id: int) -> Iterator[Any]:
    """The messages of a PullModel call that goes on."""
    request = pb.PullModelRequest(caller=client.caller, round_id=round_id, wait_s=CALL_S, follow=True)
    call = client.stub.PullModel(request, timeout=4 * CALL_S)
    try:
        yield call
    finally:
        call.cancel()


def next_model(messages: Iterator[pb.ModelMessage]) -> tuple[pb.ModelHeader, Row]:
    """One model of the call, whole; or another answer."""
    message = next(messages)
    header, payload = message.header, message.payload
    while header.HasField("model") and not message.HasField("trailer"):
        message = next(messages)
        payload += message.payload
    if header.HasField("model"):
        assert message.trailer.digest == digest_of(payload)
    return header, np.frombuffer(payload, dtype="<f4")


def answered(federation: Federation, round_id: int) -> None:
    """Everybody answers a round."""
    for client, row in zip(federation.clients, federation.rows(round_id), strict=True):
        client.send(client.messages(round_id, row))


def test_the_call_brings_every_model_once_its_round_is_open(federation: Federation, round_id: int) -> None:
    with following(federation.clients[0], round_id) as messages:
        for later in range(round_id, round_id + 4):
            header, theta = next_model(messages)
            assert header.model.round_id == later
            assert theta.tobytes() == federation.model(later).astype("<f4").tobytes()
            answered(federation, later)


def test_a_call_without_follow_ends_after_one_model(federation: Federation, round_id: int) -> None:
    assert [message.header.model.round_id for message in federation.clients[0].pull_messages(round_id)] == [round_id]


def test_who_is_superseded_is_told_so_before_the_next_model(federation: Federation, round_id: int) -> None:
    client = federation.clients[0]
    with following(client, round_id) as messages:
        assert next_model(messages)[0].HasField("model")
        again = StockClient(federation.server, client.client_id)
        with closing(again):
            again.join()
            for other, row in zip([again, *federation.clients[1:]], federation.rows(round_id), strict=True):
                other.send(other.messages(round_id, row))
            header, _ = next_model(messages)
            assert header.refusal.kind == pb.SUPERSEDED
            assert list(messages) == []


def test_who_reads_late_gets_the_models_that_were_sent_meanwhile(federation: Federation, round_id: int) -> None:
    with following(federation.clients[0], round_id) as messages:
        for later in range(round_id, round_id + 5):
            federation.model(later)
            answered(federation, later)
        federation.model(round_id + 5)
        seen = [next_model(messages)[0].model.round_id for _ in range(2)]
        while seen[-1] < round_id + 5:
            seen.append(next_model(messages)[0].model.round_id)
    assert seen == sorted(set(seen))
    assert seen[0] == round_id


def test_a_call_ends_with_how_the_run_ended(tmp_path: Path) -> None:
    experiment = small_experiment(training={"rounds": 2})
    with ServerProcess(experiment, tmp_path) as process:
        crowd = Federation(process.listening())
        with following(crowd.clients[0], 0) as messages:
            for round_id in range(2):
                assert next_model(messages)[0].model.round_id == round_id
                answered(crowd, round_id)
            header, _ = next_model(messages)
        assert (header.run_finished.status, header.run_finished.releases) == ("completed", 2)
        crowd.close()


def test_a_stranger_follows_nobody(server: ServerProcess) -> None:
    stranger = StockClient(server, 0)
    with closing(stranger), following(stranger, 0) as messages:
        assert next_model(messages)[0].refusal.kind == pb.NOT_A_MEMBER


@pytest.mark.parametrize("waits", [0.0, 0.2])
def test_a_round_that_does_not_open_is_not_yet_and_ends_the_call(
    federation: Federation, round_id: int, waits: float
) -> None:
    client = federation.clients[0]
    request = pb.PullModelRequest(caller=client.caller, round_id=round_id + 1000, wait_s=waits, follow=True)
    (message,) = client.stub.PullModel(request, timeout=CALL_S)
    assert message.header.HasField("not_yet")

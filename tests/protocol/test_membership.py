"""Joining, attending, leaving; identities and their lives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from federations import ServerProcess, small_experiment, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stock_client import CALL_S, Attendance, Federation, StockClient

from common.rpc.methods import PARAMETER_SERVER
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb

REFUSED_TO_JOIN = {
    "an_older_protocol": ({"protocol_version": 0}, pb.PROTOCOL_VERSION, None),
    "a_newer_protocol": ({"protocol_version": 2}, pb.PROTOCOL_VERSION, None),
    "another_run": ({"run_id": "0123456789abcdef"}, pb.WRONG_RUN, None),
    "an_identity_off_the_roster": ({"client_id": 5}, pb.UNKNOWN_CLIENT, None),
    "no_token": ({"token": ""}, pb.BAD_TOKEN, None),
    "a_token_that_is_not_ascii": ({"token": "clé"}, pb.BAD_TOKEN, None),
    "another_configuration": ({"fingerprint": "0" * 64}, pb.CONFIGURATION, 4),
    "another_model": ({"schema_hash": b"\0" * 32}, pb.WRONG_SCHEMA, 4),
}


@pytest.mark.parametrize("asked", REFUSED_TO_JOIN)
def test_a_join_is_refused_by_name_and_the_older_incarnation_stays(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient, asked: str
) -> None:
    changes, kind, culprit = REFUSED_TO_JOIN[asked]
    before = server.refusals(culprit)
    refusal = client.try_to_join(**changes).refusal
    assert (kind_name(refusal.kind), bool(refusal.message)) == (kind_name(kind), True)
    assert server.refusals(culprit) - before == {kind_name(kind): 1}
    client.push_accepted(round_id, federation.rows(round_id)[-1])


def test_the_token_of_one_identity_does_not_open_another(server: ServerProcess, client: StockClient) -> None:
    assert client.try_to_join(token=server.tokens()[3]).refusal.kind == pb.BAD_TOKEN


def test_a_join_says_what_the_public_configuration_is_and_never_where_the_data_lies(
    server: ServerProcess, client: StockClient
) -> None:
    public = json.loads(client.try_to_join().public_configuration)
    assert public == json.loads(json.dumps(server.experiment.public()))
    assert not {"data.root", "model.init_from", "attack.name"} & public.keys()


def test_a_client_need_not_know_the_run_id_beforehand(server: ServerProcess, client: StockClient) -> None:
    joined = client.try_to_join(run_id="").joined
    assert joined.run_id == server.run_id
    assert len(joined.incarnation) == 16
    assert joined.chunk_bytes == server.experiment.network.chunk_bytes


def test_every_join_is_another_incarnation(federation: Federation) -> None:
    client = federation.clients[0]
    assert len({client.join().incarnation for _ in range(5)}) == 5


def test_a_join_names_the_round_to_start_at(federation: Federation, round_id: int, client: StockClient) -> None:
    assert client.join().next_round == round_id


def test_a_second_join_evicts_the_older_incarnation_and_takes_its_place_in_the_same_round(
    server: ServerProcess, federation: Federation, client: StockClient
) -> None:
    older = StockClient(server, client.client_id)
    older.caller = client.caller
    stream = federation.attended(older)
    try:
        round_id = federation.fresh_round()
        theta, rows = federation.model(round_id), federation.rows(round_id)
        client.join()
        assert stream.wait_for("evicted").client_id == client.client_id
        assert older.push(round_id, -rows[-1]).refusal.kind == pb.SUPERSEDED
        assert older.pull(round_id)[0].refusal.kind == pb.SUPERSEDED
        assert older.leave().refusal.kind == pb.SUPERSEDED
        federation.push_all(round_id, rows)
        federation.assert_round_is_mean_of(round_id, theta, rows)
    finally:
        stream.close()
        older.close()


def test_a_new_incarnation_gets_the_row_that_the_older_one_was_writing(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    messages = client.messages(round_id, -rows[-1], chunk_bytes=8)
    older = client.begin_push(messages[:3])
    client.join()
    client.push_accepted(round_id, rows[-1])
    older.send(*messages[3:])
    assert older.reply().refusal.kind == pb.SUPERSEDED
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_what_an_older_incarnation_completed_is_the_identitys_momentum(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    client.push_accepted(round_id, rows[-1])
    client.join()
    assert client.push_accepted(round_id, rows[-1]).duplicate
    assert client.push(round_id, -rows[-1]).refusal.kind == pb.EQUIVOCATION
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_who_has_left_must_join_before_anything_else(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    row = federation.rows(round_id)[-1]
    assert not client.leave().HasField("refusal")
    assert client.leave().refusal.kind == pb.NOT_A_MEMBER
    assert client.push(round_id, row).refusal.kind == pb.NOT_A_MEMBER
    assert client.pull(round_id)[0].refusal.kind == pb.NOT_A_MEMBER
    stream = client.attend()
    assert stream.wait_for("refusal").kind == pb.NOT_A_MEMBER
    stream.close()
    client.join()
    client.push_accepted(round_id, row)


def test_who_leaves_is_evicted_from_no_stream_of_others(federation: Federation, client: StockClient) -> None:
    neighbour = federation.clients[0]
    stream = federation.attended(client, neighbour)
    client.leave()
    client.join()
    neighbour.join()
    assert stream.wait_for("evicted").client_id == neighbour.client_id
    stream.close()


ATTENDS_BADLY = {
    "nobody": (pb.AttendRequest(attending=pb.Attending()), pb.MALFORMED),
    "a_heartbeat_first": (pb.AttendRequest(heartbeat=pb.Heartbeat()), pb.MALFORMED),
    "nothing_at_all": (pb.AttendRequest(), pb.MALFORMED),
    "more_than_there_are": (pb.AttendRequest(attending=pb.Attending(callers=[pb.Caller()] * 6)), pb.MALFORMED),
    "a_stranger": (
        pb.AttendRequest(attending=pb.Attending(callers=[pb.Caller(run_id="?", client_id=7)])),
        pb.WRONG_RUN,
    ),
}


@pytest.mark.parametrize("opening", ATTENDS_BADLY)
def test_an_attend_stream_that_opens_badly_is_refused_and_ends(
    server: ServerProcess, client: StockClient, opening: str
) -> None:
    message, kind = ATTENDS_BADLY[opening]
    before = server.refusals()
    (event,) = client.stub.Attend(iter([message]), timeout=CALL_S)
    assert event.refusal.kind == kind
    assert server.refusals() - before == {kind_name(kind): 1}


def test_garbage_on_every_call_is_refused_as_malformed_and_counted(server: ServerProcess, client: StockClient) -> None:
    before, garbage, channel = server.refusals(), b"\xff" * 9, client.channel

    def path(name: str) -> str:
        return f"/{PARAMETER_SERVER}/{name}"

    join = channel.unary_unary(path("Join"), None, pb.JoinReply.FromString)(garbage, timeout=CALL_S)
    leave = channel.unary_unary(path("Leave"), None, pb.LeaveReply.FromString)(garbage, timeout=CALL_S)
    pull = list(channel.unary_stream(path("PullModel"), None, pb.ModelMessage.FromString)(garbage, timeout=CALL_S))
    push = channel.stream_unary(path("PushMomentum"), None, pb.PushReply.FromString)(iter([garbage]), timeout=CALL_S)
    attend = list(
        channel.stream_stream(path("Attend"), None, pb.AttendEvent.FromString)(iter([garbage]), timeout=CALL_S)
    )
    refusals = [join.refusal, leave.refusal, pull[0].header.refusal, push.refusal, attend[0].refusal]
    assert [refusal.kind for refusal in refusals] == [pb.MALFORMED] * 5
    assert all(refusal.message for refusal in refusals)
    assert server.refusals() - before == {"malformed": 5}


def test_garbage_in_the_middle_of_an_attend_stream_is_refused_too(server: ServerProcess, client: StockClient) -> None:
    before = server.refusals()
    opening = pb.AttendRequest(attending=pb.Attending(callers=[client.caller])).SerializeToString()
    call = client.channel.stream_stream(f"/{PARAMETER_SERVER}/Attend", None, pb.AttendEvent.FromString)
    events = list(call(iter([opening, b"\xff" * 9]), timeout=CALL_S))
    assert events[-1].refusal.kind == pb.MALFORMED
    assert server.refusals() - before == {"malformed": 1}


def test_a_clients_fault_is_counted_and_shown_under_its_own_identity_only(
    server: ServerProcess, federation: Federation, client: StockClient
) -> None:
    before, shown = server.refusals(client.client_id), len(server.events("client_error"))
    stream = federation.attended(client)
    for culprit in (0, client.client_id):  # the first is not this stream's to speak for
        fault = pb.ClientError(client_id=culprit, round_id=3, kind="ValueError", message="a\nb\x1b[31m")
        stream.send(pb.AttendRequest(error=fault))
    until(lambda: server.refusals(client.client_id) - before == {"client_error": 1}, "the error to be counted")
    (event,) = server.events("client_error")[shown:]
    assert event["message"].startswith(f"client {client.client_id}, round 3: ValueError: a")
    assert event["message"].isprintable()
    stream.close()


def test_a_pull_waits_for_its_round_and_says_so_when_it_does_not_come(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    asked_at = time.monotonic()
    header, _ = client.pull(round_id + 1, wait_s=0.3)
    assert 0.3 <= time.monotonic() - asked_at < 5
    assert header.not_yet.round_id == round_id
    assert header.not_yet.waiting_for


def test_a_pull_of_a_round_gone_by_gets_the_open_one(federation: Federation, round_id: int) -> None:
    header, theta = federation.clients[1].pull(0)
    assert header.model.round_id == round_id
    np.testing.assert_array_equal(theta, federation.model(round_id))


def test_every_client_is_sent_the_same_bytes(federation: Federation, round_id: int) -> None:
    messages = [client.pull_messages(round_id) for client in federation.clients]
    assert all(message == messages[0] for message in messages)


def test_the_ledgers_head_goes_with_each_model_and_is_another_each_round(federation: Federation, round_id: int) -> None:
    heads = [federation.clients[0].pull(round_id)[0].model.ledger_head]
    federation.push_all(round_id, federation.rows(round_id))
    heads.append(federation.clients[0].pull(round_id + 1)[0].model.ledger_head)
    assert [len(head) for head in heads] == [32, 32]
    assert heads[0] != heads[1]


@pytest.mark.parametrize("service", [PARAMETER_SERVER, ""], ids=["parameter_server", "the_whole"])
def test_the_health_service_says_serving(client: StockClient, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_the_health_service_does_not_know_what_is_not_there(client: StockClient) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    with pytest.raises(grpc.RpcError) as failure:
        stub.Check(health_pb2.HealthCheckRequest(service="common.rpc.v1.Wiretap"), timeout=CALL_S)
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


# ---------------------------------------------------------------- liveness: a server that waits for all who live


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It closes a round when everyone alive has answered, and takes who is silent for two seconds for dead."""
    network = {"grace_floor_s": 30.0, "liveness_s": 2.0, "heartbeat_s": 0.2}
    experiment = small_experiment(federation={"quorum": 3}, network=network)
    with ServerProcess(experiment, tmp_path_factory.mktemp("patient")) as process:
        yield process.listening()


@pytest.fixture
def living(patient: ServerProcess) -> Iterator[tuple[Federation, Attendance, Attendance]]:
    """The members; the stream of the first four, and that of the last."""
    members = Federation(patient)
    four, last = members.clients[0].attend(*members.clients[1:4]), members.clients[4].attend()
    yield members, four, last
    four.close()
    last.close()
    members.close()


def test_a_round_waits_for_a_member_that_is_alive(living: tuple[Federation, Attendance, Attendance]) -> None:
    members, _, _ = living
    round_id = members.fresh_round()
    theta, rows = members.model(round_id), members.rows(round_id)
    members.push_all(round_id, rows, but=[4])
    assert members.clients[0].pull(round_id + 1, wait_s=1.5)[0].HasField("not_yet")
    members.clients[4].push_accepted(round_id, rows[4])
    members.assert_round_is_mean_of(round_id, theta, rows)


def test_a_round_does_not_wait_for_who_has_left(living: tuple[Federation, Attendance, Attendance]) -> None:
    members, _, _ = living
    round_id = members.fresh_round()
    theta, rows = members.model(round_id), members.rows(round_id)
    members.push_all(round_id, rows, but=[4])
    members.clients[4].leave()
    members.assert_round_is_mean_of(round_id, theta, rows[:4])


def test_a_round_does_not_wait_for_who_has_hung_up(living: tuple[Federation, Attendance, Attendance]) -> None:
    members, _, last = living
    round_id = members.fresh_round()
    theta, rows = members.model(round_id), members.rows(round_id)
    members.push_all(round_id, rows, but=[4])
    hung_up_at = time.monotonic()
    last.close()
    members.assert_round_is_mean_of(round_id, theta, rows[:4])
    assert time.monotonic() - hung_up_at < 1.2  # after two missed heartbeats; sooner than silence would tell


def test_who_falls_silent_is_not_waited_for_and_is_a_member_again_once_heard(
    living: tuple[Federation, Attendance, Attendance],
) -> None:
    members, _, last = living
    round_id = members.fresh_round()
    theta, rows = members.model(round_id), members.rows(round_id)
    members.push_all(round_id, rows, but=[4])
    last.fall_silent()
    members.assert_round_is_mean_of(round_id, theta, rows[:4])
    last.wait_for_end()  # the server gives a silent stream up

    silent = members.clients[4]
    revived = silent.attend()  # with the same incarnation: nothing has to be joined again
    try:
        until(lambda: not _closes_without(members, 4), "the silent member to be waited for again")
    finally:
        revived.close()


def _closes_without(members: Federation, client_id: int) -> bool:
    """Whether a round ends although one member has not answered; it answers when it does not."""
    round_id = members.fresh_round()
    rows = members.rows(round_id)
    members.push_all(round_id, rows, but=[client_id])
    closed = members.clients[0].pull(round_id + 1, wait_s=0.5)[0].HasField("model")
    if not closed:
        members.clients[client_id].push_accepted(round_id, rows[client_id])
    return closed

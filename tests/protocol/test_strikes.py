"""Who breaks the protocol again and again is out for a while; nobody else is, whatever the network does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from federations import ServerProcess, small_experiment, until
from stock_client import Federation, StockClient, trailer

from common.rpc.v1 import parameter_server_pb2 as pb

SUSPENSION_S = 1.5
MAX_REPEATS, MAX_JOINS = 4, 30
NETWORK = {
    "grace_floor_s": 600.0,  # a round that waits for somebody does not end here
    "strikes": 3,
    "strike_window_s": 1000.0,
    "suspension_s": SUSPENSION_S,
    "max_repeats": MAX_REPEATS,
    "max_joins": MAX_JOINS,
    "join_every_s": 1000.0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(small_experiment(network=NETWORK), tmp_path_factory.mktemp("strikes")) as process:
        yield process.listening()


@pytest.fixture(scope="module")
def everybody(server: ServerProcess) -> Iterator[Federation]:
    members = Federation(server)
    yield members
    members.close()


@pytest.fixture
def federation(everybody: Federation) -> Federation:
    """Clean strikes and everybody a member: a suspension cleans both, and so does joining again."""
    for client in everybody.clients:
        until(lambda client=client: join_again(client), "everybody to be in")
    return everybody


def join_again(client: StockClient) -> bool:
    """Be a member, unless it is suspended."""
    probe = client.pull_messages(0, 0.0)[0].header
    if not probe.HasField("refusal"):
        return True
    reply = client.try_to_join()
    if reply.HasField("joined"):
        client.caller = pb.Caller(
            run_id=reply.joined.run_id, client_id=client.client_id, incarnation=reply.joined.incarnation
        )
    return reply.HasField("joined")


def sends_another_digest(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send([*client.messages(round_id, row)[:-1], pb.MomentumMessage(trailer=trailer(row + 1))])


def sends_chunks_out_of_order(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    header, first, second, *rest = client.messages(round_id, row, chunk_bytes=8)
    return client.send([header, second, first, *rest])


def announces_too_much(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, np.append(row, row), element_count=2 * len(row))


def has_another_schema(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, schema_hash=b"\0" * 32)


def runs_ahead(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id + 1, row)


def hangs_up(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send(client.messages(round_id, row)[:-1])


def comes_too_late(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id - 1, row)


Act = Callable[[StockClient, int, np.ndarray], pb.PushReply]

BREACHES: tuple[tuple[Act, int], ...] = (
    (sends_another_digest, pb.CHECKSUM),
    (sends_chunks_out_of_order, pb.MALFORMED),
    (announces_too_much, pb.TOO_LARGE),
    (has_another_schema, pb.WRONG_SCHEMA),
    (runs_ahead, pb.FUTURE_ROUND),
)


def breach(client: StockClient, round_id: int, acts: tuple[tuple[Act, int], ...]) -> None:
    row = np.ones(client.server.num_parameters, dtype=np.float32)
    for act, kind in acts:
        assert act(client, round_id, row).refusal.kind == kind


def is_suspended(client: StockClient) -> bool:
    """Ask by a call that is none of its own business."""
    return client.pull_messages(0, 0.0)[0].header.refusal.kind == pb.SUSPENDED


@pytest.mark.parametrize("acts", [BREACHES[:3], BREACHES[2:]], ids=["bytes", "headers"])
def test_the_third_breach_suspends_its_identity_and_the_others_go_on_without_it(federation, acts):
    server, round_id = federation.server, federation.fresh_round()
    culprit, told = federation.clients[-1], len(federation.server.events("suspended"))
    before = server.refusals(culprit.client_id)
    breach(culprit, round_id, acts[:2])
    assert len(server.events("suspended")) == told
    breach(culprit, round_id, acts[2:])
    assert is_suspended(culprit)
    # Its calls are refused, whatever they are; nobody else learns of it.
    refusal = culprit.try_to_join().refusal
    assert refusal.kind == pb.SUSPENDED
    assert "is out for" in refusal.message
    assert culprit.push(round_id, np.zeros(server.num_parameters)).refusal.kind == pb.SUSPENDED
    stranger = pb.Caller(run_id=server.run_id, client_id=culprit.client_id, incarnation=b"\1" * 16)
    assert culprit.push(round_id, np.zeros(server.num_parameters), caller=stranger).refusal.kind == pb.NOT_A_MEMBER
    # The round needs it no more.
    federation.push_all(round_id, federation.rows(round_id), but=[culprit.client_id])
    federation.model(round_id + 1)
    # Counted, and told to the operator.
    assert (server.refusals(culprit.client_id) - before)["suspended"] == 4
    (event,) = server.events("suspended")[told:]
    assert event["client"] == culprit.client_id
    assert event["seconds"] == SUSPENSION_S
    # And then all is well again.
    until(lambda: join_again(culprit), "the suspension to end")
    round_id = federation.fresh_round()
    breach(culprit, round_id, acts[:2])
    federation.push_all(round_id, federation.rows(round_id))
    federation.model(round_id + 1)
    breach(culprit, round_id + 1, acts[2:])
    assert is_suspended(culprit)


def test_a_suspended_member_is_told_on_its_attend_stream_which_ends(federation):
    culprit = federation.clients[3]
    stream = federation.attended(culprit)
    round_id = federation.fresh_round()
    try:
        breach(culprit, round_id, BREACHES[:3])
        assert stream.wait_for("refusal").kind == pb.SUSPENDED
        stream.wait_for_end()
    finally:
        stream.close()


def test_what_a_suspended_member_was_sending_is_dropped(federation):
    round_id, culprit = federation.fresh_round(), federation.clients[2]
    theta, rows = federation.model(round_id), federation.rows(round_id)
    messages = culprit.messages(round_id, rows[2], chunk_bytes=8)
    stream = culprit.begin_push(messages[:2])
    breach(culprit, round_id, BREACHES[2:])
    stream.send(*messages[2:])
    assert stream.reply().refusal.kind == pb.SUSPENDED
    federation.push_all(round_id, rows, but=[2])
    federation.assert_round_is_mean_of(round_id, theta, np.delete(rows, 2, axis=0))


def test_what_a_bad_network_bad_data_or_another_model_does_is_no_breach(federation):
    client = federation.clients[1]
    for _ in range(4):
        round_id = federation.fresh_round()
        rows = federation.rows(round_id)
        assert hangs_up(client, round_id, rows[1]).refusal.kind == pb.TRUNCATED
        assert comes_too_late(client, round_id, rows[1]).refusal.kind == pb.STALE_ROUND
        rows[1] = np.nan
        assert client.push_accepted(round_id, rows[1]).non_finite
        assert client.push_accepted(round_id, rows[1]).duplicate
        federation.push_all(round_id, rows, but=[1])
        assert client.try_to_join(schema_hash=b"\0" * 32).refusal.kind == pb.WRONG_SCHEMA  # not a member's message
    assert not is_suspended(client)


def test_nobody_gets_another_one_suspended(federation):
    round_id, victim = federation.fresh_round(), federation.clients[1]
    impostor = StockClient(federation.server, 1)
    try:
        impostor.caller = pb.Caller(run_id=federation.server.run_id, client_id=1, incarnation=b"\1" * 16)
        row = np.ones(federation.server.num_parameters, dtype=np.float32)
        for act, _ in BREACHES:
            assert act(impostor, round_id, row).refusal.kind == pb.NOT_A_MEMBER
        for _ in range(5):
            garbage = impostor.channel.stream_unary("/common.rpc.v1.ParameterServer/PushMomentum")
            assert pb.PushReply.FromString(garbage(iter([b"\xff" * 9]))).refusal.kind == pb.MALFORMED
            assert impostor.try_to_join(token="guess").refusal.kind == pb.BAD_TOKEN  # noqa: S106
    finally:
        impostor.close()
    assert not is_suspended(victim)


def test_a_client_that_came_back_without_its_state_may_send_another_momentum_and_no_one_else(federation):
    round_id, client = federation.fresh_round(), federation.clients[0]
    row = federation.rows(round_id)[0]
    client.push_accepted(round_id, row)
    client.join()
    for number in range(1, 4):
        assert client.push(round_id, row + number).refusal.kind == pb.EQUIVOCATION
    assert not is_suspended(client)
    round_id = federation.fresh_round()
    client.push_accepted(round_id, row)
    for number in range(1, 4):
        assert client.push(round_id, row + number).refusal.kind == pb.EQUIVOCATION
    assert is_suspended(client)


def test_a_complete_momentum_may_be_repeated_a_few_times_in_a_round(federation):
    client = federation.clients[1]
    for _ in range(2):
        round_id = federation.fresh_round()
        rows = federation.rows(round_id)
        client.push_accepted(round_id, rows[1])
        for _ in range(MAX_REPEATS):
            assert client.push_accepted(round_id, rows[1]).duplicate
        for _ in range(4):
            refusal = client.send(client.messages(round_id, rows[1])[:1]).refusal
            assert refusal.kind == pb.TOO_MANY_CALLS
            assert "max_repeats" in refusal.message
    theta = federation.model(round_id)
    federation.push_all(round_id, rows, but=[1])
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_a_storm_of_joins_ends_soon_and_leaves_the_last_incarnation_in(federation):
    client, joined = federation.clients[1], 0
    while (reply := client.try_to_join()).HasField("joined"):
        joined += 1
        client.caller = pb.Caller(run_id=reply.joined.run_id, client_id=1, incarnation=reply.joined.incarnation)
        assert joined <= MAX_JOINS
    assert reply.refusal.kind == pb.TOO_MANY_CALLS
    assert "max_joins" in reply.refusal.message
    for _ in range(5):
        assert client.try_to_join().refusal.kind == pb.TOO_MANY_CALLS
    round_id = federation.fresh_round()
    federation.push_all(round_id, federation.rows(round_id))
    federation.model(round_id + 1)

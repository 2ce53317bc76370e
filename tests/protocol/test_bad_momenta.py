"""Each kind of bad momentum is refused by its own name, counts as nothing, and costs the sender one round only."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest
from federations import ServerProcess, until
from stock_client import Federation, StockClient, trailer, wire

from common.rpc.methods import PARAMETER_SERVER
from common.rpc.options import largest_message, server_options
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb

Misbehaviour = Callable[[StockClient, int, np.ndarray], pb.PushReply]


def announces_fewer_elements(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row[:-1], element_count=len(row) - 1)


def announces_nothing(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, element_count=0)


def has_another_schema(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, schema_hash=b"\0" * 32)


def announces_more_elements(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, np.append(row, row), element_count=2 * len(row))


def announces_the_largest_number(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, element_count=2**64 - 1)


def sends_more_than_announced(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, np.append(row, row))


def goes_on_after_the_last_byte(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    *messages, last = client.messages(round_id, row)
    return client.send([*messages, pb.MomentumMessage(offset=4 * len(row), payload=b"\0"), last])


def has_the_digest_of_another_row(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send([*client.messages(round_id, row)[:-1], pb.MomentumMessage(trailer=trailer(row + 1))])


def has_an_empty_digest(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    last = pb.MomentumMessage(trailer=pb.Trailer(element_count=len(row)))
    return client.send([*client.messages(round_id, row)[:-1], last])


def hangs_up_before_the_trailer(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send(client.messages(round_id, row)[:-1])


def hangs_up_after_the_header(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send(client.messages(round_id, row)[:1])


def hangs_up_at_once(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send([])


def leaves_out_the_last_chunk(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    messages = client.messages(round_id, row, chunk_bytes=8)
    return client.send([*messages[:-2], messages[-1]])


def miscounts_in_the_trailer(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    last = trailer(row)
    last.element_count += 1
    return client.send([*client.messages(round_id, row)[:-1], pb.MomentumMessage(trailer=last)])


def leaves_a_gap(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    messages = client.messages(round_id, row, chunk_bytes=8)
    return client.send([*messages[:2], *messages[3:]])


def repeats_a_chunk(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    messages = client.messages(round_id, row, chunk_bytes=8)
    return client.send([*messages[:3], messages[2], *messages[3:]])


def overlaps(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    messages = client.messages(round_id, row, chunk_bytes=8)
    messages[2].offset -= 4
    return client.send(messages)


def swaps_two_chunks(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    messages = client.messages(round_id, row, chunk_bytes=8)
    messages[1], messages[2] = messages[2], messages[1]
    return client.send(messages)


def starts_beyond_the_row(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    first = client.messages(round_id, row)[0]
    return client.send([first, pb.MomentumMessage(offset=2**64 - 8, payload=b"\0" * 16)])


def sends_a_second_header(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    first, *rest = client.messages(round_id, row)
    return client.send([first, first, *rest])


def sends_a_message_of_nothing(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    first, *rest = client.messages(round_id, row)
    return client.send([first, pb.MomentumMessage(), *rest])


def has_no_header(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.send(client.messages(round_id, row)[1:])


def is_garbage(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return _send_bytes(client, b"\xff" * 50)


def turns_into_garbage(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    first = client.messages(round_id, row)[0]
    return _send_bytes(client, first.SerializeToString(), b"\x7a\x20only nine")


def is_for_the_round_before(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id - 1, row)


def is_for_the_round_after(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id + 1, row)


def is_for_another_run(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, caller=_caller(client, run_id="0123456789abcdef"))


def is_of_a_stranger(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, caller=_caller(client, client_id=99))


def is_of_an_incarnation_nobody_gave(client: StockClient, round_id: int, row: np.ndarray) -> pb.PushReply:
    return client.push(round_id, row, caller=_caller(client, incarnation=b"\1" * 16))


def _caller(client: StockClient, **changes: object) -> pb.Caller:
    fields = {"run_id": client.caller.run_id, "client_id": client.client_id, "incarnation": client.caller.incarnation}
    return pb.Caller(**fields | changes)


def _send_bytes(client: StockClient, *messages: bytes) -> pb.PushReply:
    call = client.channel.stream_unary(f"/{PARAMETER_SERVER}/PushMomentum", None, pb.PushReply.FromString)
    return call(iter(messages), timeout=10)


EXPECTED: dict[Misbehaviour, pb.RefusalKind.ValueType] = {
    announces_fewer_elements: pb.WRONG_SCHEMA,
    announces_nothing: pb.WRONG_SCHEMA,
    has_another_schema: pb.WRONG_SCHEMA,
    announces_more_elements: pb.TOO_LARGE,
    announces_the_largest_number: pb.TOO_LARGE,
    sends_more_than_announced: pb.TOO_LARGE,
    goes_on_after_the_last_byte: pb.TOO_LARGE,
    has_the_digest_of_another_row: pb.CHECKSUM,
    has_an_empty_digest: pb.CHECKSUM,
    hangs_up_before_the_trailer: pb.TRUNCATED,
    hangs_up_after_the_header: pb.TRUNCATED,
    hangs_up_at_once: pb.TRUNCATED,
    leaves_out_the_last_chunk: pb.MALFORMED,
    miscounts_in_the_trailer: pb.MALFORMED,
    leaves_a_gap: pb.MALFORMED,
    repeats_a_chunk: pb.MALFORMED,
    overlaps: pb.MALFORMED,
    swaps_two_chunks: pb.MALFORMED,
    starts_beyond_the_row: pb.MALFORMED,
    sends_a_second_header: pb.MALFORMED,
    sends_a_message_of_nothing: pb.MALFORMED,
    has_no_header: pb.MALFORMED,
    is_garbage: pb.MALFORMED,
    turns_into_garbage: pb.MALFORMED,
    is_for_the_round_before: pb.STALE_ROUND,
    is_for_the_round_after: pb.FUTURE_ROUND,
    is_for_another_run: pb.WRONG_RUN,
    is_of_a_stranger: pb.UNKNOWN_CLIENT,
    is_of_an_incarnation_nobody_gave: pb.NOT_A_MEMBER,
}
# What says who sent it is missing there, or is not shown to be true.
NAMELESS = {
    *(hangs_up_at_once, has_no_header, is_garbage),
    *(is_for_another_run, is_of_a_stranger, is_of_an_incarnation_nobody_gave),
}


@pytest.mark.parametrize("misbehave", EXPECTED, ids=lambda function: function.__name__)
def test_a_momentum_is_refused_by_name_counts_as_nothing_and_the_next_one_is_welcome(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient, misbehave: Misbehaviour
) -> None:
    kind = EXPECTED[misbehave]
    theta, rows = federation.model(round_id), federation.rows(round_id)
    culprit = None if misbehave in NAMELESS else client.client_id
    before = server.refusals(culprit)

    reply = misbehave(client, round_id, rows[-1])

    assert reply.WhichOneof("outcome") == "refusal"
    assert (kind_name(reply.refusal.kind), bool(reply.refusal.message)) == (kind_name(kind), True)
    assert server.refusals(culprit) - before == {kind_name(kind): 1}

    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows[:-1])

    theta, rows = federation.model(round_id + 1), federation.rows(round_id + 1)
    federation.push_all(round_id + 1, rows)
    federation.assert_round_is_mean_of(round_id + 1, theta, rows)


@pytest.mark.parametrize("misbehave", EXPECTED, ids=lambda function: function.__name__)
def test_after_a_refusal_the_true_momentum_of_the_same_round_still_counts(
    federation: Federation, round_id: int, client: StockClient, misbehave: Misbehaviour
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    assert misbehave(client, round_id, rows[-1]).HasField("refusal")
    client.push_accepted(round_id, rows[-1])
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_a_momentum_that_is_not_finite_is_accepted_and_counts_as_zero(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient, value: float
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    before, bad = server.refusals(client.client_id), rows[-1].copy()
    bad[3] = value
    assert client.push_accepted(round_id, bad).non_finite
    assert server.refusals(client.client_id) - before == {"non_finite": 1}
    rows[-1] = 0.0
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)  # of five rows, one of them zero


def test_huge_but_finite_momenta_are_no_error(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    before, theta, rows = server.refusals(), federation.model(round_id), federation.rows(round_id)
    rows[0], rows[-1] = -1e30, 1e30  # their squares are beyond float32
    federation.push_all(round_id, rows)
    federation.assert_round_is_mean_of(round_id, theta, rows)
    assert server.refusals() == before


def test_a_stale_momentum_is_told_which_round_to_join(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    for old in (0, round_id - 1):
        refusal = client.push(old, federation.rows(round_id)[-1]).refusal
        assert (refusal.kind, refusal.next_round) == (pb.STALE_ROUND, round_id)
        assert str(round_id) in refusal.message


def test_a_message_that_is_too_large_is_refused_as_that(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    before = server.refusals(client.client_id)
    most = largest_message(server.experiment.network.chunk_bytes)
    reply = client.send([client.messages(round_id, rows[-1])[0], pb.MomentumMessage(payload=bytes(most))])
    assert reply.refusal.kind == pb.TOO_LARGE
    assert str(most) in reply.refusal.message
    assert server.refusals(client.client_id) - before == {"too_large": 1}
    federation.push_all(round_id, rows)
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_a_message_beyond_grpcs_limit_ends_its_stream_only(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    before = server.refusals()
    limit = dict(server_options(server.experiment.network.chunk_bytes))["grpc.max_receive_message_length"]
    with pytest.raises(grpc.RpcError, match="larger than max") as failure:
        client.send([client.messages(round_id, rows[-1])[0], pb.MomentumMessage(payload=bytes(limit))])
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    until(lambda: server.refusals() - before == {"truncated": 1}, "the broken stream to be counted")
    federation.push_all(round_id, rows)
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_the_same_momentum_again_is_acknowledged(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    before, theta, rows = server.refusals(), federation.model(round_id), federation.rows(round_id)
    assert not client.push_accepted(round_id, rows[-1]).duplicate
    assert client.push_accepted(round_id, rows[-1]).duplicate
    in_chunks = client.send(client.messages(round_id, rows[-1], chunk_bytes=8))
    assert in_chunks.accepted.duplicate
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)
    assert server.refusals() == before


def test_of_two_momenta_for_one_round_the_first_counts(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    before, theta, rows = server.refusals(client.client_id), federation.model(round_id), federation.rows(round_id)
    client.push_accepted(round_id, rows[-1])
    assert client.push(round_id, -rows[-1]).refusal.kind == pb.EQUIVOCATION
    assert client.push(round_id, np.append(rows[-1], rows[-1])).refusal.kind == pb.TOO_LARGE
    assert server.refusals(client.client_id) - before == {"equivocation": 1, "too_large": 1}
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_a_momentum_that_was_not_finite_is_a_duplicate_by_the_bytes_that_were_sent(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    bad = np.full(client.server.num_parameters, np.nan, dtype=np.float32)
    client.push_accepted(round_id, bad)
    assert client.push_accepted(round_id, bad).duplicate
    assert client.push(round_id, np.zeros_like(bad)).refusal.kind == pb.EQUIVOCATION


def test_while_one_stream_writes_a_row_another_is_turned_away(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    messages = client.messages(round_id, rows[-1], chunk_bytes=8)
    first = client.begin_push(messages[:3])
    assert client.push(round_id, -rows[-1]).refusal.kind == pb.ROW_BUSY
    first.send(*messages[3:])
    assert first.reply().HasField("accepted")
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_a_round_that_closes_during_an_upload_leaves_it_out(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    before = server.refusals(client.client_id)
    messages = client.messages(round_id, rows[-1], chunk_bytes=8)
    slow = client.begin_push(messages[:3])
    federation.push_all(round_id, rows, but=[client.client_id])
    federation.assert_round_is_mean_of(round_id, theta, rows[:-1])

    slow.send(*messages[3:])

    refusal = slow.reply().refusal
    assert (refusal.kind, refusal.next_round) == (pb.LATE, round_id + 1)
    assert (server.refusals(client.client_id) - before)["late"] == 1
    theta, rows = federation.model(round_id + 1), federation.rows(round_id + 1)
    federation.push_all(round_id + 1, rows)
    federation.assert_round_is_mean_of(round_id + 1, theta, rows)


def test_a_stream_that_is_cancelled_is_counted_and_frees_its_row(
    server: ServerProcess, federation: Federation, round_id: int, client: StockClient
) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    before = server.refusals(client.client_id)
    stream = client.begin_push(client.messages(round_id, -rows[-1], chunk_bytes=8)[:3])
    probes = server.refusals(client.client_id) - before
    stream.cancel()
    until(
        lambda: (server.refusals(client.client_id) - before)["truncated"] == probes["truncated"] + 1,
        "the broken stream to be counted",
    )
    federation.push_all(round_id, rows)
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_rows_land_in_their_own_place_whatever_the_order_of_arrival(federation: Federation, round_id: int) -> None:
    theta, rows = federation.model(round_id), federation.rows(round_id)
    messages = [
        client.messages(round_id, row, chunk_bytes=4) for client, row in zip(federation.clients, rows, strict=True)
    ]
    streams = [client.begin_push(own[:1]) for client, own in zip(federation.clients, messages, strict=True)]
    for step in range(1, len(messages[0])):
        for stream, own in reversed(list(zip(streams, messages, strict=True))):
            stream.send(own[step])
    assert all(stream.reply().HasField("accepted") for stream in streams)
    federation.assert_round_is_mean_of(round_id, theta, rows)


def test_an_honest_clients_single_message_and_a_stock_clients_chunks_are_the_same_momentum(
    federation: Federation, round_id: int, client: StockClient
) -> None:
    row = federation.rows(round_id)[-1]
    assert client.send(client.messages(round_id, row, chunk_bytes=12)).HasField("accepted")
    assert client.push_accepted(round_id, np.frombuffer(wire(row), dtype="<f4")).duplicate

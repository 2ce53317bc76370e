"""How much of everything a server lets its peers have, and what they are told beyond that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from federations import ServerProcess, small_experiment, until
from grpc_health.v1 import health_pb2
from raw_http2 import RawPeer
from stock_client import CALL_S, Federation, StockClient

from common.rpc.methods import PARAMETER_SERVER
from common.rpc.v1 import parameter_server_pb2 as pb

PER_CLIENT, STRANGERS, CONNECTIONS, PER_CONNECTION, METADATA = 4, 6, 12, 4, 2048
FAR = 1_000_000  # a round that will not come


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that lets nobody have much, and waits long for a first word."""
    network = {
        "max_streams_per_client": PER_CLIENT,
        "max_strangers": STRANGERS,
        "max_connections": CONNECTIONS,
        "keepalive_s": 60.0,
        "keepalive_timeout_s": 60.0,
        "max_metadata_bytes": METADATA,
        "first_message_s": 60.0,
        "rpc_deadline_s": 60.0,
    }
    with ServerProcess(small_experiment(network=network), tmp_path_factory.mktemp("strict")) as process:
        yield process.listening()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that waits no time for a first word."""
    experiment = small_experiment(network={"first_message_s": 0.5})
    with ServerProcess(experiment, tmp_path_factory.mktemp("hasty")) as process:
        yield process.listening()


@pytest.fixture
def members(strict: ServerProcess) -> Iterator[Federation]:
    federation = Federation(strict)
    yield federation
    federation.close()


@pytest.fixture
def open_calls() -> Iterator[ExitStack]:
    """Whatever a test leaves open, to be closed after it."""
    with ExitStack() as stack:
        yield stack


def waiting_pull(client: StockClient, calls: ExitStack) -> Any:
    """A pull that the server holds."""
    call = client.stub.PullModel(pb.PullModelRequest(caller=client.caller, round_id=FAR, wait_s=CALL_S), timeout=CALL_S)
    calls.callback(call.cancel)
    return call


def attendance(client: StockClient, calls: ExitStack) -> Any:
    stream = client.attend()
    calls.callback(stream.close)
    return stream


def refused_pull(client: StockClient) -> pb.Refusal:
    """The refusal of a pull that would otherwise have been held for a moment."""
    return client.pull(FAR, wait_s=0.0)[0].refusal


def silent_call(server: ServerProcess, method: str, calls: ExitStack) -> Any:
    """A call that says nothing; by a connection that others share."""
    channel = calls.enter_context(grpc.insecure_channel(server.address))
    over = threading.Event()
    calls.callback(over.set)

    def nothing() -> Iterator[bytes]:
        over.wait(CALL_S)
        yield from ()

    call = channel.stream_stream(method)(nothing(), timeout=2 * CALL_S)
    calls.callback(call.cancel)
    return call


def path(name: str) -> str:
    return f"/{PARAMETER_SERVER}/{name}"


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("opens", [waiting_pull, attendance])
def test_an_identity_has_so_many_calls_open_at_once_and_no_more(
    strict: ServerProcess, members: Federation, open_calls: ExitStack, opens: Callable[..., Any]
) -> None:
    client, other = members.clients[4], members.clients[3]
    before = strict.refusals(4)
    for _ in range(PER_CLIENT):
        opens(client, open_calls)
    until(lambda: refused_pull(client).kind == pb.TOO_MANY_CALLS, "all of them to be there")
    assert str(PER_CLIENT) in refused_pull(client).message
    assert not other.pull(FAR, wait_s=0.0)[0].HasField("refusal")
    assert set(strict.refusals(4) - before) == {"too_many_calls"}
    open_calls.close()
    until(lambda: not client.pull(FAR, wait_s=0.0)[0].HasField("refusal"), "there to be room again")


def test_a_momentum_is_one_of_the_calls_that_are_counted(members: Federation, open_calls: ExitStack) -> None:
    client = members.clients[4]
    for _ in range(PER_CLIENT):
        waiting_pull(client, open_calls)
    until(lambda: refused_pull(client).kind == pb.TOO_MANY_CALLS, "all of them to be there")
    assert client.push(0, members.rows(0)[4]).refusal.kind == pb.TOO_MANY_CALLS


def test_an_identity_with_too_many_calls_may_still_join_and_leave(members: Federation, open_calls: ExitStack) -> None:
    client = members.clients[4]
    for _ in range(PER_CLIENT):
        waiting_pull(client, open_calls)
    until(lambda: refused_pull(client).kind == pb.TOO_MANY_CALLS, "all of them to be there")
    client.join()
    assert not client.leave().HasField("refusal")


@pytest.mark.parametrize("method", ["Join", "Attend", "PullModel", "PushMomentum", "Leave"])
def test_of_silent_strangers_the_oldest_gives_way_and_nobody_is_kept_out(
    strict: ServerProcess, open_calls: ExitStack, method: str
) -> None:
    oldest, others = silent_call(strict, path(method), open_calls), list[Any]()

    def gave_way() -> bool:
        if len(others) < 4 * STRANGERS:
            others.append(silent_call(strict, path(method), open_calls))
        time.sleep(0.02)  # one after the other
        return not oldest.is_active()

    until(gave_way, "the oldest to give way")
    assert oldest.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_strangers" in oldest.details()
    assert others[-1].is_active()
    newcomer = StockClient(strict, 4)
    open_calls.callback(newcomer.close)
    newcomer.join()
    assert newcomer.pull()[0].HasField("model")


@pytest.mark.parametrize("method", ["Join", "Attend", "PullModel", "PushMomentum", "Leave"])
def test_who_says_nothing_is_waited_for_no_longer_than_configured(
    hasty: ServerProcess, open_calls: ExitStack, method: str
) -> None:
    """Also where gRPC would wait by itself, before any code of ours hears of the call."""
    before = hasty.refusals(None)
    call = silent_call(hasty, path(method), open_calls)
    assert b"network.first_message_s" in next(call)  # the refusal
    assert call.code() is grpc.StatusCode.OK
    assert hasty.refusals(None) - before == {"truncated": 1}


def test_a_health_check_without_a_question_ends_too(hasty: ServerProcess, open_calls: ExitStack) -> None:
    call = silent_call(hasty, "/grpc.health.v1.Health/Check", open_calls)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_answers_that_nobody_reads_are_counted_and_keep_no_member_from_training(
    strict: ServerProcess, members: Federation, open_calls: ExitStack
) -> None:
    """A peer that grants no window: a refusal is stuck, and so is its stream, until the connection ends."""
    member = members.clients[3]
    waiting = [waiting_pull(member, open_calls) for _ in range(PER_CLIENT)]
    until(lambda: refused_pull(member).kind == pb.TOO_MANY_CALLS, "the member's calls to be there")
    waiting[0].cancel()
    peer, newcomer = RawPeer(strict.address), StockClient(strict, 4)
    open_calls.callback(peer.close)
    open_calls.callback(newcomer.close)

    def kept_out() -> bool:
        with suppress(grpc.RpcError):
            newcomer.try_to_join()
            return False
        return True

    def stuck_once_more() -> bool:
        peer.call(path("Join"), pb.JoinRequest(client_id=4, token="false"))  # noqa: S106
        return kept_out()

    until(stuck_once_more, "all strangers' places to be taken")
    assert all(call.is_active() for call in waiting[1:])
    peer.close()
    until(lambda: not kept_out(), "the places to be free again")


def test_further_streams_of_a_connection_wait_at_the_client(tmp_path: Path, open_calls: ExitStack) -> None:
    experiment = small_experiment(network={"max_streams_per_connection": PER_CONNECTION})
    server = open_calls.enter_context(ServerProcess(experiment, tmp_path)).listening()
    crowd = Federation(server)
    channel = open_calls.enter_context(
        grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    )
    for client in crowd.clients:
        client.channel.close()
        client.stub = type(client.stub)(channel)
    grpc.channel_ready_future(channel).result(CALL_S)  # calls that wait for a connection begin in any order
    held = [waiting_pull(client, open_calls) for client in crowd.clients[:PER_CONNECTION]]
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=health_pb2.HealthCheckRequest.SerializeToString
    )
    waits = check.future(health_pb2.HealthCheckRequest(service=PARAMETER_SERVER), timeout=CALL_S)
    with pytest.raises(grpc.FutureTimeoutError):
        waits.result(1.0)
    held[0].cancel()
    assert waits.result(CALL_S)


# ---------------------------------------------------------------- metadata and connections


def test_more_metadata_than_allowed_is_refused(members: Federation) -> None:
    client = members.clients[4]
    request = pb.PullModelRequest(caller=client.caller, round_id=FAR)
    assert list(client.stub.PullModel(request, timeout=CALL_S, metadata=[("note", "x" * (METADATA // 2))]))
    with pytest.raises(grpc.RpcError, match="metadata") as refused:
        list(client.stub.PullModel(request, timeout=CALL_S, metadata=[("note", "x" * METADATA)]))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed."""
    try:
        while connection.recv(1 << 12, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def connect(server: ServerProcess, calls: ExitStack) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return calls.enter_context(socket.create_connection((host, int(port))))


def test_a_connection_too_many_is_closed_and_those_that_stand_stay(
    strict: ServerProcess, members: Federation, open_calls: ExitStack
) -> None:
    assert members.clients[0].pull()[0].HasField("model")
    crowd = [connect(strict, open_calls) for _ in range(CONNECTIONS + 3)]
    until(lambda: sum(map(closed, crowd)) >= 4, "the last ones to be closed")
    assert members.clients[0].pull()[0].HasField("model")
    assert not closed(crowd[0])


def test_a_connection_that_does_not_come_up_is_closed(hasty: ServerProcess, open_calls: ExitStack) -> None:
    silent = connect(hasty, open_calls)
    began = time.monotonic()
    until(lambda: closed(silent), "the silent connection to be closed")
    assert time.monotonic() - began < 10.0


# ---------------------------------------------------------------- at start


@pytest.mark.parametrize(
    ("network", "status", "key"),
    [
        ({"max_clients": 4}, "config_invalid", "network.max_clients"),
        ({"max_model_bytes": 39}, "model_invalid", "network.max_model_bytes"),
        ({"max_memory_bytes": 1 << 20}, "config_invalid", "network.max_memory_bytes"),
    ],
)
def test_a_server_that_would_be_asked_for_too_much_does_not_start(
    tmp_path: Path, network: dict[str, int], status: str, key: str
) -> None:
    with ServerProcess(small_experiment(network=network), tmp_path) as process:
        process.exit_code()
        (error,) = process.events("error")
        assert (error["status"], key in error["message"]) == (status, True), error
        assert not process.run_dir.exists()

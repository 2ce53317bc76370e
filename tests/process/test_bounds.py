"""What a server's memory is bounded by: not by the number of rounds, nor by peers who stop reading or writing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from federations import ServerProcess, client_process, small_experiment, until
from stock_client import CALL_S, Federation, OpenPush, StockClient

from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub
from ps.limits import limits_of, memory_of
from ps.reader import RunReader

MIB = 1 << 20
SETTLING = 60
"""Rounds after which a process has its caches, its arenas and its code."""
JITTER_MIB = 8.0
"""What an allocator does with the same load, now and then."""


def uss_mib(server: ServerProcess) -> float:
    """Memory that is the server's alone; pages shared with other processes are no concern of its peers."""
    return float(psutil.Process(server.pid).memory_full_info().uss) / MIB


class Reader:
    """A peer that asks for models and does not read them; over a connection for each, as so many processes would."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._calls = server, deque[tuple[grpc.Channel, Any]]()

    def stall(self, client: StockClient, round_id: int) -> None:
        """Ask for the model of an open round, and stop after its first message."""
        # A window that stays small: otherwise gRPC would read on behalf of a program that does not.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(self._server.address, options=options)
        request = pb.PullModelRequest(caller=client.caller, round_id=round_id, wait_s=1.0)
        call = ParameterServerStub(channel).PullModel(request, timeout=10 * CALL_S)
        assert next(call).header.model.round_id == round_id
        self._calls.append((channel, call))

    def finish(self) -> list[grpc.StatusCode]:
        """Read on, now; how each of them ends."""
        codes = []
        for _, call in self._calls:
            with suppress(grpc.RpcError):
                deque(call, maxlen=0)
            codes.append(call.code())
        return codes

    def give_up_oldest(self) -> None:
        self._calls.popleft()[0].close()

    def close(self) -> None:
        while self._calls:
            self.give_up_oldest()

    def __len__(self) -> int:
        return len(self._calls)


@contextmanager
def federation_of(tmp_path: Path, dataset: str, chunk_bytes: int) -> Iterator[Federation]:
    """Five clients of whom four are enough."""
    experiment = small_experiment(
        data={"dataset": f"tiny_task:{dataset}"}, network={"chunk_bytes": chunk_bytes, "grace_floor_s": 0.01}
    )
    with ServerProcess(experiment, tmp_path) as server:
        members = Federation(server.listening())
        yield members
        members.close()


class Rounds:
    """Rounds of a federation of zeros, as fast as they go; the last of the clients does not answer."""

    def __init__(self, members: Federation, chunk_bytes: int) -> None:
        self._members = members
        zeros = np.zeros(members.server.num_parameters, dtype=np.float32)
        _, *self._body = members.clients[0].messages(0, zeros, chunk_bytes=chunk_bytes)
        self._next = members.clients[0].pull()[0].model.round_id

    def begun(self, client: StockClient) -> list[pb.MomentumMessage]:
        """The first half of a momentum for the open round."""
        header = pb.MomentumMessage(header=client.header(self._next))
        return [header, *self._body[: len(self._body) // 2]]

    def next(self) -> int:
        """All but one answer the open round; returns the one after it, once that is open."""
        for client in self._members.clients[:-1]:
            reply = client.send([pb.MomentumMessage(header=client.header(self._next)), *self._body])
            assert reply.HasField("accepted"), reply
        self._next += 1
        watcher = self._members.clients[0]
        request = pb.PullModelRequest(caller=watcher.caller, round_id=self._next, wait_s=CALL_S)
        call = watcher.stub.PullModel(request, timeout=2 * CALL_S)
        assert next(call).header.model.round_id == self._next
        call.cancel()
        return self._next


@pytest.mark.slow
def test_two_hundred_rounds_with_peers_who_stall_and_break_off_need_what_the_formula_says(tmp_path: Path) -> None:
    """d = 100,000. Each round one client stops reading the model and writing its momentum; it gives up older calls."""
    abused_rounds(tmp_path, 200)


def test_twenty_five_rounds_with_peers_who_stall_and_break_off_need_what_the_formula_says(tmp_path: Path) -> None:
    abused_rounds(tmp_path, 25)


def abused_rounds(tmp_path: Path, count: int) -> None:
    chunk = 32 * 1024
    with federation_of(tmp_path, "wide_blobs", chunk) as members:
        server, reader, rounds = members.server, Reader(members.server), Rounds(members, chunk)
        limits = limits_of(server.experiment.network, len(members.clients))
        formula = memory_of(server.experiment, server.num_parameters, limits)
        assert server.wait_for("listening")["memory_bytes"] == formula.total
        at_start, used, halves = uss_mib(server), list[float](), deque[OpenPush]()
        for number in range(count):
            reader.stall(members.clients[4], rounds.next())
            halves.append(OpenPush(members.clients[4].stub, rounds.begun(members.clients[4])))
            if number >= 3:
                reader.give_up_oldest()
                halves.popleft().cancel()
            if number % 10 == 9:
                used.append(uss_mib(server))
        assert set(server.refusals(4)) <= {"truncated", "late", "stale_round"}
        reader.close()
    print(f"{at_start:.0f} MiB at start; every tenth round {[round(mib - at_start) for mib in used]} more; {formula}")
    assert max(used) - at_start <= formula.total / MIB
    if count > 2 * SETTLING:
        assert used[-1] - used[SETTLING // 10] <= JITTER_MIB


def test_readers_who_stop_hold_a_chunk_each_and_no_model(tmp_path: Path) -> None:
    """d = 300,000: models of 1.2 MB, of which one in each of thirty-five rounds is asked for and not read."""
    chunk, count = 64 * 1024, 35
    with federation_of(tmp_path, "broad_blobs", chunk) as members:
        server, reader, rounds = members.server, Reader(members.server), Rounds(members, chunk)
        limits = limits_of(server.experiment.network, len(members.clients))
        for _ in range(10):
            rounds.next()
        before = uss_mib(server)
        for number in range(count):
            reader.stall(members.clients[number % 5], rounds.next())
        grown = (uss_mib(server) - before) * MIB
        model = 4 * server.num_parameters
        print(f"{before:.0f} MiB, and {grown / MIB:.0f} more with {count} readers who stopped")
        # What the formula grants a stream, and room in which an allocator may find no use.
        assert grown <= count * limits.bytes_per_stream + 14 * model < (count - 2) * model
        # Who reads on is told to pull again, whatever its round was; the last one's is still open.
        assert reader.finish() == [grpc.StatusCode.ABORTED] * (count - 1) + [grpc.StatusCode.OK]
        reader.close()


def test_a_model_larger_than_any_message_trains(tmp_path: Path) -> None:
    """d = 2,500,000: 10 MB, in chunks of 1 MiB, where gRPC's own limit is 4 MB."""
    experiment = small_experiment(
        federation={"clients": 1, "byzantine": 0},
        training={"rounds": 1, "batch_size": 2},
        data={"dataset": "tiny_task:broadest_blobs"},
        network={"leave_deadline_s": 20.0},
    )
    with ServerProcess(experiment, tmp_path) as server:
        server.listening()
        assert 4 * server.num_parameters > 2 * (4 << 20)
        with client_process(tmp_path, experiment, server.address, server.tokens()) as clients:
            assert clients.exit_code() == 0, clients.log()
            assert server.finish()["status"] == "completed"
    assert [record.answered for record in until(lambda: RunReader(server.run_dir).rounds(), "records")] == [1]
    assert server.refusals() == {}

"""A client made of the generated stubs alone, as one in another language would be: it can also break every rule."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
from federations import ServerProcess

from common.rpc import PROTOCOL_VERSION
from common.rpc.digests import digest_of
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub

CALL_S = 30.0

Row = np.ndarray


def wire(row: Row) -> bytes:
    """A tensor's bytes."""
    return np.asarray(row, dtype="<f4").tobytes()


class StockClient:
    """One identity at one parameter server."""

    def __init__(self, server: ServerProcess, client_id: int) -> None:
        self.server, self.client_id = server, client_id
        self.channel = grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
        self.stub = ParameterServerStub(self.channel)
        self.caller = pb.Caller(run_id=server.run_id, client_id=client_id)

    def close(self) -> None:
        self.channel.close()

    # ---------------------------------------------------------------- membership

    def join_request(self, **changes: Any) -> pb.JoinRequest:
        """What an honest client would ask, but for the changes."""
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "client_id": self.client_id,
            "token": self.server.tokens().get(self.client_id, "none"),
            "run_id": self.server.run_id,
            "schema_hash": self.server.schema_hash,
            "fingerprint": self.server.experiment.fingerprint(),
        }
        return pb.JoinRequest(**fields | changes)

    def try_to_join(self, **changes: Any) -> pb.JoinReply:
        return self.stub.Join(self.join_request(**changes), timeout=CALL_S)

    def join(self) -> pb.Joined:
        """Become a member; raises if refused."""
        reply = self.try_to_join()
        assert reply.HasField("joined"), reply.refusal
        self.caller = pb.Caller(
            run_id=reply.joined.run_id, client_id=self.client_id, incarnation=reply.joined.incarnation
        )
        return reply.joined

    def leave(self) -> pb.LeaveReply:
        return self.stub.Leave(pb.LeaveRequest(caller=self.caller), timeout=CALL_S)

    # ---------------------------------------------------------------- the model

    def pull_messages(self, round_id: int = 0, wait_s: float = CALL_S / 2) -> list[pb.ModelMessage]:
        request = pb.PullModelRequest(caller=self.caller, round_id=round_id, wait_s=wait_s)
        return list(self.stub.PullModel(request, timeout=CALL_S))

    def pull(self, round_id: int = 0, wait_s: float = CALL_S / 2) -> tuple[pb.ModelHeader, Row]:
        """The open round's model, once that is ``round_id`` or later; checked against its trailer."""
        messages = self.pull_messages(round_id, wait_s)
        payload = b"".join(message.payload for message in messages)
        header = messages[0].header
        if header.HasField("model"):
            assert messages[-1].trailer.digest == digest_of(payload)
            assert len(payload) == 4 * header.model.element_count == 4 * messages[-1].trailer.element_count
        return header, np.frombuffer(payload, dtype="<f4").astype(np.float32)

    # ---------------------------------------------------------------- the momentum

    def header(self, round_id: int, **changes: Any) -> pb.MomentumHeader:
        fields = {
            "caller": self.caller,
            "round_id": round_id,
            "schema_hash": self.server.schema_hash,
            "element_count": self.server.num_parameters,
        }
        return pb.MomentumHeader(**fields | changes)

    def messages(
        self, round_id: int, row: Row, *, chunk_bytes: int = 1 << 20, **changes: Any
    ) -> list[pb.MomentumMessage]:
        """A momentum's messages: a header, its payload in chunks, a trailer; ``changes`` go into the header."""
        data = wire(row)
        return [
            pb.MomentumMessage(header=self.header(round_id, **changes)),
            *(
                pb.MomentumMessage(offset=start, payload=data[start : start + chunk_bytes])
                for start in range(0, len(data), chunk_bytes)
            ),
            pb.MomentumMessage(trailer=trailer(row)),
        ]

    def send(self, messages: Iterable[pb.MomentumMessage]) -> pb.PushReply:
        return self.stub.PushMomentum(iter(messages), timeout=CALL_S)

    def push(self, round_id: int, row: Row, **changes: Any) -> pb.PushReply:
        """A momentum in a single message, as an honest client sends a small one."""
        message = pb.MomentumMessage(header=self.header(round_id, **changes), payload=wire(row), trailer=trailer(row))
        return self.send([message])

    def push_accepted(self, round_id: int, row: Row) -> pb.Accepted:
        reply = self.push(round_id, row)
        assert reply.HasField("accepted"), reply.refusal
        return reply.accepted

    def begin_push(self, messages: Sequence[pb.MomentumMessage]) -> OpenPush:
        """Open a stream, send some messages, and return once the server holds the row for it."""
        stream = OpenPush(self.stub, messages)
        header = messages[0].header
        probe = StockClient(self.server, self.client_id)
        probe.caller = header.caller
        give_up = time.monotonic() + CALL_S
        try:
            while probe.send([pb.MomentumMessage(header=header)]).refusal.kind != pb.ROW_BUSY:
                assert time.monotonic() < give_up, "the server never began the row"
                time.sleep(0.01)
        finally:
            probe.close()
        return stream

    def attend(self, *others: StockClient, beat_s: float = 0.2) -> Attendance:
        """Open an Attend stream for this identity, and others beside it."""
        return Attendance(self.stub, [self.caller, *(other.caller for other in others)], beat_s)


def trailer(row: Row) -> pb.Trailer:
    return pb.Trailer(element_count=len(row), digest=digest_of(wire(row)))


class OpenPush:
    """A PushMomentum stream that is fed by hand."""

    def __init__(self, stub: ParameterServerStub, messages: Iterable[pb.MomentumMessage] = ()) -> None:
        self._queue: queue.Queue[pb.MomentumMessage | None] = queue.Queue()
        for message in messages:
            self._queue.put(message)
        self._call = stub.PushMomentum.future(self._messages(), timeout=CALL_S)

    def _messages(self) -> Iterator[pb.MomentumMessage]:
        while (message := self._queue.get()) is not None:
            yield message

    def send(self, *messages: pb.MomentumMessage) -> None:
        for message in messages:
            self._queue.put(message)

    def reply(self) -> pb.PushReply:
        """Half-close, and wait for the answer."""
        self._queue.put(None)
        return self._call.result(CALL_S)

    def cancel(self) -> None:
        self._call.cancel()
        self._queue.put(None)


class Attendance:
    """An Attend stream with its heartbeats; what comes down is kept."""

    def __init__(self, stub: ParameterServerStub, callers: Sequence[pb.Caller], beat_s: float) -> None:
        self._up: queue.Queue[pb.AttendRequest | None] = queue.Queue()
        self._up.put(pb.AttendRequest(attending=pb.Attending(callers=callers)))
        self._beat_s, self._events = beat_s, list[pb.AttendEvent]()
        self._changed, self._ended = threading.Condition(), False
        self._call = stub.Attend(self._requests())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _requests(self) -> Iterator[pb.AttendRequest]:
        while True:
            try:
                request = self._up.get(timeout=self._beat_s)
            except queue.Empty:
                request = pb.AttendRequest(heartbeat=pb.Heartbeat())
            if request is None:
                return
            yield request

    def _read(self) -> None:
        try:
            for event in self._call:
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return self._ended

    def send(self, request: pb.AttendRequest) -> None:
        self._up.put(request)

    def fall_silent(self) -> None:
        """No heartbeats any more; the stream stays open."""
        self._beat_s = 1e6
        self._up.put(pb.AttendRequest(heartbeat=pb.Heartbeat()))  # a last one, which brings the new pace

    def wait_for(self, kind: str, deadline_s: float = CALL_S) -> Any:
        """The first event of a kind (its content)."""

        def found() -> pb.AttendEvent | None:
            return next((event for event in self._events if event.WhichOneof("event") == kind), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, deadline_s)
            event = found()
        assert event is not None, f"no {kind} among {self._events}"
        return getattr(event, kind)

    def wait_for_begin(self) -> None:
        """Until the server's answer begins."""
        self._call.initial_metadata()

    def wait_for_end(self, deadline_s: float = CALL_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, deadline_s), "the stream goes on"

    def close(self) -> None:
        self._up.put(None)
        self._call.cancel()
        self._thread.join(CALL_S)


class Federation:
    """Stock clients for all identities of a server whose rule is the mean and whose step is θ' = θ - mean."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.clients = [StockClient(server, i) for i in range(server.experiment.federation.clients)]
        for client in self.clients:
            client.join()

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def rows(self, round_id: int) -> np.ndarray:
        """Distinct momenta (n, d), other ones each round."""
        shape = (len(self.clients), self.server.num_parameters)
        return np.random.default_rng(round_id).normal(size=shape).astype(np.float32)

    def fresh_round(self, chunk_bytes: int = 1 << 20) -> int:
        """A round nobody has answered yet."""
        header, _ = self.clients[0].pull()
        for client, row in zip(self.clients, self.rows(header.model.round_id), strict=True):
            client.send(client.messages(header.model.round_id, row, chunk_bytes=chunk_bytes))
        return self.clients[0].pull(header.model.round_id + 1)[0].model.round_id

    def attended(self, *clients: StockClient) -> Attendance:
        """An Attend stream which the server has: it has begun to answer."""
        stream = clients[0].attend(*clients[1:])
        stream.wait_for_begin()
        return stream

    def model(self, round_id: int) -> Row:
        header, theta = self.clients[0].pull(round_id)
        assert header.model.round_id == round_id
        return theta

    def push_all(self, round_id: int, rows: np.ndarray, *, but: Sequence[int] = ()) -> None:
        for client in self.clients:
            if client.client_id not in but:
                client.push_accepted(round_id, rows[client.client_id])

    def assert_round_is_mean_of(self, round_id: int, theta: Row, rows: np.ndarray) -> None:
        """The next model is what these rows make of θ, and nothing else."""
        mean = (rows.sum(axis=0, dtype=np.float64) / len(rows)).astype(np.float32)
        np.testing.assert_array_equal(self.model(round_id + 1), theta - mean)

"""A client that keeps every model it is sent, for as long as a run lives, however often its server dies.

It believes nothing: unlike an honest client it does not refuse a server that goes back, it writes down what came.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import grpc
import numpy as np
from stock_client import trailer, wire

from common.config import Experiment
from common.rpc import PROTOCOL_VERSION
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub

CALL_S, PAUSE_S = 30.0, 0.02


@dataclass(frozen=True)
class Published:
    """A model as it came over the network."""

    round_id: int
    sha256: str
    head: str
    run_id: str


class RecordingClient:
    """One identity, in a thread of the test: it joins, pulls, records, answers with zeros, and comes back."""

    def __init__(self, experiment: Experiment, address: str, client_id: int, token: str, schema_hash: bytes) -> None:
        self._address, self._schema_hash = address, schema_hash
        self._join = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            client_id=client_id,
            token=token,
            schema_hash=schema_hash,
            fingerprint=experiment.fingerprint(),
        )
        self._published: list[Published] = []
        self._changed, self._stopped = threading.Condition(), threading.Event()
        self._failure: BaseException | None = None
        self.ending: pb.RunFinished | None = None
        self._thread = threading.Thread(target=self._live, name="recording", daemon=True)
        self._thread.start()

    @property
    def published(self) -> Sequence[Published]:
        """All models so far, in the order in which they came; one that came twice is here twice."""
        return tuple(self._published)

    def wait_for_round(self, round_id: int, deadline_s: float) -> None:
        """Until a model of this round or a later one has come, or the run is over."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._is_there(round_id), deadline_s)
        if self._failure is not None:
            raise self._failure
        assert arrived, f"waited {deadline_s:.0f} s in vain for round {round_id}; last {self._published[-1:]}"

    def _is_there(self, round_id: int) -> bool:
        done = self.ending is not None or self._failure is not None
        return done or (bool(self._published) and self._published[-1].round_id >= round_id)

    def close(self, deadline_s: float = CALL_S) -> None:
        self._stopped.set()
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), "the recording client does not end"

    def wait_for_end(self, deadline_s: float) -> pb.RunFinished:
        """How the run ended, in the server's words."""
        self._thread.join(deadline_s)
        if self._failure is not None:
            raise self._failure
        assert self.ending is not None, "the recording client has not heard of an end"
        return self.ending

    # ---------------------------------------------------------------- in its thread

    def _live(self) -> None:
        try:
            while not self._stopped.is_set() and self.ending is None:
                # A subchannel of its own: gRPC would share one that is waiting for a second after a failure.
                options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
                with grpc.insecure_channel(self._address, options=options) as channel:
                    try:
                        self._take_part(ParameterServerStub(channel))
                    except grpc.RpcError:
                        self._stopped.wait(PAUSE_S)
        except BaseException as failure:  # shown where somebody waits
            self._failure = failure
        with self._changed:
            self._changed.notify_all()

    def _take_part(self, stub: ParameterServerStub) -> None:
        reply = stub.Join(self._join, timeout=CALL_S)
        if reply.HasField("run_finished"):
            self.ending = reply.run_finished
            return
        assert reply.HasField("joined"), reply.refusal
        caller = pb.Caller(
            run_id=reply.joined.run_id, client_id=self._join.client_id, incarnation=reply.joined.incarnation
        )
        wanted = 0
        while not self._stopped.is_set():
            request = pb.PullModelRequest(caller=caller, round_id=wanted, wait_s=1.0)
            messages = list(stub.PullModel(request, timeout=CALL_S))
            header = messages[0].header
            match header.WhichOneof("outcome"):
                case "model":
                    data = b"".join(message.payload for message in messages)
                    self._record(header.model, data, caller.run_id)
                    wanted = header.model.round_id + 1
                    self._answer(stub, caller, header.model)
                case "run_finished":
                    self.ending = header.run_finished
                    stub.Leave(pb.LeaveRequest(caller=caller), timeout=CALL_S)
                    return
                case "refusal":
                    raise AssertionError(str(header.refusal))

    def _record(self, model: pb.Model, data: bytes, run_id: str) -> None:
        with self._changed:
            self._published.append(Published(model.round_id, sha256(data).hexdigest(), model.ledger_head.hex(), run_id))
            self._changed.notify_all()

    def _answer(self, stub: ParameterServerStub, caller: pb.Caller, model: pb.Model) -> None:
        zeros = np.zeros(model.element_count, dtype=np.float32)
        header = pb.MomentumHeader(
            caller=caller,
            round_id=model.round_id,
            schema_hash=self._schema_hash,
            element_count=model.element_count,
        )
        stub.PushMomentum(
            iter([pb.MomentumMessage(header=header, payload=wire(zeros), trailer=trailer(zeros))]), timeout=CALL_S
        )

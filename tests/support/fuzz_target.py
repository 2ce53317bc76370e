"""A parameter server that is being fuzzed: honest clients train meanwhile, and after each batch it is examined."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from federations import DEADLINE_S, ServerProcess, small_experiment, until
from fuzz_http2 import Connection, speak
from fuzz_messages import METHODS, Call, Live, refusal_in, shown
from google.protobuf.message import DecodeError
from stock_client import Row, StockClient, trailer, wire

from common.config import Network
from common.rpc.frames import FRAME_OVERHEAD
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.limits import limits_of, memory_of
from ps.reader import RunReader

ANSWER_S = 30.0
"""The server's own deadlines are of one or two seconds here; what takes so long hangs."""
OPEN_S = 0.03
"""The honest clients let a round be open for so long, in which the fuzzer may answer it."""
MIB = 1 << 20
JITTER_MIB = 8.0
MINE = 4
"""The fuzzer's identity, the experiment's only adversary: it has a token, and may tap."""
NETWORK: dict[str, object] = {
    "first_message_s": 1.0,
    "rpc_deadline_s": 1.0,
    "liveness_s": 2.0,
    "round_deadline_s": 2.0,
    "grace_floor_s": 0.02,
    "join_grace_s": 0.5,
    "quorum_deadline_s": 60.0,
    "chunk_bytes": 16 * 1024,
}
CODES = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,  # by us
        grpc.StatusCode.ABORTED,  # too slow a reader
        grpc.StatusCode.INVALID_ARGUMENT,  # of a health check
        grpc.StatusCode.NOT_FOUND,  # a health check of another service
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # more metadata, or a larger message, than allowed
    )
)
"""How a call may end. Not UNKNOWN: that is an exception in the server; nor DEADLINE_EXCEEDED: that is no answer."""
BESIDE_REFUSALS = frozenset(("non_finite", "client_error", "evicted"))
"""What else is counted, by its own names."""
NAMES = BESIDE_REFUSALS | {kind_name(kind) for kind in pb.RefusalKind.values()}

Recipe = Call | Connection


class Trainer:
    """Honest stock clients 0 to 3, who are enough for a round, training all the time."""

    def __init__(self, server: ServerProcess) -> None:
        self.clients = [StockClient(server, client_id) for client_id in range(MINE)]
        self.rounds, self.round_id, self.suffered = 0, 0, list[str]()
        self._over = threading.Event()
        for client in self.clients:
            client.join()
        self._attendance = self.clients[0].attend(*self.clients[1:])
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            while not self._over.is_set():
                header, theta = self.clients[0].pull(self.round_id, wait_s=1.0)
                if header.HasField("refusal"):
                    self._suffer(header.refusal)
                if not header.HasField("model"):
                    continue
                self.round_id = header.model.round_id
                self._over.wait(OPEN_S)
                accepted = [self._push(client, theta) for client in self.clients]
                self.rounds += all(accepted)
                self.round_id += 1
        except Exception as problem:
            self.suffered.append(repr(problem))

    def _push(self, client: StockClient, theta: Row) -> bool:
        row = (theta / 10 + client.client_id / 100).astype(np.float32)
        message = pb.MomentumMessage(header=client.header(self.round_id), payload=wire(row), trailer=trailer(row))
        reply = client.send([message])
        if reply.HasField("refusal"):
            self._suffer(reply.refusal)
        return reply.HasField("accepted")

    def _suffer(self, refusal: pb.Refusal) -> None:
        # A machine that stands still for seconds makes anybody late: that is no fault of the server.
        if refusal.kind not in (pb.TRUNCATED, pb.LATE, pb.STALE_ROUND):
            self.suffered.append(f"{kind_name(refusal.kind)}: {refusal.message}")

    def close(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
        self._attendance.close()
        for client in self.clients:
            client.close()


class Target:
    """The server with its honest clients, and what has been seen so far."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self.trainer = server, Trainer(server)
        self.live = Live(
            run_id=server.run_id,
            client_id=MINE,
            token=server.tokens()[MINE],
            schema_hash=server.schema_hash,
            fingerprint=server.experiment.fingerprint(),
            num_parameters=server.num_parameters,
        )
        limits = limits_of(server.experiment.network, server.experiment.federation.clients)
        self.formula = memory_of(server.experiment, server.num_parameters, limits).total
        self.outcomes: Counter[str] = Counter()
        self.used: list[float] = []
        self._mine = StockClient(server, MINE)
        self._process = psutil.Process(server.pid)
        until(lambda: self.trainer.rounds >= 3 or self.trainer.suffered, "rounds to go on")
        self._at_start, self._connections = self._memory(), limits.connections

    def _memory(self) -> float:
        return float(self._process.memory_full_info().uss) / MIB

    # ---------------------------------------------------------------- a batch

    def send(self, batch: Sequence[Recipe], *, joined: bool) -> None:
        """Carry out a batch, all of it at the same time, and examine the server afterwards.

        Parameters
        ----------
        joined
            The fuzzer's identity joins first; otherwise it is whatever the batches before have made of it.

        Raises
        ------
        AssertionError
            Something is wrong; the batch is shown.
        """
        counted, reached = self.server.refusals(), self.trainer.rounds
        try:
            if joined:
                self.join()
            told = self._send(batch)
            self._examine(told, self.server.refusals() - counted, reached)
        except (AssertionError, OSError) as problem:
            status, log = psutil.Process(self.server.pid).status(), self.server.log()[-6000:]
            raise AssertionError(
                f"{problem}\nThe server ({status}) logged\n{log}\nafter the batch\n{shown(batch)}"
            ) from problem

    def join(self) -> None:
        """Let the fuzzer's identity join anew, unless it is suspended."""
        reply = self._mine.try_to_join()
        if reply.HasField("joined"):
            self.live.incarnation = reply.joined.incarnation

    def earn_suspension(self) -> None:
        """The fuzzer's identity breaks the protocol as often as it takes."""
        self.join()
        caller = pb.Caller(run_id=self.live.run_id, client_id=MINE, incarnation=self.live.incarnation)
        for _ in range(self.server.experiment.network.strikes):
            self._mine.push(0, np.zeros(1, dtype=np.float32), caller=caller, element_count=1 << 40)

    def _send(self, batch: Sequence[Recipe]) -> Counter[str]:
        """All of it at once; the refusals that were told."""
        wiretap = self.server.wiretap
        assert wiretap is not None
        with (
            ThreadPoolExecutor(len(batch) + 1) as threads,
            _channel(self.server.address) as main,
            _channel(wiretap) as tap,
        ):
            speaking = threads.submit(asyncio.run, self._speak([one for one in batch if isinstance(one, Connection)]))
            calling = [
                threads.submit(self._call, one, tap if one.method == "Tap" else main)
                for one in batch
                if isinstance(one, Call)
            ]
            speaking.result()
            return sum((call.result() for call in calling), Counter[str]())

    async def _speak(self, connections: Sequence[Connection]) -> None:
        async def one(number: int, connection: Connection) -> None:
            address = self.server.address if number % 4 else self.server.wiretap
            assert address is not None
            self.outcomes["http/2: " + await speak(address, connection, self.live, ANSWER_S)] += 1

        await asyncio.gather(*(one(number, connection) for number, connection in enumerate(connections)))

    def _call(self, recipe: Call, channel: grpc.Channel) -> Counter[str]:
        """One call; the refusals it was told."""
        method, told = METHODS[recipe.method], Counter[str]()
        begun, over = threading.Event(), threading.Event()

        def messages() -> Iterator[bytes]:
            for part in recipe.parts:
                self.live.round_id = self.trainer.round_id
                yield part.bytes(self.live)
            if recipe.ending == "cancel":
                begun.wait()
                call.cancel()
            if recipe.ending == "hang":
                over.wait(2 * ANSWER_S)

        call: Any = channel.stream_stream(method.path)(
            messages(),
            timeout=ANSWER_S,
            metadata=recipe.metadata,
            compression=grpc.Compression.Gzip if recipe.compressed else grpc.Compression.NoCompression,
        )
        begun.set()
        try:
            for answer in call:
                refusal = self._read(recipe, answer)
                if refusal is not None:
                    told[kind_name(refusal.kind)] += 1
                    self.outcomes[kind_name(refusal.kind)] += 1
                if recipe.ending == "cancel after the answer":
                    call.cancel()
        except grpc.RpcError:
            pass
        finally:
            over.set()
        self.outcomes[f"{recipe.method}: {call.code().name}"] += 1
        assert call.code() in CODES, f"{recipe} ended with {call.code()}: {call.details()}"
        return told

    def _read(self, recipe: Call, answer: bytes) -> pb.Refusal | None:
        kind = METHODS[recipe.method].reply
        assert len(answer) <= self.server.experiment.network.chunk_bytes + FRAME_OVERHEAD, f"{len(answer)} bytes"
        try:
            reply = kind.FromString(answer)
        except DecodeError as problem:
            raise AssertionError(f"the answer to {recipe} is no {kind.DESCRIPTOR.name}: {problem}") from None
        if isinstance(reply, pb.JoinReply) and reply.HasField("joined"):
            self.live.incarnation = reply.joined.incarnation
        refusal = refusal_in(reply)
        if refusal is None:
            self.outcomes[f"{recipe.method}: served"] += 1
        elif not (refusal.message.isprintable() and len(refusal.message) < 1_000):
            raise AssertionError(f"{recipe} is refused with {refusal.message[:200]!r}…")
        return refusal

    # ---------------------------------------------------------------- the examination

    def _examine(self, told: Counter[str], counted: Counter[str], reached: int) -> None:
        until(
            lambda: self.trainer.rounds >= reached + 2 or self.trainer.suffered or self.server.events("end"),
            "rounds to go on",
        )
        assert not self.server.events("end"), f"the run has ended: {self.server.events('end')}"
        assert not self.trainer.suffered, f"an honest client suffers: {self.trainer.suffered}"
        assert set(counted) <= NAMES, f"counted under names that do not exist: {counted}"
        assert not told - counted, f"refused {told}, of which only {counted} are counted"
        log = self.server.log()
        assert not [line for line in log.splitlines() if _is_bad(line)], "its log shows a defect"
        self.used.append(self._memory() - self._at_start)
        assert self.used[-1] <= self.formula / MIB, f"{self.used[-1]:.0f} MiB more than at the start"

    def assert_no_growth(self) -> None:
        """Between the middle third of the batches and the last, memory has not grown; nor are connections left."""
        third = len(self.used) // 3
        middle, last = np.median(self.used[third : 2 * third]), np.median(self.used[2 * third :])
        assert last - middle <= JITTER_MIB, f"every batch's memory in MiB: {[round(mib, 1) for mib in self.used]}"
        until(lambda: len(self._process.net_connections("tcp")) <= 2 + MINE + 2, "connections to be gone")

    def close(self) -> None:
        self.trainer.close()
        self._mine.close()

    def finish(self) -> dict[str, Any]:
        """Stop the run in good order; its ledger must be whole, and its summary count what was counted."""
        self.close()
        assert not self.trainer.suffered, self.trainer.suffered
        counted = self.server.refusals()
        summary = self.server.stop()
        assert summary["status"] == "interrupted"
        reader = RunReader(self.server.run_dir)
        reader.verify()
        assert summary["rounds"] == reader.status().round_id >= self.trainer.rounds - 1  # the last may not have closed
        assert not counted - Counter(summary["refusals"]), (counted, summary["refusals"])
        return summary


def _is_bad(line: str) -> bool:
    """Whether a line of the log shows a defect: an exception, or a peer's bytes as they came."""
    return "Traceback" in line or " ERROR " in line or "Exception" in line or not line.isprintable()


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def fuzzed(folder: Path, **network: object) -> Iterator[Target]:
    """A server to be fuzzed. By default nobody is suspended for what they send, or soon nothing would be looked at."""
    lenient = {"strikes": 0, "max_joins": 10**9}
    network = {key: value for key, value in lenient.items() if key in Network.model_fields} | network
    experiment = small_experiment(
        federation={"clients": MINE + 1, "byzantine": 1},
        training={"learning_rate": 0.1, "clip_norm": 1.0},
        attack={"name": "bit_flip", "knowledge": "omniscient"},
        privacy={"epsilon": 500.0, "delta": 1e-3},
        aggregation={"rule": "trimmed_mean"},
        network={**NETWORK, **network},
    )
    with ExitStack() as resources:
        server = resources.enter_context(ServerProcess(experiment, folder)).listening()
        target = Target(server)
        resources.callback(target.close)
        yield target

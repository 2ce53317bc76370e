"""A parameter server over loopback, made twice: its inbox on a GPU, and on the CPU. The models have to agree.

Everything is the product's but for the clients, which train nothing (:mod:`scale_load`, in processes of their own):
gRPC, inbox, trimmed mean, noise drawn ahead and from a seed, ledger, durable commit. It needs torch, numpy, scipy,
grpcio and protobuf, and nothing else. Two packages that the product has besides are stood in for where they are missing
(:mod:`gpu_stand_ins`), and the output says so.

Run by :mod:`gpu_check`. With the argument ``load`` it is one of the client processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_stand_ins  # before anything that needs what it stands in for
import grpc
import numpy as np
import scale_load
import torch

from common.aggregation import make_rule
from common.aggregation.step import prepare_conditioning
from common.noise import NoiseAhead, SeededGaussian
from common.rpc.methods import PARAMETER_SERVER, handlers
from ps.coordinator import Coordinator
from ps.identity import Gate
from ps.inbox import Inbox
from ps.limits import limits_of, options_of
from ps.membership import Membership
from ps.privacy.ledger import Budget, Genesis, Ledger
from ps.release import Mechanism
from ps.round_maker import RoundMaker
from ps.rounds import EndRun
from ps.service import ParameterServerService
from ps.store import RoundMetrics, RunStore
from ps.streams import Streams
from ps.timing import SEGMENTS
from ps.uploaded_noise import UploadAhead

SCRIPT = Path(__file__).resolve()
FINGERPRINT = "loopback"
SCHEMA_HASH = hashlib.sha256(b"loopback").digest()
EPSILON, DELTA, CLIP_NORM, LEARNING_RATE, SERVER_MOMENTUM, SEED = 10.0, 1e-5, 1.0, 0.1, 0.9, 7
TOLERANCE = 1e-6
"""Of the largest entry of θ."""
DEADLINE_S = 60.0
"""For one server's run; the whole check has four minutes."""
NOTICEABLE_S = 0.5e-3
"""Waits below this are not looked into, nor is where the whole matrix would travel in less."""

NETWORK = {
    "join_deadline_s": 120.0,
    "join_grace_s": 15.0,
    "round_deadline_s": 60.0,
    "throughput_floor": 1e6,
    "grace_factor": 1.0,
    "grace_floor_s": 0.5,
    "patience_s": 3.0,
    "round_period_s": 10.0,
    "publish_margin_s": 2.0,
    "quorum_deadline_s": 60.0,
    "rpc_deadline_s": 30.0,
    "first_message_s": 5.0,
    "heartbeat_s": 1.0,
    "liveness_s": 15.0,
    "leave_deadline_s": 10.0,
    "keepalive_s": 5.0,
    "keepalive_timeout_s": 5.0,
    "chunk_bytes": 1 << 20,
    "max_metadata_bytes": 8 << 10,
    "max_streams_per_client": 8,
    "max_streams_per_connection": 256,
    "max_strangers": None,
    "max_connections": None,
    "strikes": 3,
    "max_repeats": 16,
}
"""The defaults of ``[network]``: :mod:`common.config` has them too, and needs pydantic."""


@dataclass(frozen=True)
class Setting:
    """What is run on either device."""

    clients: int = 20
    dimension: int = 1_000_000
    rounds: int = 20

    @property
    def byzantine(self) -> int:
        return max(self.clients // 5, min(1, (self.clients - 1) // 2))

    def experiment(self) -> Any:
        """What the parameter server asks of its experiment."""
        network = SimpleNamespace(**NETWORK)
        network.deadline_of_round = lambda model_bytes, clients: (
            network.round_deadline_s + 2 * model_bytes * clients / network.throughput_floor
        )
        return SimpleNamespace(
            network=network,
            # All have to answer: who is left out of a round would depend on who was slow.
            federation=SimpleNamespace(clients=self.clients, byzantine=self.byzantine, needed=self.clients),
            training=SimpleNamespace(rounds=self.rounds, seed=SEED, schedule_of=_schedule_of),
            privacy=SimpleNamespace(delta=DELTA, calibration="exact", round_timing="adaptive"),
        )


def _schedule_of(quantity: str) -> Any:
    value = {"learning_rate": LEARNING_RATE, "server_momentum": SERVER_MOMENTUM}[quantity]
    return lambda _round: value


@dataclass
class Made:
    """A finished run."""

    theta: torch.Tensor
    rounds: list[RoundMetrics] = field(default_factory=list)

    def median_s(self, segment: str) -> float:
        return statistics.median(metrics.segments.get(segment, 0.0) for metrics in self.rounds)

    @property
    def latency_s(self) -> float:
        return statistics.median(metrics.latency_s for metrics in self.rounds)


class Load:
    """A process of clients (:mod:`scale_load`): one JSON object a line, both ways."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of clients has ended: see its traceback above")
        found: dict[str, Any] = json.loads(line)
        if found.get("lost"):
            raise RuntimeError(f"clients could not go on: {'; '.join(found['lost'])}")
        return found


@asynccontextmanager
async def loads(setting: Setting) -> AsyncIterator[list[Load]]:
    """Processes that hold all the clients between them; as many as leave the server room."""
    count = min(max(1, ((os.cpu_count() or 2) - 2) // 3), 4, setting.clients)
    edges = [round(setting.clients * k / count) for k in range(count + 1)]
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, str(SCRIPT), "load")
    processes = [
        await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment) for _ in range(count)
    ]
    try:
        found = [Load(process) for process in processes]
        shape = {"d": setting.dimension, "chunk_bytes": NETWORK["chunk_bytes"], "seed": SEED}
        parts = zip(found, edges, edges[1:], strict=False)
        await asyncio.gather(*(load.ask({"first": first, "last": last, **shape}) for load, first, last in parts))
        yield found
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def serve(setting: Setting, device: torch.device, clients: list[Load], folder: Path, *, uploads: bool) -> Made:
    """One run: a parameter server in this process, its clients in theirs.

    Parameters
    ----------
    uploads
        Noise is uploaded ahead, as the product does on CUDA.

    Raises
    ------
    RuntimeError
        It did not end well, or somebody missed a round.
    """
    experiment, n, d = setting.experiment(), setting.clients, setting.dimension
    source = SeededGaussian(SEED)
    budget = Budget(EPSILON, DELTA, setting.rounds)
    rule = make_rule("trimmed_mean", num_byzantine=setting.byzantine)
    mechanism = Mechanism(rule, n, setting.byzantine, CLIP_NORM, budget.noise_multiplier)
    rule.prepare(n, d, device)
    prepare_conditioning(n, d)
    genesis = Genesis(
        fingerprint=FINGERPRINT,
        configuration=FINGERPRINT,
        run_id=secrets.token_hex(8),
        epsilon=EPSILON,
        delta=DELTA,
        rounds=setting.rounds,
        calibration="exact",
        noise_multiplier=budget.noise_multiplier,
        sensitivity=mechanism.charged_sensitivity(d),
        num_clients=n,
        num_byzantine=setting.byzantine,
        rule=rule.name,
        premises=(),
        at=time.time(),
    )
    store, _ = RunStore.create(
        folder,
        run_id=genesis.run_id,
        configuration={},
        fingerprint=FINGERPRINT,
        genesis_json=genesis.to_json(),
        theta=np.zeros(d, dtype=np.float32),
    )
    tokens = {client_id: secrets.token_hex(16) for client_id in range(n)}
    made = Made(torch.empty(0))
    with store:
        inbox = Inbox(n, d, mechanism.condition, device)
        maker = RoundMaker(
            experiment,
            store=store,
            ledger=Ledger.opened(genesis),
            budget=budget,
            mechanism=mechanism,
            noise=UploadAhead(source, device) if uploads else NoiseAhead(source),
            inbox=inbox,
        )
        coordinator = Coordinator(
            experiment,
            store=store,
            maker=maker,
            inbox=inbox,
            membership=lambda roster, clock, live_changed: Membership(
                roster,
                run_id=store.run_id,
                fingerprint=FINGERPRINT,
                schema_hash=SCHEMA_HASH,
                token_hashes={one: hashlib.sha256(token.encode()).digest() for one, token in tokens.items()},
                gate=Gate(SimpleNamespace(enabled=False, roster=None, revoked=None), n),  # type: ignore[arg-type]
                clock=clock,
                live_changed=live_changed,
            ),
            report=lambda _: None,
            evaluate=lambda _: None,
            observe=made.rounds.append,
        )
        end, answered = await _through(coordinator, experiment, clients, tokens)
        made.theta = torch.from_numpy(store.latest().theta.copy())
    if end.status != "completed":
        raise RuntimeError(f"the run on {device} ended: {end.status}: {end.message}")
    if any(rounds != list(range(setting.rounds)) for rounds in answered) or len(answered) != n:
        raise RuntimeError(f"on {device} not all clients answered all rounds: {answered}")
    return made


async def _through(
    coordinator: Coordinator, experiment: Any, clients: list[Load], tokens: dict[int, str]
) -> tuple[EndRun, list[list[int]]]:
    """From listening to the last client's leaving, as :mod:`ps.main` does it: how it ended, and who answered when."""
    network = experiment.network
    limits = limits_of(network, len(tokens))
    streams = Streams(
        per_client=limits.streams_per_client, strangers=limits.strangers, first_message_s=network.first_message_s
    )
    service = handlers(PARAMETER_SERVER, ParameterServerService(coordinator, "{}", streams), limits.message_bytes)
    server = grpc.aio.server(options=options_of(limits, network), maximum_concurrent_rpcs=limits.backstop)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    terms = {
        "do": "federation",
        "address": f"127.0.0.1:{port}",
        "chunk_bytes": limits.chunk_bytes,
        "fingerprint": FINGERPRINT,
        "schema_hash": SCHEMA_HASH.hex(),
        "tokens": tokens,
    }
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as both:
            running = both.create_task(coordinator.run())
            loading = [both.create_task(load.ask(terms)) for load in clients]
        await coordinator.members.all_left(network.leave_deadline_s)
    finally:
        await server.stop(grace=0.5)
        coordinator.close()
    return running.result(), [rounds for load in loading for rounds in load.result()["rounds"]]


async def both(setting: Setting, device: torch.device) -> tuple[Made, Made]:
    """The run on the CPU and the run on ``device``, with the same clients."""
    with tempfile.TemporaryDirectory() as folder:
        async with loads(setting) as clients:
            here = await serve(setting, torch.device("cpu"), clients, Path(folder, "cpu"), uploads=False)
            there = await serve(setting, device, clients, Path(folder, "device"), uploads=True)
    return here, there


def check_loopback(device: str, setting: Setting) -> list[str]:
    """Run it on both and print their segments; what is wrong, in words."""
    for said in gpu_stand_ins.STOOD_IN:
        print(said)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the product's server
    try:
        here, there = asyncio.run(both(setting, torch.device(device)))
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    except TimeoutError:
        return [f"loopback: a run was not over after {DEADLINE_S:.0f} s"]
    finally:
        torch.set_num_threads(threads)
    for line in table(here, there, device, setting):
        print(line)
    return [*_compared(here, there, device), *_waited(there, device, setting)]


def table(here: Made, there: Made, device: str, setting: Setting) -> Iterable[str]:
    """Median durations of the segments of a round (:mod:`ps.timing`), one device beside the other."""
    yield (
        f"n = {setting.clients}, f = {setting.byzantine}, d = {setting.dimension:,}, {setting.rounds} rounds: "
        "medians in ms"
    )
    yield f"{'segment':10} {'cpu':>9} {device:>9}"
    for segment in SEGMENTS:
        yield f"{segment:10} {here.median_s(segment) * 1e3:9.3f} {there.median_s(segment) * 1e3:9.3f}"
    yield f"{'in all':10} {here.latency_s * 1e3:9.3f} {there.latency_s * 1e3:9.3f}"


def _compared(here: Made, there: Made, device: str) -> list[str]:
    """θ after the last round: on a second CPU to the bit, on a GPU within the tolerance."""
    scale = max(float(here.theta.abs().max()), 1e-30)
    difference = float((here.theta - there.theta).abs().max()) / scale
    same = torch.equal(here.theta.view(torch.int32), there.theta.view(torch.int32))
    print(f"θ: difference {difference:.1e} of the scale, {'the same bits' if same else 'not the same bits'}")
    moved = bool(here.theta.any()) and bool(torch.isfinite(here.theta).all())
    failures = [] if moved else ["loopback: θ did not move, or not to numbers"]
    if not (same if device == "cpu" else difference <= TOLERANCE):
        failures.append(f"loopback: θ on {device} differs from the CPU's by {difference:.1e} of the scale")
    return failures


def _waited(there: Made, device: str, setting: Setting) -> list[str]:
    """Rows and noise have to be on the GPU when the round closes: nothing is left to wait for but the last row."""
    if device == "cpu":
        return []
    whole_s, rows_s, noise_s = _copy_s(setting, device), there.median_s("transfer"), there.median_s("noise")
    print(
        f"waited after the round closed: {rows_s * 1e3:.3f} ms for its rows (all at once take {whole_s * 1e3:.3f} ms), "
        f"{noise_s * 1e3:.3f} ms for its noise"
    )
    if whole_s < NOTICEABLE_S:
        return []
    late = {"rows were": rows_s > whole_s / 2, "noise was": noise_s > NOTICEABLE_S}
    return [f"loopback: the {what} not on {device} when the round closed" for what, true in late.items() if true]


def _copy_s(setting: Setting, device: str) -> float:
    """What copying the matrix of a round takes, from pinned memory."""
    host = torch.zeros((setting.clients, setting.dimension), pin_memory=True)
    there = torch.empty_like(host, device=device)
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_at)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    if sys.argv[1:] != ["load"]:
        sys.exit("run benchmarks/gpu_check.sh, which runs this too")
    asyncio.run(scale_load.main())

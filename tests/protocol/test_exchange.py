"""The client's protocol loop against real servers: what it does when the server refuses, vanishes or goes back.

The exchange runs in this process, with momenta that need no model; so each test sees what a client sees.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from federations import ServerProcess, small_experiment
from stock_client import Federation, StockClient

from client.exchange import Exchange, Momentum, Outcome, PublishedModel
from client.memory import NEVER, Forgetful, Memory, RunTerms, Seen
from common.config import Experiment
from common.errors import (
    ConfigError,
    JoinRefused,
    PrivacyError,
    ServerRolledBack,
    ServerUnreachable,
    Superseded,
    publicly,
)
from common.privacy.calibration import calibrate
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.reader import RunReader

Hook = Callable[[PublishedModel], None]


class Zeros:
    """Identities that send zeros; remembers the models it was given."""

    def __init__(
        self,
        server: ServerProcess,
        ids: list[int],
        experiment: Experiment | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.models: list[PublishedModel] = []
        self.before_round: Hook = lambda _model: None
        self.exchange = Exchange(
            experiment or server.experiment,
            address=server.address,
            tokens=server.tokens(ids),
            schema_hash=server.schema_hash,
            num_parameters=server.num_parameters,
            produce=self._produce,
            memory=memory,
        )
        self._ids = ids

    async def _produce(self, model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
        self.models.append(model)
        self.before_round(model)  # the client does nothing meanwhile
        for client_id in self._ids:
            yield client_id, np.zeros_like(model.theta)

    def run(self, deadline_s: float = 30.0) -> Outcome:
        async def bounded() -> Outcome:
            async with asyncio.timeout(deadline_s):
                return await self.exchange.run()

        return asyncio.run(bounded())


class Remembers(Forgetful):
    """What it was told; answers a joining as a test wants."""

    def __init__(self, seen: Seen = NEVER, refusal: Exception | None = None) -> None:
        self.terms: list[RunTerms] = []
        self.saw_rounds: list[int] = []
        self._answer, self._refusal = seen, refusal

    async def joined(self, terms: RunTerms) -> Seen:
        self.terms.append(terms)
        if self._refusal is not None:
            raise self._refusal
        return self._answer

    def saw(self, _run_id: str, seen: Seen) -> None:
        self.saw_rounds.append(seen.round_id)


def has_left(server: ServerProcess, client: Zeros, client_id: int) -> bool:
    """Whether the server does not know this incarnation any more."""
    stranger = StockClient(server, client_id)
    stranger.caller = client.exchange.callers[client_id]
    try:
        return stranger.leave().refusal.kind == pb.NOT_A_MEMBER
    finally:
        stranger.close()


def free_address() -> str:
    """A port nobody listens at now, so that a server can come back to it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def alone(**network: object) -> Experiment:
    """A run of one client, which needs nobody else."""
    return small_experiment(federation={"clients": 1, "byzantine": 0}, training={"rounds": 6}, network=network)


# ---------------------------------------------------------------- refused


def test_a_client_with_another_configuration_names_the_key_that_differs(server: ServerProcess) -> None:
    mine = small_experiment(training={"learning_rate": 0.25, "seed": 3})
    with pytest.raises(ConfigError) as refused:
        Zeros(server, [0], mine).run()
    said = str(refused.value).splitlines()[1:]
    assert [line.split(" is ")[0].strip() for line in said] == ["training.learning_rate", "training.seed"]
    assert "0.25" in said[0]
    assert "1.0" in said[0]


def test_a_client_with_a_false_token_is_told_so(server: ServerProcess) -> None:
    client = Zeros(server, [0])
    client.exchange._members._tokens[0] = "false"
    with pytest.raises(JoinRefused, match="client 0: bad_token"):
        client.run()


def test_a_client_of_another_model_is_refused_before_any_tensor_travels(server: ServerProcess) -> None:
    client = Zeros(server, [0])
    client.exchange._members._schema_hash = bytes(32)
    with pytest.raises(JoinRefused, match="wrong_schema"):
        client.run()
    assert client.models == []


def test_a_client_gives_way_to_a_newer_incarnation(server: ServerProcess, federation: Federation) -> None:
    older = Zeros(server, [0])
    older.before_round = lambda _model: federation.clients[0].join() and None
    with pytest.raises(Superseded):
        older.run()
    assert len(older.models) == 1


def test_a_client_whose_row_is_still_held_by_a_broken_stream_of_its_own_joins_again(
    server: ServerProcess, federation: Federation, round_id: int
) -> None:
    """As after a connection that vanished without a word: the server has not noticed yet."""
    theta, rows = federation.model(round_id), federation.rows(round_id)
    mine, held = Zeros(server, [4]), StockClient(server, 4)
    rows[4] = 0.0

    def before_round(model: PublishedModel) -> None:
        if len(mine.models) == 1:
            assert model.round_id == round_id
            held.caller = mine.exchange.callers[4]
            held.begin_push(held.messages(round_id, rows[0])[:1])
            federation.push_all(round_id, rows, but=[3, 4])
        elif model.round_id == round_id:
            federation.push_all(round_id, rows, but=[0, 1, 2, 4])
        else:
            raise TimeoutError  # enough has been seen

    mine.before_round = before_round
    with pytest.raises(TimeoutError):
        mine.run()
    held.close()
    federation.assert_round_is_mean_of(round_id, theta, rows)


# ---------------------------------------------------------------- what it remembers


def test_a_client_whose_memory_refuses_has_left_before_it_sent_anything(
    server: ServerProcess, federation: Federation, round_id: int
) -> None:
    memory = Remembers(refusal=PrivacyError("enough"))
    client = Zeros(server, [3, 4], memory=memory)
    with pytest.raises(PrivacyError, match="enough"):
        client.run()
    assert (client.models, memory.saw_rounds) == ([], [])
    assert has_left(server, client, 3)
    assert has_left(server, client, 4)
    assert [(terms.run_id, terms.rounds) for terms in memory.terms] == [(server.run_id, 1_000_000)]


def test_a_client_that_remembers_a_later_round_refuses_at_once(server: ServerProcess) -> None:
    client = Zeros(server, [0], memory=Remembers(seen=Seen(10**9, b"")))
    with pytest.raises(ServerRolledBack, match=f"after round {10**9}"):
        client.run()
    assert client.models == []
    assert has_left(server, client, 0)


def test_a_client_that_remembers_another_ledger_of_the_open_round_refuses_it(
    server: ServerProcess, federation: Federation, round_id: int
) -> None:
    client = Zeros(server, [4], memory=Remembers(seen=Seen(round_id, bytes(32))))
    with pytest.raises(ServerRolledBack, match="with another ledger"):
        client.run()
    assert client.models == []


def test_a_client_that_is_told_to_stop_leaves_first(server: ServerProcess, federation: Federation) -> None:
    client = Zeros(server, [4])

    async def stopped_in_its_first_round() -> None:
        task = asyncio.ensure_future(client.exchange.run())
        client.before_round = lambda _model: task.cancel() and None
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(stopped_in_its_first_round(), 30))
    assert has_left(server, client, 4)


def test_a_client_that_was_too_slow_goes_on_with_the_newest_model(
    server: ServerProcess, federation: Federation, round_id: int
) -> None:
    """What was sent to it meanwhile is of rounds that are over: to work through it would keep it late for ever."""
    client = Zeros(server, [4])

    async def slow_in_its_first_round() -> None:
        task = asyncio.ensure_future(client.exchange.run())

        def others_go_on(model: PublishedModel) -> None:
            if len(client.models) > 1:
                task.cancel()
                return
            for later in range(model.round_id, model.round_id + 3):
                federation.model(later)
                for other, row in zip(federation.clients[:4], federation.rows(later), strict=False):
                    other.send(other.messages(later, row))
            federation.model(model.round_id + 3)

        client.before_round = others_go_on
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(slow_in_its_first_round(), 60))
    first, second = (model.round_id for model in client.models)
    assert second == first + 3


def test_a_memory_is_told_the_terms_of_the_run_and_every_model_once(tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 1, "byzantine": 0}, training={"rounds": 6}, privacy={"epsilon": 8.0}
    )
    with ServerProcess(experiment, tmp_path) as server:
        memory = Remembers()
        outcome = Zeros(server, [0], memory=memory).run()
    z = calibrate(8.0, 1e-5, 6)
    assert memory.terms == [RunTerms(server.run_id, z, 6)]
    assert memory.saw_rounds == list(range(6))
    assert (outcome.status, outcome.releases) == ("completed", 6)


# ---------------------------------------------------------------- the end


def test_a_client_that_comes_after_the_end_is_told_how_it_was(tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 2, "byzantine": 1, "quorum": 1},
        training={"rounds": 2},
        network={"leave_deadline_s": 60.0},
    )
    with ServerProcess(experiment, tmp_path) as server:
        lingering = StockClient(server.listening(), 1)
        lingering.join()
        assert Zeros(server, [0]).run().status == "completed"
        late = Zeros(server, [0])  # the server still waits for the other one to leave
        assert late.run() == Outcome("completed", publicly("completed"))
        assert late.models == []
        lingering.leave()
        lingering.close()
        server.finish()


def test_a_run_of_one_client_ends_for_it_as_it_ends_for_the_server(tmp_path: Path) -> None:
    with ServerProcess(alone(), tmp_path) as server:
        client = Zeros(server, [0])
        assert client.run() == Outcome("completed", publicly("completed"))
        summary = server.finish()
    assert [model.round_id for model in client.models] == list(range(6))
    assert (summary["status"], summary["refusals"]) == ("completed", {})


def test_a_client_learns_that_the_run_was_interrupted(tmp_path: Path) -> None:
    with ServerProcess(alone(), tmp_path) as server:
        client = Zeros(server, [0])
        client.before_round = lambda model: os.kill(server.pid, signal.SIGTERM) if model.round_id == 3 else None
        assert client.run().status == "interrupted"
        assert server.finish()["status"] == "interrupted"


def test_a_client_gives_up_when_the_server_is_gone_for_too_long(tmp_path: Path) -> None:
    with ServerProcess(alone(server_gone_s=1.0), tmp_path) as server:
        client = Zeros(server, [0])
        gone_at: list[float] = []

        def before_round(model: PublishedModel) -> None:
            if model.round_id == 2:
                server.kill()
                gone_at.append(time.monotonic())

        client.before_round = before_round
        with pytest.raises(ServerUnreachable, match=r"1 s \(network\.server_gone_s\)"):
            client.run()
    assert 1.0 <= time.monotonic() - gone_at[0] < 20.0


def test_a_server_that_goes_after_a_long_silence_is_waited_for_as_long_as_any_other(tmp_path: Path) -> None:
    """A client that computes for longer than ``server_gone_s`` has heard nothing meanwhile, and that is no sign."""
    experiment = alone(server_gone_s=3.0, address=free_address())
    servers = [ServerProcess(experiment, tmp_path)]
    client = Zeros(servers[0], [0])

    def before_round(model: PublishedModel) -> None:
        if model.round_id == 2 and len(servers) == 1:
            time.sleep(3.1)
            servers[0].kill()
            servers.append(ServerProcess(experiment, tmp_path, run_dir=servers[0].run_dir, resume=True).listening())

    client.before_round = before_round
    assert client.run().status == "completed"
    assert servers[1].finish()["rounds"] == 6


# ---------------------------------------------------------------- a server that comes back


def test_a_client_outlives_its_server_and_refuses_one_whose_ledger_went_back(tmp_path: Path) -> None:
    copy, experiment = tmp_path / "copy", alone(address=free_address())
    servers = [ServerProcess(experiment, tmp_path)]
    run_dir = servers[0].run_dir
    client = Zeros(servers[0], [0])

    def before_round(model: PublishedModel) -> None:
        if model.round_id in (2, 4) and len(servers) == model.round_id // 2:
            servers[-1].kill()
            if model.round_id == 2:
                shutil.copytree(run_dir, copy)
            servers.append(ServerProcess(experiment, tmp_path, run_dir=run_dir, resume=True).listening())

    client.before_round = before_round
    assert client.run().status == "completed"

    seen = [model.round_id for model in client.models]
    assert seen == [0, 1, 2, 2, 3, 4, 4, 5]
    for first, again in ((2, 3), (5, 6)):  # a round that is opened again has the same model, under the same ledger
        assert client.models[first].ledger_head == client.models[again].ledger_head
        np.testing.assert_array_equal(client.models[first].theta, client.models[again].theta)
    assert [server.events("resumed") for server in servers] == [
        [],
        [{"event": "resumed", "round": 2}],
        [{"event": "resumed", "round": 4}],
    ]
    assert servers[-1].finish()["rounds"] == 6
    ledger = RunReader(run_dir)
    assert [round_id for round_id, _, _ in ledger.ledger_rows()] == list(range(7))
    ledger.verify()

    with ServerProcess(experiment, tmp_path, run_dir=copy, resume=True) as restored:
        restored.listening()
        with pytest.raises(ServerRolledBack, match="round 2 after round 5"):
            client.run()
        assert StockClient(restored, 0).join().next_round == 2  # others, who saw nothing, are let in


def test_a_server_that_made_the_same_round_anew_is_refused_too(tmp_path: Path) -> None:
    """A copy that is one round behind makes that round again: another release, which its ledger charges once."""
    copy, experiment = tmp_path / "copy", alone(address=free_address())
    resources = ExitStack()
    first = resources.enter_context(ServerProcess(experiment, tmp_path))
    client = Zeros(first, [0])

    def before_round(model: PublishedModel) -> None:
        if model.round_id == 2 and not copy.exists():
            shutil.copytree(first.run_dir, copy)  # the server is idle now: it waits for us
        if model.round_id == 3:
            first.kill()
            with ServerProcess(experiment, tmp_path, run_dir=copy, resume=True) as restored:
                other = StockClient(restored.listening(), 0)
                other.join()
                other.push_accepted(2, np.ones(first.num_parameters, dtype=np.float32))
                assert other.pull(3)[0].model.round_id == 3
                restored.kill()
            resources.enter_context(ServerProcess(experiment, tmp_path, run_dir=copy, resume=True)).listening()

    client.before_round = before_round
    with resources, pytest.raises(ServerRolledBack, match="round 3 after round 3 with another ledger"):
        client.run()


def test_a_refusal_names_nothing_that_a_peer_wrote_unfiltered(server: ServerProcess) -> None:
    stranger = StockClient(server, 0)
    refusal = stranger.try_to_join(run_id="\x1b[2J" + "x" * 5000).refusal
    assert refusal.kind == pb.WRONG_RUN
    assert refusal.message.isprintable()
    assert len(refusal.message) < 400
    stranger.close()

"""Peers that vanish, stop, or are cut off: noticed within seconds, on both sides, and everything goes on afterwards.

The processes are real. How long it took is printed (``pytest -s``), and held to a generous bound.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cutting_proxy import CuttingProxy
from federations import (
    Child,
    ServerProcess,
    adversary_process,
    client_process,
    halting_client_process,
    small_experiment,
    until,
)
from stock_client import StockClient

from common.config import Experiment
from common.errors import exit_code_of
from ps.reader import RunReader

FAST = {
    "heartbeat_s": 0.2,
    "liveness_s": 3.0,
    "keepalive_s": 1.0,
    "keepalive_timeout_s": 1.0,
    "join_grace_s": 60.0,
    "leave_deadline_s": 10.0,
}
"""A peer is noticed to be gone after two seconds by keepalive, and after three by its heartbeats."""
SPARE_S = 12.0
"""For a machine that is busy with other things."""


def experiment_of(clients: int, byzantine: int, **sections: Mapping[str, Any]) -> Experiment:
    """A federation that waits for everybody who is there, at an address that a server can come back to."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    fixed: dict[str, Mapping[str, Any]] = {
        "federation": {"clients": clients, "byzantine": byzantine},
        "training": {"learning_rate": 0.1},
        "network": FAST | {"address": address, "grace_floor_s": 60.0},
    }
    sections.setdefault("network", {})
    return small_experiment(
        **{name: fixed.get(name, {}) | dict(sections.get(name, {})) for name in {**fixed, **sections}}
    )


def committed(server: ServerProcess) -> int:
    return RunReader(server.run_dir).status().round_id


def reasons(server: ServerProcess) -> list[str]:
    """Why each round closed, from the first."""
    with sqlite3.connect(f"file:{server.run_dir / 'run.sqlite'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT notes FROM models WHERE round_id > 0 ORDER BY round_id").fetchall()
    connection.close()
    return [json.loads(notes)["closed"] for (notes,) in rows]


def some_rounds(server: ServerProcess, count: int = 2) -> None:
    """Wait for rounds that began after now."""
    reached = committed(server)
    until(lambda: committed(server) > reached + count, "rounds to go on")


@contextmanager
def stopped(*processes: Child) -> Iterator[None]:
    """Frozen by SIGSTOP meanwhile: alive for the system, and silent."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


# ---------------------------------------------------------------- the server notices


def test_a_client_that_is_killed_stopped_or_cut_off_is_noticed_by_the_server_within_seconds(tmp_path: Path) -> None:
    """Four clients halt in the round that all others have answered; each then goes in a way of its own."""
    experiment = experiment_of(clients=8, byzantine=1, federation={"quorum": 4})
    with ExitStack() as resources:
        server = resources.enter_context(ServerProcess(experiment, tmp_path)).listening()
        ids = dict(zip(("killed", "stopped", "held", "swallowed"), range(4, 8), strict=True))
        proxies = {way: CuttingProxy(server.address) for way in ids}
        halting = {
            way: resources.enter_context(
                halting_client_process(
                    tmp_path / way, experiment, proxies[way].address, server.tokens([number]), frames=0
                )
            )
            for way, number in ids.items()
        }
        for proxy in proxies.values():
            resources.callback(proxy.close)
        others = [StockClient(server, client_id) for client_id in range(4)]
        for other in others:
            other.join()
            resources.callback(other.close)
            resources.callback(other.attend().close)
        for client in halting.values():
            client.wait_for("halted")
        zeros = np.zeros(server.num_parameters, dtype=np.float32)
        for other in others:
            other.push_accepted(0, zeros)
        assert others[0].pull(1, wait_s=0.5)[0].HasField("not_yet")  # the round waits for those that are there

        began = time.monotonic()
        halting["killed"].kill()
        os.kill(halting["stopped"].pid, signal.SIGSTOP)
        proxies["held"].cut("held")
        proxies["swallowed"].cut("swallowed")
        took: dict[str, float] = {}

        def all_noticed() -> bool:
            for way, number in ids.items():
                if way not in took and re.search(rf"dead: clients? .*\b{number}\b", server.log()):
                    took[way] = time.monotonic() - began
            return len(took) == len(ids)

        until(all_noticed, "their deaths")
        assert others[0].pull(1)[0].model.round_id == 1
        assert reasons(server) == ["rest_gone"]
    print("the server noticed after", {way: f"{seconds:.1f} s" for way, seconds in took.items()})
    assert took["killed"] < 2 * FAST["heartbeat_s"] + SPARE_S
    assert max(took.values()) < FAST["liveness_s"] + SPARE_S


# ---------------------------------------------------------------- the clients notice


def lost(client: Child) -> int:
    """How often it has lost the server so far."""
    return len(re.findall(r"joining again|does not answer", client.log()))


def test_clients_notice_a_server_that_is_stopped_or_cut_off_and_take_part_again_once_it_is_back(tmp_path: Path) -> None:
    """The one whose bytes are swallowed has heartbeats alone to go by: a proxy might answer its pings."""
    experiment = experiment_of(clients=3, byzantine=0, federation={"quorum": 3}, network={"server_gone_s": 60.0})
    with ExitStack() as resources:
        server = resources.enter_context(ServerProcess(experiment, tmp_path)).listening()
        proxies = [CuttingProxy(server.address) for _ in range(2)]
        no_pings = experiment.network.model_copy(update={"keepalive_s": 60.0, "keepalive_timeout_s": 60.0})
        given = (
            (proxies[0].address, experiment),
            (proxies[1].address, experiment.model_copy(update={"network": no_pings})),
            (server.address, experiment),
        )
        clients = [
            resources.enter_context(
                client_process(tmp_path, mine, address, server.tokens([number]), name=f"client-{number}")
            )
            for number, (address, mine) in enumerate(given)
        ]
        for proxy in proxies:
            resources.callback(proxy.close)
        some_rounds(server)
        took: dict[str, float] = {}

        cut_off = dict(zip(("held", "swallowed"), clients, strict=False))
        losses, began = {way: lost(client) for way, client in cut_off.items()}, time.monotonic()
        for proxy, way in zip(proxies, cut_off, strict=True):
            proxy.cut(way)

        def both_noticed() -> bool:
            for way, client in cut_off.items():
                if way not in took and lost(client) > losses[way]:
                    took[way] = time.monotonic() - began
            return len(took) == len(cut_off)

        until(both_noticed, "the two that are cut off to notice")
        for proxy in proxies:
            proxy.heal()
        some_rounds(server)  # all three are needed

        before, began = lost(clients[2]), time.monotonic()
        with stopped(server):
            until(lambda: lost(clients[2]) > before, "the client of a stopped server to notice")
            took["stopped"] = time.monotonic() - began
        some_rounds(server)
        server.stop()
        assert [client.exit_code() for client in clients] == [0, 0, 0], [client.log() for client in clients]
    print("clients noticed after", {way: f"{seconds:.1f} s" for way, seconds in took.items()})
    assert max(took.values()) < FAST["liveness_s"] + SPARE_S


def test_a_client_that_stays_cut_off_ends_with_a_status_that_says_so(tmp_path: Path) -> None:
    experiment = experiment_of(clients=1, byzantine=0, network={"server_gone_s": 1.0})
    with ServerProcess(experiment, tmp_path) as server:
        proxy = CuttingProxy(server.listening().address)
        with client_process(tmp_path, experiment, proxy.address, server.tokens()) as client:
            some_rounds(server)
            proxy.cut("swallowed")
            assert client.exit_code() == exit_code_of("server_unreachable") == 30, client.log()
            (error,) = client.events("error")
            assert proxy.address in error["message"]
            assert "network.server_gone_s" in error["message"]
        proxy.close()


# ---------------------------------------------------------------- a restart under load


def test_a_server_killed_under_load_loses_the_open_round_only_and_everybody_comes_back(tmp_path: Path) -> None:
    """Twelve clients, d = 100,000 in a hundred messages each; killed while their momenta arrive, twice."""
    experiment = experiment_of(
        clients=12,
        byzantine=2,
        training={"rounds": 6, "batch_size": 1},
        data={"dataset": "tiny_task:wide_blobs"},
        network={"chunk_bytes": 4096},
    )
    with ExitStack() as resources:

        def life(resume: bool, dies_at: tuple[str, int] | None) -> ServerProcess:
            return resources.enter_context(
                ServerProcess(experiment, tmp_path, resume=resume, dies_at=dies_at)
            ).listening()

        first = life(False, ("momentum_complete", 12 + 5))
        tokens = first.tokens()
        clients = [
            resources.enter_context(
                client_process(
                    tmp_path,
                    experiment,
                    first.address,
                    {client_id: tokens[client_id] for client_id in range(start, start + 4)},
                    name=f"client-{start}",
                )
            )
            for start in (0, 4, 8)
        ]
        assert first.died() == "momentum_complete"
        second = life(True, ("momentum_complete", 2 * 12 + 5))
        assert second.events("resumed") == [{"event": "resumed", "round": 1}]
        assert second.died() == "momentum_complete"
        third = life(True, None)
        assert third.events("resumed") == [{"event": "resumed", "round": 3}]
        assert [client.exit_code() for client in clients] == [0, 0, 0], [client.log() for client in clients]
        assert {client.wait_for("outcome")["status"] for client in clients} == {"completed"}
        assert third.finish()["rounds"] == 6
    run = RunReader(first.run_dir)
    run.verify()
    assert [round_id for round_id, _, _ in run.ledger_rows()] == list(range(7))
    assert [json.loads(entry)["answers"] for _, entry, _ in run.ledger_rows()[1:]] == [12] * 6
    # The record of how a round went may die with a server that is killed within half a second of it.
    records = {record.round_id: (record.answered, record.missing) for record in run.rounds()}
    assert set(records) >= {3, 4, 5}
    assert set(records.values()) == {(12, ())}
    assert reasons(third) == ["all_answered"] * 6


# ---------------------------------------------------------------- stragglers and the quorum


def test_byzantine_clients_that_stop_cost_each_round_its_grace_until_they_are_dead_and_then_nothing(
    tmp_path: Path,
) -> None:
    """f = 2 of n = 8 are frozen: a round is closed by the grace, then without waiting; never by its deadline."""
    experiment = experiment_of(
        clients=8, byzantine=2, federation={"quorum": 6}, network={"grace_floor_s": 0.5, "liveness_s": 4.0}
    )
    with ExitStack() as resources:
        server = resources.enter_context(ServerProcess(experiment, tmp_path)).listening()
        honest, *silent = (
            resources.enter_context(
                client_process(tmp_path, experiment, server.address, server.tokens(ids), name=f"client-{ids[0]}")
            )
            for ids in (range(6), [6], [7])
        )
        some_rounds(server)
        control = committed(server)
        assert set(reasons(server)[:control]) <= {"all_answered", "grace_over"}
        with stopped(*silent):
            until(lambda: reasons(server)[-3:] == ["rest_gone"] * 3, "the silent ones to be dead")
            ended = committed(server)
        until(lambda: "all_answered" in reasons(server)[ended:], "them to take part again")
        assert server.stop()["status"] == "interrupted"
        assert [client.exit_code() for client in (honest, *silent)] == [0, 0, 0]
    closed = reasons(server)[control:ended]
    records = {record.round_id: record for record in RunReader(server.run_dir).rounds()}
    frozen = [records[number] for number, why in enumerate(closed, control) if why == "grace_over"]
    print(f"{len(frozen)} rounds closed by the grace, {closed.count('rest_gone')} without it")
    assert "deadline" not in closed
    assert "quorum_reached" not in closed
    assert "grace_over" in closed
    assert all(record.answered >= 6 for record in records.values())


def test_below_the_quorum_the_run_waits_visibly_ends_as_quorum_lost_and_can_be_resumed(tmp_path: Path) -> None:
    experiment = experiment_of(
        clients=5,
        byzantine=1,
        federation={"quorum": 4},
        training={"rounds": 100_000},
        network={"round_deadline_s": 1.0, "quorum_deadline_s": 3.0, "grace_floor_s": 0.2},
    )
    with ExitStack() as resources:

        def people(server: ServerProcess, life: str) -> list[Child]:
            return [
                resources.enter_context(
                    client_process(
                        tmp_path / life, experiment, server.address, server.tokens(ids), name=f"client-{ids}"
                    )
                )
                for ids in ([0, 1, 2], [3, 4])
            ]

        server = resources.enter_context(ServerProcess(experiment, tmp_path)).listening()
        staying, going = people(server, "first")
        some_rounds(server)
        going.kill()
        assert staying.wait_for("outcome")["status"] == "quorum_lost"
        summary = server.finish()
        assert (summary["status"], exit_code_of(summary["status"])) == ("quorum_lost", 21)
        waits = [event["message"] for event in server.events("wait")]
        assert re.fullmatch(r"round \d+: 3 of 5 answered, need 1 more of 3, 4; gives up in [\d.]+ s", waits[-1]), waits
        saved = committed(server)
        assert saved == summary["rounds"] > 2
        RunReader(server.run_dir).verify()

        again = resources.enter_context(ServerProcess(experiment, tmp_path, resume=True)).listening()
        assert again.events("resumed") == [{"event": "resumed", "round": saved}]
        everybody = people(again, "second")
        until(lambda: committed(again) > saved + 2, "rounds to go on")
        assert again.stop()["status"] == "interrupted"
        assert [client.exit_code() for client in everybody] == [0, 0]
    RunReader(server.run_dir).verify()


def test_after_a_restart_the_wiretap_is_where_it_was(tmp_path: Path) -> None:
    """An adversary that was told of its port goes on."""
    experiment = experiment_of(
        clients=5, byzantine=1, attack={"name": "bit_flip", "knowledge": "omniscient"}, network={"grace_floor_s": 0.2}
    )
    with ExitStack() as resources:
        first = resources.enter_context(ServerProcess(experiment, tmp_path)).listening()
        honest = resources.enter_context(
            client_process(tmp_path, experiment, first.address, first.tokens(range(4)), name="honest")
        )
        adversary = resources.enter_context(
            adversary_process(tmp_path, experiment, first.address, first.tokens([4]), first.wiretap)
        )
        some_rounds(first)
        first.kill()
        second = resources.enter_context(ServerProcess(experiment, tmp_path, resume=True)).listening()
        assert second.wiretap == first.wiretap
        resumed = committed(second)
        until(lambda: reasons(second)[resumed + 1 :].count("all_answered") > 2, "the adversary to answer again")
        second.stop()
        assert [honest.exit_code(), adversary.exit_code()] == [0, 0], adversary.log()

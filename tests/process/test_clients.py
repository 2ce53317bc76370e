"""Real client processes: killed in the middle of a push, left alone, taken through a restart to the run's end."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import torch
from federations import ServerProcess, client_process, halting_client_process, small_experiment, theta_of, until
from stock_client import StockClient

from client.crew import build_crew
from common.config import Experiment
from common.errors import exit_code_of
from common.learning.task import build_task
from ps.mechanism import opened
from ps.privacy.released import Unreleased
from ps.reader import RunReader
from ps.update import advance, initial_state, release


def free_address() -> str:
    """A port nobody listens at now, so that a server can come back to it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def trajectory(experiment: Experiment, ids: list[int], zeros: int = 0) -> np.ndarray:
    """θ after all rounds, if exactly ``ids`` answer honestly in each and ``zeros`` others send zeros."""
    task = build_task(experiment)
    _, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    crew = build_crew(experiment, task, ids)
    state = initial_state(task.model.parameters_flat().clone())
    rows = torch.zeros((mechanism.num_clients, task.num_parameters))
    for round_id in range(experiment.training.rounds):
        task.model.set_parameters(state.theta)
        for row, worker in enumerate(crew.values()):
            rows[row] = torch.from_numpy(worker.step(round_id))
        released = release(mechanism, Unreleased(rows), range(len(crew) + zeros), None)
        state = advance(state, released, experiment.training.learning_rate, experiment.training.server_momentum)
    return state.theta.numpy()


def test_a_client_killed_in_the_middle_of_a_push_leaves_nothing_in_the_aggregate(tmp_path: Path) -> None:
    """A model of 400 kB in chunks of 4 kB; the kill comes when a third of it has arrived."""
    experiment = small_experiment(
        data={"dataset": "tiny_task:wide_blobs"},
        network={"chunk_bytes": 4096, "grace_floor_s": 60.0, "heartbeat_s": 0.2},
    )
    with ServerProcess(experiment, tmp_path) as server:
        server.listening()
        with halting_client_process(tmp_path, experiment, server.address, server.tokens([4]), frames=33) as victim:
            four = [StockClient(server, client_id) for client_id in range(4)]
            for client in four:
                client.join()
            halted = victim.wait_for("halted")
            assert halted["of"] > 90
            header, theta = four[0].pull()
            rows = np.random.default_rng(1).normal(size=(4, len(theta))).astype(np.float32)
            for client, row in zip(four, rows, strict=True):
                assert client.send(client.messages(0, row, chunk_bytes=4096)).HasField("accepted")
            assert four[0].pull(1, wait_s=0.5)[0].HasField("not_yet")  # the round waits for the fifth

            victim.kill()

            header, after = four[0].pull(1)
            mean = (rows.sum(axis=0, dtype=np.float64) / 4).astype(np.float32)
            assert header.model.round_id == 1
            np.testing.assert_array_equal(after, theta - mean)
            assert server.refusals(4) == {"truncated": 1}
            (record,) = until(lambda: RunReader(server.run_dir).rounds(), "the round's record")
            assert (record.answered, record.missing) == (4, (4,))
            assert record.latency_s < 15.0  # the dead are not waited for
        for client in four:
            client.close()


def test_clients_live_through_a_kill_of_the_server_and_leave_when_the_run_is_complete(tmp_path: Path) -> None:
    """Two client processes with four identities; the fifth is ours, and answers when it has seen enough."""
    experiment = small_experiment(
        training={"rounds": 12, "learning_rate": 0.5, "client_momentum": 0.9, "server_momentum": 0.5},
        network={"address": free_address(), "grace_floor_s": 60.0, "leave_deadline_s": 20.0},
    )
    zeros = np.zeros(10, dtype=np.float32)
    with ServerProcess(experiment, tmp_path) as first:
        first.listening()
        clients = [
            client_process(tmp_path, experiment, first.address, first.tokens(ids), name=f"client-{ids}")
            for ids in ([0, 1, 2], [3])
        ]
        ours = StockClient(first, 4)
        ours.join()
        for round_id in range(5):
            assert ours.pull(round_id)[0].model.round_id == round_id
            ours.push_accepted(round_id, zeros)
        before = ours.pull(5)  # open, and perhaps some have answered
        first.kill()
        ours.close()
        with ServerProcess(experiment, tmp_path, run_dir=first.run_dir, resume=True) as second:
            assert second.listening().events("resumed") == [{"event": "resumed", "round": 5}]
            ours = StockClient(second, 4)
            ours.join()
            attendance = ours.attend()
            after = ours.pull(5)
            assert after[0] == before[0]
            np.testing.assert_array_equal(after[1], before[1])
            for round_id in range(5, 12):
                assert ours.pull(round_id)[0].model.round_id == round_id
                ours.push_accepted(round_id, zeros)
            assert attendance.wait_for("run_finished").status == "completed"
            ours.leave()
            assert [client.exit_code() for client in clients] == [0, 0], [client.log() for client in clients]
            assert [client.wait_for("outcome")["status"] for client in clients] == ["completed"] * 2
            summary = second.finish()
            attendance.close()
            ours.close()
    assert (summary["status"], summary["rounds"]) == ("completed", 12)
    ledger = RunReader(first.run_dir)
    assert [round_id for round_id, _, _ in ledger.ledger_rows()] == list(range(13))
    ledger.verify()
    # The kill cost nothing: the same model as in a run without one.
    np.testing.assert_allclose(theta_of(first.run_dir), trajectory(experiment, [0, 1, 2, 3], zeros=1), atol=1e-6)


def test_client_processes_end_with_a_status_when_superseded_and_when_the_server_is_gone(tmp_path: Path) -> None:
    experiment = small_experiment(network={"server_gone_s": 0.5})
    with ServerProcess(experiment, tmp_path) as server:
        server.listening()

        def rounds() -> int:
            return RunReader(server.run_dir).status().round_id

        with client_process(tmp_path, experiment, server.address, server.tokens(), name="older") as older:
            until(lambda: rounds() >= 2, "two rounds")
            with client_process(tmp_path, experiment, server.address, server.tokens(), name="newer") as newer:
                assert older.exit_code() == exit_code_of("superseded"), older.log()
                reached = rounds()
                until(lambda: rounds() >= reached + 2, "two rounds of the newer process")
                server.kill()
                assert newer.exit_code() == exit_code_of("server_unreachable"), newer.log()
                (error,) = newer.events("error")
                assert "network.server_gone_s" in error["message"]

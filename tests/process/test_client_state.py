"""Client processes that are killed, stopped and started again, beside a parameter server that may have been too.

A run of two clients: one is the product's, with a state file; the other is ours, sends zeros, and so sets the pace. The
rule is the mean, so with η = 1 and without server momentum the first one's momentum of a round is 2 (θ_t − θ_{t+1}).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Child, ServerProcess, small_experiment, theta_of, until
from stateful_client import contents_of, stateful_client
from stock_client import StockClient

from client.crew import build_crew
from client.memory import Held
from client.worker import Worker
from common.config import Experiment
from common.errors import exit_code_of
from common.learning.task import Task, build_task
from deploy.local import run_locally
from deploy.simulation import simulate
from ps.reader import RunReader

ZEROS = np.zeros(10, dtype=np.float32)


def experiment_of_two(**sections: dict[str, Any]) -> Experiment:
    return small_experiment(
        federation={"clients": 2, "byzantine": 0, "quorum": 2},
        training={"rounds": 12, "learning_rate": 1.0, "client_momentum": 0.9} | sections.pop("training", {}),
        network={"leave_deadline_s": 20.0, "server_gone_s": 20.0},
        **sections,
    )


class Pace:
    """Our own client: a round closes when it has answered, and it remembers every model."""

    def __init__(self, server: ServerProcess) -> None:
        self._client = StockClient(server, 1)
        self._client.join()
        self.theta: dict[int, np.ndarray] = {}

    def look(self, round_id: int) -> None:
        """Wait until a round is open."""
        header, theta = self._client.pull(round_id)
        assert header.model.round_id == round_id
        self.theta[round_id] = theta

    def answer(self, *rounds: int) -> None:
        for round_id in rounds:
            self.look(round_id)
            self._client.push_accepted(round_id, ZEROS)

    def is_open(self, round_id: int) -> bool:
        """Whether a round is still open after a while."""
        return self._client.pull(round_id + 1, wait_s=0.5)[0].HasField("not_yet")

    def momentum(self, round_id: int) -> np.ndarray:
        """What the other client has sent in a round, up to rounding."""
        return 2 * (self.theta[round_id] - self.theta[round_id + 1])

    def close(self) -> None:
        self._client.leave()
        self._client.close()


class Reference:
    """The client's own arithmetic, in this process."""

    def __init__(self, experiment: Experiment, theta: dict[int, np.ndarray]) -> None:
        self._task: Task = build_task(experiment)
        self._experiment, self._theta = experiment, theta

    def momentum(self, begin: Held | None, rounds: range) -> np.ndarray:
        """m after some rounds at the models seen, beginning with a momentum or with zero."""
        import torch

        worker: Worker = build_crew(self._experiment, self._task, [0])[0]
        if begin is not None:
            worker.restore(begin)
        for round_id in rounds:
            self._task.model.set_parameters(torch.from_numpy(self._theta[round_id]))
            worker.step(round_id)
        return worker.held.momentum


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts the product's client; none is left behind."""
    started: list[Child] = []

    def begin(experiment: Experiment, address: str, tokens: dict[int, str], state: Path | None) -> Child:
        name = f"client-{len(started)}"
        started.append(stateful_client(tmp_path, experiment, address, tokens, state, name=name))
        return started[-1]

    yield begin
    for child in started:
        child.__exit__()


def momentum_on_disk(state: Path) -> Held:
    return contents_of(state).momenta.get(0, Held(-1, ZEROS))


@pytest.mark.parametrize("keeps", [True, False], ids=["with a state", "without one"])
def test_a_client_killed_by_sigkill_goes_on_from_the_momentum_it_last_wrote(
    tmp_path: Path, start: Callable[..., Child], keeps: bool
) -> None:
    experiment = experiment_of_two(client={"persist_every": 4})
    state = tmp_path / "state" if keeps else None
    with ServerProcess(experiment, tmp_path) as server:
        pace = Pace(server.listening())
        first = start(experiment, server.address, server.tokens([0]), state)
        pace.answer(*range(6))
        pace.look(6)
        if state is not None:
            until(lambda: momentum_on_disk(state).round_id == 3, "round 3 on the disk")
        first.kill()
        written = momentum_on_disk(state) if state is not None else None
        start(experiment, server.address, server.tokens([0]), state)
        pace.answer(*range(6, 9))  # in round 6 the first life may have answered
        pace.look(9)
        found, reference = pace.momentum(8), Reference(experiment, pace.theta)
        pace.close()
    if written is not None:
        np.testing.assert_array_equal(written.momentum, reference.momentum(None, range(4)))

    def is_from(begin: Held | None, first_round: int) -> bool:
        return bool(np.abs(found - reference.momentum(begin, range(first_round, 9))).max() < 2e-6)

    assert is_from(written, 6) or is_from(written, 7)  # the second if the first life had answered in round 6
    assert not is_from(None, 0)  # which is what a client that nobody kills sends
    assert (is_from(None, 6) or is_from(None, 7)) == (not keeps)


def test_a_restored_server_is_refused_by_a_client_that_was_started_again_too(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    """The state itself was not written since: the note beside it is enough."""
    experiment, state, copy = experiment_of_two(client={"persist_every": 1000}), tmp_path / "state", tmp_path / "copy"
    with ServerProcess(experiment, tmp_path) as server:
        pace = Pace(server.listening())
        first = start(experiment, server.address, server.tokens([0]), state)
        pace.answer(*range(3))
        pace.look(3)
        shutil.copytree(server.run_dir, copy)
        pace.answer(*range(3, 6))
        pace.look(6)
        noted = state.with_name("state.seen")
        until(lambda: f'"{server.run_id}", 6,' in noted.read_text(), "round 6 to be noted")
        first.kill()
        pace.close()
        server.kill()
    assert contents_of(state).seen == {}
    with ServerProcess(experiment, tmp_path, run_dir=copy, resume=True) as restored:
        again = start(experiment, restored.listening().address, restored.tokens([0]), state)
        assert again.exit_code() == exit_code_of("ledger_rolled_back") == 35, again.log()
        (error,) = again.events("error")
        assert "publishes round 3 after round 6" in error["message"]


def test_a_stopped_and_resumed_run_is_the_same_run_bit_for_bit(tmp_path: Path, start: Callable[..., Child]) -> None:
    """Stopped twice: once the client by SIGTERM, once the server; each time with the open round's momentum computed."""
    experiment = experiment_of_two(
        training={"server_momentum": 0.5},
        privacy={"epsilon": 500.0, "delta": 1e-3, "noise_seed": 3},
        client={"persist_every": 1},
    )

    def uninterrupted() -> np.ndarray:
        with ServerProcess(experiment, tmp_path / "whole") as server:
            pace = Pace(server.listening())
            client = start(experiment, server.address, server.tokens([0]), None)
            pace.answer(*range(12))
            pace.close()
            assert client.exit_code() == 0, client.log()
        return theta_of(server.run_dir)

    state = tmp_path / "state"
    with ServerProcess(experiment, tmp_path) as server:
        pace = Pace(server.listening())
        client = start(experiment, server.address, server.tokens([0]), state)
        pace.answer(0, 1, 2)
        until(lambda: momentum_on_disk(state).round_id == 3, "round 3 on the disk")
        os.kill(client.pid, signal.SIGTERM)
        assert client.exit_code() == exit_code_of("interrupted"), client.log()
        client = start(experiment, server.address, server.tokens([0]), state)
        pace.answer(3, 4, 5)
        until(lambda: momentum_on_disk(state).round_id == 6, "round 6 on the disk")
        pace.close()
        assert server.stop()["status"] == "interrupted"
        assert client.exit_code() == 0, client.log()
    assert momentum_on_disk(state).round_id == 6
    with ServerProcess(experiment, tmp_path, run_dir=server.run_dir, resume=True) as server:
        pace = Pace(server.listening())
        client = start(experiment, server.address, server.tokens([0]), state)
        pace.answer(*range(6, 12))
        pace.close()
        assert client.exit_code() == 0, client.log()
        assert server.finish()["status"] == "completed"
    np.testing.assert_array_equal(theta_of(server.run_dir), uninterrupted())
    (charge,) = contents_of(state).lifetime.charges
    assert (charge.run_id, charge.releases, charge.settled) == (server.run_id, 12, True)
    assert len(charge.servers) == 2  # the server came back on another port: the same run, charged once to each


class Stopping:
    """Sends the launcher SIGTERM when some rounds are done."""

    def __init__(self, after: int) -> None:
        self._after: int | None = after

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "round" and self._after is not None and event["round"] >= self._after:
            self._after = None
            os.kill(os.getpid(), signal.SIGTERM)

    def tick(self) -> None:
        pass


def test_the_launchers_clients_go_on_with_their_momenta(tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 4, "byzantine": 1, "quorum": 4, "clients_per_process": 2},
        training={"rounds": 40, "learning_rate": 0.5, "client_momentum": 0.95, "server_momentum": 0.5},
        attack={"name": "none"},
        network={"leave_deadline_s": 20.0},
    )
    run_dir = tmp_path / "run"
    assert run_locally(experiment, run_dir, Stopping(6)).status == "interrupted"
    stopped_at = RunReader(run_dir).status().round_id
    assert 6 <= stopped_at < 40
    kept = [contents_of(run_dir / "clients" / f"client-{k}.state") for k in (0, 1)]
    assert [sorted(contents.momenta) for contents in kept] == [[0, 1], [2, 3]]
    assert (run_dir / "clients").stat().st_mode & 0o777 == 0o700
    ending = run_locally(experiment, run_dir, Stopping(1000), resume=True)
    assert (ending.status, RunReader(run_dir).status().round_id) == ("completed", 40)
    *_, last = simulate(experiment)
    np.testing.assert_array_equal(theta_of(run_dir), last.theta.numpy())


def test_a_state_belongs_to_one_process_and_is_never_ignored(tmp_path: Path, start: Callable[..., Child]) -> None:
    experiment, state = experiment_of_two(), tmp_path / "state"
    nobody = "127.0.0.1:1"
    first = start(experiment, nobody, {0: "token"}, state)
    until(lambda: state.with_name("state.seen").exists(), "the first process to hold the state")
    until(lambda: "does not answer" in first.log(), "the first process to look for its server")
    second = start(experiment, nobody, {0: "token"}, state)
    assert second.exit_code() == exit_code_of("run_folder_in_use"), second.log()
    assert f"another client process ({first.pid}) has this state open" in second.events("error")[0]["message"]
    os.kill(first.pid, signal.SIGTERM)
    assert first.exit_code() == exit_code_of("interrupted"), first.log()
    state.write_bytes(b"torn")
    third = start(experiment, nobody, {0: "token"}, state)
    assert third.exit_code() == exit_code_of("store_damaged"), third.log()
    assert state.read_bytes() == b"torn"


def test_a_client_whose_lifetime_total_is_used_up_sends_nothing_and_leaves(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    """z is for ε = 4, and 5 is the limit: one run fits, a second one does not."""
    experiment = experiment_of_two(
        training={"rounds": 2}, privacy={"epsilon": 4.0}, client={"lifetime_epsilon": 5.0, "lifetime_delta": 1e-5}
    )
    state = tmp_path / "state"
    address = "127.0.0.1:0"
    with ServerProcess(experiment, tmp_path / "1") as server:
        address = server.listening().address
        pace = Pace(server)
        client = start(experiment, address, server.tokens([0]), state)
        pace.answer(0, 1)
        pace.close()
        assert client.exit_code() == 0, client.log()
        assert f"all runs with the parameter server {address} so far: epsilon = 4 at delta = 1e-05" in client.log()
    again = experiment.model_copy(update={"network": experiment.network.model_copy(update={"address": address})})
    with ServerProcess(again, tmp_path / "2") as server:
        pace = Pace(server.listening())
        before = state.read_bytes()
        client = start(again, address, server.tokens([0]), state)
        assert client.exit_code() == exit_code_of("privacy_refused") == 15, client.log()
        (error,) = client.events("error")
        assert "The other runs so far: epsilon = 4; this run, 2 releases" in error["message"]
        assert state.read_bytes() == before
        pace.answer(0)
        assert pace.is_open(0)
        pace.close()

"""A parameter server killed anywhere in a round, and at any time: what it published stands, and is paid for once.

The processes are real: a server that is killed by SIGKILL and started again on its run folder, clients that live on,
and a client that recorded every model it was sent. What is asserted is asserted of those models and of the ledger.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from federations import ServerProcess, client_process, small_experiment
from recording_client import RecordingClient
from safetensors.numpy import load

from common.config import Experiment
from ps.faults import BEFORE_COMMIT, POINTS
from ps.privacy.ledger import Ledger
from ps.reader import RunReader

PATIENCE_S = 60.0
CLIENTS, RECORDER = 5, 4
KILLS = 20


def private_experiment(**sections: Mapping[str, Any]) -> Experiment:
    """Five identities who must all answer (so that the recording one sees every model), with secret noise."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"  # a fixed one, so that a server can come back to it
    fixed: dict[str, Mapping[str, Any]] = {
        "federation": {"clients": CLIENTS, "byzantine": 1, "quorum": CLIENTS},
        "training": {"rounds": 100_000, "learning_rate": 0.1, "server_momentum": 0.5},
        "aggregation": {"rule": "trimmed_mean"},
        "privacy": {"epsilon": 8.0, "delta": 1e-5},
        "network": {"address": address, "leave_deadline_s": 5.0},
    }
    return small_experiment(**{name: {**section, **sections.get(name, {})} for name, section in fixed.items()})


class Crashing:
    """A run whose server dies again and again; its clients and the recording one are the same throughout."""

    def __init__(self, folder: Path, experiment: Experiment, resources: ExitStack) -> None:
        self.folder, self.experiment, self._resources = folder, experiment, resources
        self.run_dir = folder / "run"
        self.address = experiment.network.address

    def server(self, dies_at: tuple[str, int] | None = None) -> ServerProcess:
        """The next life of the server."""
        begun = (self.run_dir / "run.sqlite").exists()
        return self._resources.enter_context(
            ServerProcess(self.experiment, self.folder, run_dir=self.run_dir, resume=begun, dies_at=dies_at)
        )

    def people(self, first: ServerProcess) -> None:
        """Start the clients, once the first server listens."""
        self.run_id, tokens = first.run_id, first.tokens()
        self.clients = [
            self._resources.enter_context(
                client_process(
                    self.folder, self.experiment, self.address, {i: tokens[i] for i in ids}, name=f"client-{ids[0]}"
                )
            )
            for ids in ([0, 1, 2], [3])
        ]
        self.recorder = RecordingClient(self.experiment, self.address, RECORDER, tokens[RECORDER], first.schema_hash)
        self._resources.callback(self.recorder.close)

    # ---------------------------------------------------------------- what the folder holds

    @property
    def committed(self) -> int:
        """The round of the last committed model."""
        return RunReader(self.run_dir).status().round_id

    def ledger(self) -> Ledger:
        """Every row, checked: consecutive, and chained to all before it."""
        return Ledger.restored((text, head) for _, text, head in RunReader(self.run_dir).ledger_rows())

    def stored(self, round_id: int) -> str | None:
        """SHA-256 of θ of a round, committed or not, if the folder has it."""
        whole = [path for path in (self.run_dir / "models").glob(f"model-{round_id}.*") if path.stat().st_size]
        return sha256(load(whole[0].read_bytes())["theta"].tobytes()).hexdigest() if whole else None

    def check(self) -> dict[int, str]:
        """The invariants, at any time; returns the models published so far by round."""
        published = self.recorder.published
        heads = [head.hex() for _, head in self.ledger().rows()]
        by_round: dict[int, str] = {}
        for model in published:
            assert model.run_id == self.run_id, "another run goes on"
            assert model.round_id < len(heads), f"round {model.round_id} was published without its ledger row"
            assert heads[model.round_id] == model.head, f"round {model.round_id} was published on another ledger"
            known = by_round.setdefault(model.round_id, model.sha256)
            assert known == model.sha256, f"round {model.round_id} was noised twice"
        seen = [model.round_id for model in published]
        assert seen == sorted(seen), "a round came after a later one"
        assert set(seen) == set(range(len(set(seen)))), "a model escaped the recording client"
        assert len(set(by_round.values())) == len(by_round), "two rounds have one model"
        for round_id in set(seen[-3:]):  # those that the folder keeps
            assert self.stored(round_id) in (by_round[round_id], None)
        return by_round

    def finish(self, last: ServerProcess, status: str) -> dict[str, Any]:
        """The end of the run, as everybody sees it; returns the summary."""
        summary = last.finish()
        assert self.recorder.wait_for_end(PATIENCE_S).status == status
        assert [client.exit_code() for client in self.clients] == [0, 0], [client.log() for client in self.clients]
        assert [client.wait_for("outcome")["status"] for client in self.clients] == [status] * 2
        by_round, ledger, reader = self.check(), self.ledger(), RunReader(self.run_dir)
        assert reader.verify() == ledger.head
        assert summary["status"] == reader.status().status == status
        assert (summary["run_id"], summary["rounds"]) == (self.run_id, ledger.next_round)
        assert summary["private"], summary["private_because"]
        assert summary["epsilon_spent"] == pytest.approx(ledger.epsilon_spent(1e-5))
        assert summary["epsilon_spent"] <= summary["epsilon"] == 8.0
        assert len(by_round) in (ledger.next_round, ledger.next_round + 1)  # the last model is sent to nobody
        return summary


@contextmanager
def crashing(folder: Path, experiment: Experiment) -> Iterator[Crashing]:
    with ExitStack() as resources:
        yield Crashing(folder, experiment, resources)


def test_a_server_killed_at_each_point_of_a_round_publishes_what_it_committed_and_loses_only_the_open_round(
    tmp_path: Path,
) -> None:
    rounds = 24
    stands: dict[int, tuple[str | None, str]] = {}
    lost: dict[int, str] = {}
    with crashing(tmp_path, private_experiment(training={"rounds": rounds})) as run:
        for point in POINTS:
            # In its second round: when its third momentum has come, or at the step of the closing round.
            server = run.server((point, CLIENTS + 3 if point == "momentum_complete" else 2))
            before = run.committed if server.listening().events("resumed") else 0
            if point == POINTS[0]:
                run.people(server)
            assert server.died() == point
            run.check()
            reached = run.committed
            assert reached == before + (1 if point in BEFORE_COMMIT else 2), point
            stands[reached] = run.stored(reached), run.ledger().head.hex()
            if uncommitted := run.stored(reached + 1):
                lost[reached + 1] = uncommitted
        # Once more after the very last commit: nothing is left to do but to say so.
        assert run.server(("after_commit", rounds - run.committed)).died() == "after_commit"
        assert run.committed == rounds
        run.finish(run.server(), "completed")
        models = {model.round_id: (model.sha256, model.head) for model in run.recorder.published}
        # From the commit on a round is published as it was committed, to the byte, by a later life of the server.
        assert {round_id: models[round_id] for round_id in stands} == stands
        # Before it, what was drawn for the round died with the server, and other noise was drawn.
        assert len(lost) == 3
        assert all(models[round_id][0] != digest for round_id, digest in lost.items())


@pytest.mark.system  # for the time it takes
def test_a_server_killed_at_twenty_random_times_noises_no_round_twice(tmp_path: Path) -> None:
    dice = random.Random(20)
    with crashing(tmp_path, private_experiment()) as run:
        server = run.server().listening()
        run.people(server)
        reached = []
        for kill in range(KILLS):
            if kill % 5:  # some rounds on, whatever the machine's pace
                server.listening()
                run.recorder.wait_for_round(run.committed + 1, PATIENCE_S)
                time.sleep(dice.uniform(0.0, 0.2))
            else:  # while it starts or takes the run up
                time.sleep(dice.uniform(0.0, 0.6))
            server.kill()
            run.check()
            reached.append(run.committed)
            server = run.server()
        server.listening()
        run.recorder.wait_for_round(reached[-1] + 2, PATIENCE_S)
        server.stop()
        run.finish(server, "interrupted")
        assert reached[-1] > KILLS, "the kills came too early to mean anything"

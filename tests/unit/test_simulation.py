"""A simulated run has the folder, the ledger and the trajectory of a run over the network, and shows nothing early."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import Child, small_experiment, theta_of

from adversary.attacks import ATTACKS
from common.aggregation import RULES
from common.config import Experiment
from common.errors import ConfigError, PrivacyError, RunFolderExists, StoreDamaged, StoreUnwritable
from common.learning.task import build_task
from deploy.report.writing import write_report
from deploy.simulate import run as simulate_run
from deploy.simulate.clients import SimulatedClients
from deploy.simulate.momenta import FILE
from deploy.simulate.run import run_simulation
from deploy.simulation import simulate
from ps.mechanism import opened
from ps.privacy.released import open_for_mechanism
from ps.reader import RunReader
from ps.round_maker import RoundMaker
from ps.store import RunStore
from ps.verification import verify_run


def an_experiment(rounds: int = 6, **sections: Any) -> Experiment:
    given: dict[str, Any] = {
        "federation": {"clients": 9, "byzantine": 2},
        "training": {"rounds": rounds, "learning_rate": 0.5, "client_momentum": 0.9, "server_momentum": 0.5},
        "evaluation": {"every": 2, "images": 50},
        "aggregation": {"rule": "trimmed_mean"},
        "privacy": {"epsilon": 500.0, "delta": 1e-3, "noise_seed": 3},
        "attack": {"name": "alie", "knowledge": "omniscient"},
    }
    return small_experiment(**{name: given.get(name, {}) | sections.get(name, {}) for name in given | sections})


def last_theta(experiment: Experiment, *, exact: bool) -> np.ndarray:
    *_, last = simulate(experiment, exact=exact)
    return last.theta.numpy()


def test_the_run_folder_is_that_of_any_run(tmp_path: Path) -> None:
    experiment, events = an_experiment(), []
    summary = run_simulation(experiment, tmp_path / "run", report=events.append)
    assert (summary["status"], summary["rounds"]) == ("completed", 6)
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
    assert json.loads((tmp_path / "run/public/summary.json").read_text())["final_accuracy"] == summary["final_accuracy"]
    assert (tmp_path / "run/public/model.safetensors").is_file()
    assert [round_id for round_id, _ in summary["accuracy_curve"]] == [0, 2, 4, 6]
    reader = RunReader(tmp_path / "run")
    assert len(reader.ledger_rows()) == 7
    assert [record.round_id for record in reader.rounds()] == list(range(6))
    assert verify_run(tmp_path / "run").holds
    assert [event["event"] for event in events if event["event"] == "end"] == ["end"]
    assert events[-1]["event"] == "end"


@pytest.mark.slow
def test_its_report_is_written_like_any_runs(tmp_path: Path) -> None:
    run_simulation(an_experiment(), tmp_path / "run")
    assert write_report(tmp_path / "run").is_file()


def test_the_run_folders_model_is_that_of_the_plain_loop(tmp_path: Path) -> None:
    run_simulation(an_experiment(), tmp_path / "run")
    np.testing.assert_array_equal(theta_of(tmp_path / "run"), last_theta(an_experiment(), exact=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_all_at_once_is_one_by_one_for_every_attack(attack: str) -> None:
    experiment = an_experiment(3, attack={"name": attack}, privacy={"epsilon": None, "noise_seed": None})
    np.testing.assert_array_equal(last_theta(experiment, exact=False), last_theta(experiment, exact=True))


@pytest.mark.parametrize("rule", RULES)
def test_all_at_once_is_one_by_one_for_every_rule(rule: str) -> None:
    experiment = an_experiment(3, aggregation={"rule": rule}, federation={"clients": 11, "byzantine": 2})
    np.testing.assert_array_equal(last_theta(experiment, exact=False), last_theta(experiment, exact=True))


@pytest.mark.parametrize("attack", ["none", "sign_flip", "inf"])
def test_what_is_aggregated_under_dp_lies_in_the_ball_and_on_the_grid(attack: str) -> None:
    experiment = an_experiment(attack={"name": attack})
    task = build_task(experiment)
    _, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    clients = SimulatedClients(experiment, task, mechanism, torch.device("cpu"))
    for round_id in range(3):
        clients.compute(round_id, task.model.parameters_flat())
        clients.collect(round_id)
        rows = open_for_mechanism(clients.rows()).double()
        assert mechanism.grid is not None
        assert torch.equal(rows / mechanism.grid, (rows / mechanism.grid).round())
        assert float(rows.norm(dim=1).max()) <= mechanism.radius
        assert bool(rows[:7].any(dim=1).all())


def test_a_client_with_less_than_a_batch_and_l2_make_no_difference() -> None:
    experiment = an_experiment(
        4, training={"batch_size": 60}, model={"l2": 0.1}, data={"partition": "dirichlet", "dirichlet_beta": 0.1}
    )
    np.testing.assert_array_equal(last_theta(experiment, exact=False), last_theta(experiment, exact=True))


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(exact: bool, tmp_path: Path) -> None:
    experiment, stop = an_experiment(7), threading.Event()

    def stop_in_the_third(point: str, seen: list[str] = []) -> None:  # noqa: B006
        seen.append(point)
        if seen.count("aggregated") == 3:
            stop.set()

    summary = run_simulation(experiment, tmp_path / "run", stop=stop, fault=stop_in_the_third, exact=exact)
    assert (summary["status"], summary["rounds"]) == ("interrupted", 3)
    summary = run_simulation(experiment, tmp_path / "run", resume=True, exact=exact)
    assert (summary["status"], summary["rounds"]) == ("completed", 7)
    np.testing.assert_array_equal(theta_of(tmp_path / "run"), last_theta(experiment, exact=True))
    assert verify_run(tmp_path / "run").holds


class Died(BaseException):
    """What a test ends a run with at a point of a round: nothing in the code expects it."""


@pytest.mark.parametrize(
    "point", ["round_closed", "aggregated", "tensor_renamed", "before_commit", "after_commit", "published"]
)
def test_a_run_that_died_goes_on_as_if_it_had_not(point: str, tmp_path: Path) -> None:
    experiment, seen = an_experiment(5, client={"persist_every": 1}, attack={"name": "none"}), []

    def fault(at: str) -> None:
        seen.append(at)
        if at == point and seen.count(at) == 3:
            raise Died

    with pytest.raises(Died):
        run_simulation(experiment, tmp_path / "run", fault=fault)
    goes_on_as_if_nothing_had_happened(experiment, tmp_path / "run")


def goes_on_as_if_nothing_had_happened(experiment: Experiment, run_dir: Path) -> None:
    assert run_simulation(experiment, run_dir, resume=True)["rounds"] == 5
    assert len(RunReader(run_dir).ledger_rows()) == 6
    np.testing.assert_array_equal(theta_of(run_dir), last_theta(experiment, exact=True))


@pytest.mark.slow
def test_so_does_one_whose_process_was_killed(tmp_path: Path) -> None:
    experiment = an_experiment(5, client={"persist_every": 1}, attack={"name": "none"})
    child = Child(tmp_path, "killed", killed_in_the_third, experiment, tmp_path / "run")
    assert child.exit_code() == -signal.SIGKILL, child.log()
    goes_on_as_if_nothing_had_happened(experiment, tmp_path / "run")


def killed_in_the_third(_say: object, experiment: Experiment, run_dir: Path) -> None:
    seen: list[str] = []

    def fault(point: str) -> None:
        seen.append(point)
        if seen.count("aggregated") == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    run_simulation(experiment, run_dir, fault=fault)


def test_momenta_that_were_lost_are_said_to_be(tmp_path: Path) -> None:
    experiment = an_experiment(4)
    stop, events = threading.Event(), []
    run_simulation(
        experiment, tmp_path / "run", stop=stop, fault=lambda point: stop.set() if point == "stepped" else None
    )
    (tmp_path / "run" / FILE).unlink()
    summary = run_simulation(experiment, tmp_path / "run", resume=True, report=events.append)
    assert summary["status"] == "completed"
    assert any("go on from zero" in event.get("message", "") for event in events)


def test_damaged_momenta_are_refused_with_the_remedy(tmp_path: Path) -> None:
    stop = threading.Event()
    run_simulation(
        an_experiment(), tmp_path / "run", stop=stop, fault=lambda point: stop.set() if point == "stepped" else None
    )
    data = (tmp_path / "run" / FILE).read_bytes()
    (tmp_path / "run" / FILE).write_bytes(data[:-3])
    with pytest.raises(StoreDamaged, match=r"damaged.*delete it"):
        run_simulation(an_experiment(), tmp_path / "run", resume=True)


def test_nothing_of_a_round_is_released_or_shown_before_the_one_before_it_is_durable(
    tmp_path: Path, monkeypatch
) -> None:
    """The order of what happens, with a disk that takes its time."""
    happened: list[tuple[str, int]] = []
    compute, commit = RoundMaker.compute, RunStore.commit

    def slow_commit(store: RunStore, prepared: Any) -> Any:
        threading.Event().wait(0.02)
        committed = commit(store, prepared)
        happened.append(("durable", prepared.round_id))
        return committed

    def noted_compute(maker: RoundMaker, closing: Any, timing: Any) -> Any:
        happened.append(("released", closing.round_id + 1))
        return compute(maker, closing, timing)

    monkeypatch.setattr(RunStore, "commit", slow_commit)
    monkeypatch.setattr(RoundMaker, "compute", noted_compute)
    monkeypatch.setattr(simulate_run, "ROUND_EVENT_S", 0.0)
    shown = lambda event: happened.append(("shown", event["round"])) if "round" in event else None  # noqa: E731
    run_simulation(an_experiment(4), tmp_path / "run", report=shown)
    for made in range(1, 5):
        assert happened.index(("released", made)) < happened.index(("durable", made)) < happened.index(("shown", made))
        if made < 4:
            assert happened.index(("durable", made)) < happened.index(("released", made + 1))


def test_a_second_release_is_refused_while_one_is_not_durable(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(RoundMaker, "commit", lambda maker, made, _: maker._store.commit(made.prepared))
    with pytest.raises(RuntimeError, match="round 1 is not committed"):
        run_simulation(an_experiment(), tmp_path / "run")


def test_a_disk_that_fails_ends_the_run_with_what_was_committed(tmp_path: Path, monkeypatch) -> None:
    commit = RunStore.commit

    def failing(store: RunStore, prepared: Any) -> Any:
        if prepared.round_id == 3:
            raise StoreUnwritable("no space")
        return commit(store, prepared)

    monkeypatch.setattr(RunStore, "commit", failing)
    with pytest.raises(StoreUnwritable, match="no space"):
        run_simulation(an_experiment(), tmp_path / "run")
    monkeypatch.undo()
    assert run_simulation(an_experiment(), tmp_path / "run", resume=True)["rounds"] == 6


def test_no_model_is_left_unscored_however_slow_scoring_is(tmp_path: Path, monkeypatch) -> None:
    import ps.evaluation

    monkeypatch.setattr(ps.evaluation, "WAITING_MODELS", 1)
    accuracy = ps.evaluation.accuracy
    monkeypatch.setattr(ps.evaluation, "accuracy", lambda *given: threading.Event().wait(0.01) or accuracy(*given))
    summary = run_simulation(an_experiment(25, evaluation={"every": 1}), tmp_path / "run")
    assert [round_id for round_id, _ in summary["accuracy_curve"]] == list(range(26))


def test_a_model_that_diverges_ends_the_run_as_failed(tmp_path: Path) -> None:
    experiment = an_experiment(
        9,
        training={"learning_rate": 1e3},
        aggregation={"rule": "mean"},
        attack={"name": "gaussian", "std": 1e38, "knowledge": "none"},
        privacy={"epsilon": None, "noise_seed": None},
    )
    summary = run_simulation(experiment, tmp_path / "run")
    assert summary["status"] == "failed"
    assert "non-finite" in summary["message"]


def test_what_needs_the_network_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    experiment = an_experiment(misbehaviour={"name": "silence"})
    with pytest.raises(ConfigError, match=r"misbehaviour\.name = silence.*byzuldp run"):
        run_simulation(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_secret_noise_without_a_ledger() -> None:
    with pytest.raises(PrivacyError, match="needs a ledger"):
        next(simulate(an_experiment(privacy={"noise_seed": None})))


def test_a_private_runs_claim_is_that_of_any_run(tmp_path: Path) -> None:
    experiment = an_experiment(3, privacy={"noise_seed": None}, attack={"name": "none"})
    summary = run_simulation(experiment, tmp_path / "run")
    assert summary["private"]
    assert summary["epsilon_spent"] == pytest.approx(500.0, rel=1e-6)
    assert verify_run(tmp_path / "run").holds


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run_simulation(an_experiment(1), tmp_path / "run")
    with pytest.raises(RunFolderExists):
        run_simulation(an_experiment(1), tmp_path / "run")


def test_a_run_whose_clients_are_elsewhere_does_not_go_on_with_simulated_ones(tmp_path: Path) -> None:
    run_simulation(an_experiment(1), tmp_path / "run")
    (tmp_path / "run/operator/join_tokens.json").write_text("{}")
    with pytest.raises(ConfigError, match="byzuldp ps --resume"):
        run_simulation(an_experiment(1), tmp_path / "run", resume=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_cuda_a_run_comes_out_near_a_cpus(tmp_path: Path) -> None:
    on_gpu = an_experiment(20, training={"device": "cuda"})
    assert run_simulation(on_gpu, tmp_path / "run")["status"] == "completed"
    np.testing.assert_allclose(theta_of(tmp_path / "run"), last_theta(an_experiment(20), exact=True), atol=1e-2)

"""A networked run and an in-process call of the same pure functions give the same model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from federations import ServerProcess, adversary_process, client_process, small_experiment, theta_of

from common.config import Experiment
from common.learning.prepared import DEFAULT_ROOT, prepared_folder
from deploy.simulation import simulate

ALL_ANSWER = {"grace_floor_s": 60.0, "leave_deadline_s": 20.0}
"""The server waits for everyone, however slow this machine is."""


def over_the_network(experiment: Experiment, folder: Path) -> np.ndarray:
    """θ after a run of real processes: a server, two of clients, one adversary."""
    with ExitStack() as processes:
        server = processes.enter_context(ServerProcess(experiment, folder)).listening()
        honest, half = list(experiment.honest_ids), len(experiment.honest_ids) // 2
        peers = [
            client_process(folder, experiment, server.address, server.tokens(ids), name=f"client-{ids[0]}")
            for ids in (honest[:half], honest[half:])
        ]
        if experiment.num_adversaries:
            tokens = server.tokens(list(experiment.adversary_ids))
            peers.append(adversary_process(folder, experiment, server.address, tokens, server.wiretap))
        for peer in peers:
            processes.enter_context(peer)
        summary = server.finish()
        assert [peer.exit_code() for peer in peers] == [0] * len(peers), [peer.log() for peer in peers]
    assert (summary["status"], summary["rounds"]) == ("completed", experiment.training.rounds)
    assert summary["refusals"] == {}
    return theta_of(server.run_dir)


def in_one_process(experiment: Experiment) -> np.ndarray:
    """θ after a simulated run."""
    *_, last = simulate(experiment)
    return last.theta.numpy()


ATTACKS = {
    "honest": {"name": "none"},
    "alie_colluding": {"name": "alie", "knowledge": "colluding"},
    "mimic_omniscient": {"name": "mimic", "knowledge": "omniscient"},
    "label_flip": {"name": "label_flip", "knowledge": "none"},
    "adaptive": {"name": "adaptive", "knowledge": "none"},
    "ipm_optimised": {"name": "ipm", "knowledge": "omniscient", "epsilon": "optimised"},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_network_changes_nothing(attack: str, tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 9, "byzantine": 2},
        training={"rounds": 20, "learning_rate": 0.5, "client_momentum": 0.9, "server_momentum": 0.9},
        aggregation={"rule": "trimmed_mean"},
        attack=ATTACKS[attack],
        network=ALL_ANSWER,
    )
    theta = over_the_network(experiment, tmp_path)
    np.testing.assert_array_equal(theta, in_one_process(experiment))
    honest = small_experiment(**experiment.model_dump(mode="json", exclude_unset=True) | {"attack": {"name": "none"}})
    assert (attack == "honest") == np.array_equal(theta, in_one_process(honest))  # the attack did something


def test_the_network_changes_nothing_when_the_noise_can_be_repeated(tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 9, "byzantine": 2},
        training={"rounds": 20, "learning_rate": 0.5, "client_momentum": 0.5, "server_momentum": 0.5},
        aggregation={"rule": "trimmed_mean"},
        privacy={"epsilon": 500.0, "delta": 1e-3, "noise_seed": 3},
        attack=ATTACKS["alie_colluding"],
        network=ALL_ANSWER,
    )
    np.testing.assert_array_equal(over_the_network(experiment, tmp_path), in_one_process(experiment))


@pytest.mark.skipif(not prepared_folder("mnist", DEFAULT_ROOT).is_dir(), reason="MNIST is not there: make data")
def test_the_network_changes_nothing_for_the_papers_cnn_on_mnist(tmp_path: Path) -> None:
    experiment = small_experiment(
        federation={"clients": 6, "byzantine": 1},
        training={"rounds": 5, "learning_rate": 0.5, "client_momentum": 0.9, "server_momentum": 0.9},
        evaluation={"every": 100},
        aggregation={"rule": "trimmed_mean"},
        attack={"name": "ipm", "knowledge": "omniscient"},
        data={"dataset": "mnist", "partition": "classes"},
        model={"name": "cnn"},
        network=ALL_ANSWER,
    )
    theta = over_the_network(experiment, tmp_path)
    assert theta.size == 26_010
    np.testing.assert_allclose(theta, in_one_process(experiment), atol=1e-6, rtol=0)

"""Every rule against every attack preset: the network and a simulated run give the same model, bit for bit.

The task is small and its gradients are summed in one order, so nothing is left to rounding. A model with larger layers
may differ by what float32 rounds (see ``tests/process/test_parity.py`` for the paper's CNN, and docs/simulation.md).
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import ServerProcess, adversary_process, client_process, small_experiment, theta_of

from common.aggregation import RULES
from common.config import Experiment, load_experiment, ready_experiments
from deploy.simulate.run import run_simulation

PRESETS = sorted(name for name in ready_experiments() if name.startswith("attacks/"))
ATTACKS: dict[str, dict[str, Any]] = {"none": {"name": "none"}} | {
    name.partition("/")[2]: load_experiment(name).attack.model_dump(mode="json", exclude={"adversaries"})
    for name in PRESETS
}
TYPICAL = [
    ("normalized_mean", "same_value"),  # Fed-NGA
    ("centered_clipping", "min_max"),
    ("multi_krum", "inf"),
]
"""One of each kind of rule and of knowledge; every rule alone, and other attacks, are in the tests beside this one."""


def experiment_of(rule: str, attack: str) -> Experiment:
    """Eleven clients of which two collude: enough for every rule."""
    return small_experiment(
        federation={"clients": 11, "byzantine": 2},
        training={"rounds": 3, "learning_rate": 0.5, "client_momentum": 0.9, "server_momentum": 0.5},
        evaluation={"every": 1},
        aggregation={"rule": rule},
        attack=ATTACKS[attack],
        network={"grace_floor_s": 60.0, "leave_deadline_s": 20.0},
    )


def the_network_and_a_simulation_agree(rule: str, attack: str, folder: Path) -> None:
    experiment = experiment_of(rule, attack)
    with ExitStack() as processes:
        server = processes.enter_context(ServerProcess(experiment, folder)).listening()
        honest, byzantine = (server.tokens(list(ids)) for ids in (experiment.honest_ids, experiment.adversary_ids))
        processes.enter_context(client_process(folder, experiment, server.address, honest))
        if byzantine:
            processes.enter_context(adversary_process(folder, experiment, server.address, byzantine, server.wiretap))
        summary = server.finish()
    simulated = run_simulation(experiment, folder / "simulated")
    np.testing.assert_array_equal(theta_of(server.run_dir), theta_of(folder / "simulated"))
    for key in ("status", "rounds", "final_accuracy", "accuracy_curve", "private_because", "adversaries", "rule"):
        assert summary[key] == simulated[key], key


def test_the_presets_are_all_there() -> None:
    assert len(ATTACKS) >= 15
    assert {attack["name"] for attack in ATTACKS.values()} >= {"none", "alie", "ipm", "label_flip", "mimic"}


@pytest.mark.parametrize(("rule", "attack"), TYPICAL)
def test_the_network_changes_nothing(rule: str, attack: str, tmp_path: Path) -> None:
    the_network_and_a_simulation_agree(rule, attack, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "attack"), list(itertools.product(sorted(RULES), ATTACKS)))
def test_the_network_changes_nothing_whatever_the_rule_and_attack(rule: str, attack: str, tmp_path: Path) -> None:
    the_network_and_a_simulation_agree(rule, attack, tmp_path)

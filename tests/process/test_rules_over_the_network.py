"""Any rule, and any step before it, can be named in an experiment and runs over the network, or is refused with why."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from federations import ServerProcess, adversary_process, client_process, small_experiment, theta_of

from common.aggregation import BEFORE, RULES
from common.config import Experiment
from common.errors import PrivacyError, RuleError
from common.learning.task import build_task
from deploy.simulation import simulate
from ps.mechanism import opened
from ps.reader import RunReader
from ps.release import Mechanism

STEPS = {
    "adaptive_clipping": "adaptive_clipping",
    "bucketing": {"name": "bucketing", "size": 2},
    "clipping": {"name": "clipping", "radius": 0.5},
    "nearest_neighbor_mixing": "nearest_neighbor_mixing",
}
NAMED = {rule: {"rule": rule} for rule in sorted(RULES)} | {
    f"{step}_before_the_median": {"rule": "median", "before": [STEPS[step]]} for step in sorted(BEFORE)
}


def mechanism_for(experiment: Experiment) -> Mechanism:
    _, _, mechanism = opened(experiment, lambda: build_task(experiment).dataset.train.labels)
    return mechanism


def experiment_with(aggregation: dict[str, object], **sections: dict[str, object]) -> Experiment:
    """Eleven clients of which two collude: enough for every rule."""
    given = {
        "federation": {"clients": 11, "byzantine": 2},
        "training": {"rounds": 3, "learning_rate": 0.5, "client_momentum": 0.5, "server_momentum": 0.5},
        "aggregation": aggregation,
        "privacy": {"epsilon": 200.0, "delta": 1e-3, "noise_seed": 5},
        "attack": {"name": "ipm", "knowledge": "colluding"},
        "network": {"grace_floor_s": 60.0, "leave_deadline_s": 20.0},
    }
    return small_experiment(**{name: given.get(name, {}) | sections.get(name, {}) for name in given | sections})


def simulated(experiment: Experiment) -> np.ndarray:
    *_, last = simulate(experiment)
    return last.theta.numpy()


def networked(experiment: Experiment, folder: Path) -> Path:
    with ExitStack() as processes:
        server = processes.enter_context(ServerProcess(experiment, folder)).listening()
        honest, byzantine = (server.tokens(list(ids)) for ids in (experiment.honest_ids, experiment.adversary_ids))
        processes.enter_context(client_process(folder, experiment, server.address, honest))
        processes.enter_context(adversary_process(folder, experiment, server.address, byzantine, server.wiretap))
        assert server.finish()["status"] == "completed"
    return server.run_dir


@pytest.mark.parametrize("name", NAMED)
def test_every_rule_runs_under_dp_over_the_network_as_in_one_process(name: str, tmp_path: Path) -> None:
    experiment = experiment_with(NAMED[name])
    run_dir = networked(experiment, tmp_path)
    np.testing.assert_array_equal(theta_of(run_dir), simulated(experiment))
    entries = [text for _, text, _ in RunReader(run_dir).ledger_rows()[1:]]
    assert len(entries) == 3
    assert all('"mechanism":"gaussian"' in text for text in entries)


@pytest.mark.parametrize("name", NAMED)
def test_every_rule_runs_without_dp(name: str) -> None:
    experiment = experiment_with(NAMED[name], privacy={"epsilon": None, "noise_seed": None})
    assert np.isfinite(simulated(experiment)).all()


@pytest.mark.parametrize("name", NAMED)
def test_every_rule_takes_server_momentum_inside_it_or_says_why_not(name: str) -> None:
    experiment = experiment_with(NAMED[name], training={"server_momentum_form": "inside"})
    if name.startswith(("adaptive_clipping", "clipping")):
        with pytest.raises(RuleError, match="server_momentum_form = 'outside'"):
            simulated(experiment)
    else:
        assert np.isfinite(simulated(experiment)).all()


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "geometric_median"])
def test_without_noise_inside_and_outside_are_the_same_for_an_equivariant_rule(rule: str) -> None:
    both = [
        simulated(experiment_with({"rule": rule}, privacy={"epsilon": None}, training={"server_momentum_form": form}))
        for form in ("inside", "outside")
    ]
    np.testing.assert_allclose(*both, atol=2e-6)


def test_server_momentum_inside_the_rule_is_charged_by_what_was_released(tmp_path: Path) -> None:
    experiment = experiment_with({"rule": "centered_clipping"}, training={"server_momentum_form": "inside"})
    run_dir = networked(experiment, tmp_path)
    np.testing.assert_array_equal(theta_of(run_dir), simulated(experiment))


def test_under_the_strict_premise_the_noise_grows_and_the_claim_no_longer_needs_p4() -> None:
    timing = {"premise": "strict", "round_timing": "fixed"}
    strict, plain = (experiment_with({"rule": "trimmed_mean"}, privacy=p) for p in (timing, {}))
    one, other = (mechanism_for(e) for e in (strict, plain))
    assert one.sensitivity == pytest.approx(3 * other.sensitivity * 7 / 7)
    assert one.noise_multiplier == other.noise_multiplier
    assert np.isfinite(simulated(strict)).all()


def test_on_a_public_schedule_rounds_take_their_time_and_the_premises_say_so(tmp_path: Path) -> None:
    experiment = experiment_with(
        {"rule": "trimmed_mean"},
        privacy={"round_timing": "fixed", "premise": "strict"},
        network={"round_period_s": 0.6, "publish_margin_s": 0.2, "join_deadline_s": 4.0},
    )
    run_dir = networked(experiment, tmp_path)
    np.testing.assert_array_equal(theta_of(run_dir), simulated(experiment))
    rows = RunReader(run_dir).ledger_rows()
    assert all("P4" not in text and "P2" not in text and "P1" in text for _, text, _ in rows)
    assert all(record.latency_s == pytest.approx(0.6, abs=0.15) for record in RunReader(run_dir).rounds()[1:])


def test_weights_by_sample_counts_reach_the_rule_and_its_sensitivity() -> None:
    data = {"partition": "dirichlet", "dirichlet_beta": 0.5, "minimum": 8}
    weighted, plain = (
        experiment_with({"rule": "normalized_mean"}, data=data, federation={"weights": weights})
        for weights in ("samples", "equal")
    )
    one, other = (mechanism_for(e) for e in (weighted, plain))
    assert other.sensitivity == pytest.approx(2 / 11)
    assert one.sensitivity > other.sensitivity
    assert not np.array_equal(simulated(weighted), simulated(plain))


def test_fed_nga_needs_no_clipping_for_its_privacy_and_the_others_do() -> None:
    unclipped = {"clip_norm": "none"}
    assert np.isfinite(simulated(experiment_with({"rule": "normalized_mean"}, training=unclipped))).all()
    with pytest.raises(PrivacyError, match=r"training\.clip_norm"):
        simulated(experiment_with({"rule": "trimmed_mean"}, training=unclipped))


def test_weights_for_a_rule_that_takes_none_are_refused() -> None:
    with pytest.raises(RuleError, match="takes no weights"):
        simulated(experiment_with({"rule": "trimmed_mean"}, federation={"weights": "samples"}))

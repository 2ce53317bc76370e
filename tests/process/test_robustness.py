"""What ``mnist_attacked`` shows: a plain mean fails where the trimmed mean does not."""

from pathlib import Path

import pytest

from common.config import load_experiment
from common.learning.gradient import accuracy
from deploy.simulation import simulate

ROOT = Path(__file__).parents[2] / "data"


def final_accuracy(rule: str) -> float:
    """On the whole test set. Simulated: the networked run has the same trajectory (test_parity)."""
    experiment = load_experiment("mnist_attacked", [f"aggregation.rule={rule}", f"data.root={ROOT}"])
    for last in simulate(experiment):  # noqa: B007 - the last round counts
        pass
    last.task.model.set_parameters(last.theta)
    return accuracy(last.task.model, last.task.dataset.test, last.task.dataset)[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rule", "low", "high"), [("mean", 0.0, 0.40), ("trimmed_mean", 0.75, 1.0)])
def test_the_mean_falls_to_the_reversed_mean_and_cwtm_does_not(rule, low, high):
    assert low <= final_accuracy(rule) <= high

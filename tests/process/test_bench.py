"""``byzuldp bench latency`` with real processes: as few rounds as there can be."""

from __future__ import annotations

import pytest

from deploy.bench.asked import Load, Setting
from deploy.bench.links import links_of
from deploy.bench.measuring import measure
from deploy.bench.result import point_of
from ps.timing import SEGMENTS

SETTING = Setting(2, 100, 0, rounds=3, warm_up=1, processes=1, rule="trimmed_mean", epsilon=10.0, delta=1e-5)
LINKS = {"delay_ms": 0.0, "jitter_ms": 0.0, "rate_mbit": None, "loss": 0.0, "backend": None}


def test_a_measurement_has_the_rounds_that_count_and_all_their_phases(tmp_path):
    setting = SETTING.__class__(**{**SETTING.__dict__, "load": Load(compute_s=0.05)})
    run = measure(setting, links_of(**LINKS), lambda text: pytest.fail(text), keep=tmp_path)
    assert [one.round_id for one in run.rounds] == [1, 2, 3]
    point = point_of(setting, [run], processes=1)
    assert set(point.phases_s) <= set(SEGMENTS)
    for one in run.rounds:
        assert sum(one.segments.values()) == pytest.approx(one.latency_s)
    assert point.missing == 0
    assert point.bytes["up"] == 2 * 400
    assert point.bytes["down"] >= 2 * 400  # each identity pulls for itself, although one process hosts both
    assert point.spans_s["training"]["p50"] >= 0.05
    assert point.round_s["p50"] >= 0.05


@pytest.mark.system
def test_the_delay_of_a_link_is_in_every_round(tmp_path):
    """A momentum goes up and a model comes down in each round: at least once there and once back."""
    links = links_of(**LINKS | {"delay_ms": 60.0, "backend": "proxy"})
    run = measure(SETTING, links, lambda text: pytest.fail(text), keep=tmp_path)
    assert min(one.latency_s for one in run.rounds) >= 0.12

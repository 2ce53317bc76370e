"""Whole scenarios on real processes, with the proxy: they pass where the system holds, and only there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from system_needs import needed

from deploy.chaos.netns import NetnsBackend
from deploy.chaos.play import DISTURBED, choose, play
from deploy.chaos.roles import LAB_ROLES
from deploy.chaos.scenario import load_scenario, ready_scenarios
from deploy.chaos.verdict import FILE, Verdict, run_of_earlier
from deploy.display import QuietDisplay

# What is common to the ready scenarios' quick versions, so that one undisturbed run serves them all.
COMMON = """\
[scenario]
experiment = "mnist_no_dp"
set = [
  "training.rounds=100",
  "federation.clients_per_process=2",
  "training.client_momentum=0.5",
  "training.server_momentum=0.5",
  "data.partition=iid",
]

[quick]
rounds = 24
seconds = 1
set = ["federation.clients=10", "federation.byzantine=2", "network.grace_floor_s=0.2"]
"""

Play = Callable[..., Verdict]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the verdict is whose undisturbed run serves the others; empty until there is one."""
    return {}


@pytest.fixture
def play_quick(tmp_path: Path, undisturbed: dict[str, Path]) -> Play:
    def played(
        source: str, *, seed: int | None = None, backend: str = "proxy", leave_out: Sequence[str] = (), **keywords: Any
    ) -> Verdict:
        loaded = load_scenario(source, quick=True, seed=seed)
        plan, choice = choose(loaded, backend=backend, leave_out=leave_out)
        name, print_ = choice.backend.name, loaded.experiment.fingerprint()
        earlier = undisturbed.get(name + print_)
        before = None if earlier is None else run_of_earlier(earlier, print_, name)
        verdict = play(
            loaded,
            plan,
            choice,
            tmp_path / "chaos",
            lambda _: nullcontext(QuietDisplay()),
            undisturbed=before,
            **keywords,
        )
        undisturbed.setdefault(name + print_, tmp_path / "chaos")
        left = [child.name() for child in psutil.Process().children(recursive=True) if is_ours(child)]
        assert not left
        return verdict

    return played


def is_ours(process: psutil.Process) -> bool:
    try:
        return "forwarding.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def assert_passes(verdict: Verdict) -> None:
    assert verdict.passed, [check for check in verdict.checks if not check.holds]
    stored = json.loads((Path(verdict.disturbed.run_dir).parent / FILE).read_text())
    assert stored == json.loads(json.dumps(verdict.as_json()))


def log_of(verdict: Verdict, name: str) -> str:
    return (Path(verdict.disturbed.run_dir) / "operator" / "logs" / f"{name}.log").read_text()


# -------------------------------------------------------------------- quick ones


@pytest.mark.system  # for the time it takes
def test_ps_killed_three_times_loses_and_repeats_nothing(play_quick: Play) -> None:
    verdict = play_quick("ps_killed")
    assert_passes(verdict)
    after = verdict.disturbed
    assert (after.begun_again, after.restarts, after.lost) == (3, {"ps": 3}, 0)
    assert [item["do"] for item in verdict.timeline] == ["kill"] * 3
    assert all(item["ended_s"] - item["began_s"] >= 0.4 for item in verdict.timeline)  # it was dead for so long
    assert verdict.undisturbed.restarts == {}


def test_split_waits_below_the_quorum_and_goes_on_when_it_heals(play_quick: Play) -> None:
    verdict = play_quick("split")
    assert_passes(verdict)
    (partition,) = verdict.timeline
    assert partition["began_round"] >= 12
    assert partition["ended_round"] - partition["began_round"] <= 1  # one may have had all its answers already
    assert verdict.disturbed.latency_max_s is not None
    assert verdict.disturbed.latency_max_s > 2.5


@pytest.mark.system  # for the time it takes
def test_clients_live_through_much_but_not_through_two_models_of_a_round(play_quick: Play, tmp_path: Path) -> None:
    """All invariants hold but one, which is broken on purpose: a client says that it was sent another model too."""
    path = tmp_path / "several.toml"
    path.write_text(
        f"# Several.\n{COMMON}"
        """
[[fault]]
do = "delay"
on = "client-1"
at = "start"
delay_ms = 5

[[fault]]
do = "reset"
on = "client-1"
at = "round 20"

[[fault]]
do = "stop"
on = "client-0"
at = "round 30"
for = "2 rounds"

[[fault]]
do = "restart"
on = "client-2"
at = "round 50"

[[fault]]
do = "squeeze"
on = "client-3"
at = "round 50"
for = "2 rounds"
share = 0.5

[[fault]]
do = "kill"
on = "adversary"
at = "round 70"
"""
    )
    verdict = play_quick(str(path), entries={**LAB_ROLES, "client": "doubled:take_part"})
    assert not verdict.passed
    (broken,) = [check for check in verdict.checks if not check.holds]
    assert broken.name == "models"
    assert re.fullmatch(r"round \d+ was published twice: client-\d and client-1 have different models", broken.found)
    seen = {item["do"]: item for item in verdict.timeline}
    assert seen["reset"]["notes"] == ["1 connection"]
    assert re.search("(?i)(reset by peer|socket closed)", log_of(verdict, "client-1"))  # it saw that, and came back
    assert seen["stop"]["ended_round"] > seen["stop"]["began_round"]  # the others went on without it
    assert verdict.disturbed.restarts == {"client-2": 1}
    assert (seen["delay"]["began_s"], seen["delay"]["ended_s"]) == (-1.0, None)
    assert re.match("control group|nice 19", seen["squeeze"]["notes"][0])
    assert verdict.disturbed.incomplete
    assert verdict.undisturbed.incomplete == 0


# -------------------------------------------------------------------- longer ones


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(ready_scenarios()))
def test_a_ready_scenario_passes_where_packets_can_be_lost(play_quick: Play, name: str) -> None:
    needed(NetnsBackend().probe())
    verdict = play_quick(name, backend="netns")
    assert not verdict.left_out
    assert_passes(verdict)


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("name", sorted(ready_scenarios().keys() - {"ps_killed", "split"}))
def test_a_ready_scenario_passes_on_the_proxy(play_quick: Play, name: str) -> None:
    assert_passes(play_quick(name, leave_out=["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_punished_run_passes_and_its_seed_tells_what_was_done(play_quick: Play, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "punished.toml"
    path.write_text(
        f"# Random.\n{COMMON.replace('rounds = 24', 'rounds = 60')}"
        """
[punisher]
mean_time_between_failures_s = 0.5
mean_time_to_repair_s = 0.7
until_s = 3
on = "clients"
"""
    )
    verdict = play_quick(str(path), seed=seed)
    assert_passes(verdict)
    planned, _ = choose(load_scenario(str(path), quick=True, seed=seed), backend="proxy")
    assert [item["at"] for item in verdict.timeline] == [str(fault.at[0]) for fault in planned.faults]


@pytest.mark.slow
def test_a_lost_quorum_is_an_ending_that_may_be_expected(play_quick: Play, tmp_path: Path) -> None:
    path = tmp_path / "lost.toml"
    terms = COMMON.replace("[scenario]", '[scenario]\nstatus = ["quorum_lost"]\naccuracy_within = 0.5')
    terms = terms.replace('"training.rounds=100"', '"training.rounds=100", "network.quorum_deadline_s=2"')
    terms = terms.replace('"federation.clients=10"', '"network.round_deadline_s=2", "federation.clients=10"')
    path.write_text(f'# Gone.\n{terms}[[fault]]\ndo = "kill"\non = "half"\nat = "round 50"\n')
    verdict = play_quick(str(path))
    assert_passes(verdict)
    assert verdict.disturbed.status == "quorum_lost"
    assert verdict.disturbed.lost == 12
    assert Path(verdict.disturbed.run_dir).name == DISTURBED

"""Scenario files: what they may say, whom it is about, and that what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from deploy.chaos import plan as planning
from deploy.chaos.backend import CAPABILITIES, CLEAR, Conditions, choose_backend, combined
from deploy.chaos.faults import KINDS, Partition, Refuse
from deploy.chaos.moments import Moment, Span, parse_moment, parse_span
from deploy.chaos.plan import Plan, names_of, planned
from deploy.chaos.punisher import SEVERITY, Punisher, drawn
from deploy.chaos.scenario import load_scenario, ready_scenarios
from deploy.chaos.targets import links, processes

NAMES = ("ps", "client-0", "client-1", "client-2", "adversary")

READY = ("everything", "flapping_client", "ps_killed", "slow_uplinks", "split", "stragglers", "wan")

TINY = """\
# A small one.
[scenario]
experiment = "tiny.toml"
accuracy_within = 0.1

[quick]
rounds = 10
seconds = 0.5

[[fault]]
do = "delay"
on = "clients"
at = "start"
delay_ms = 20

[[fault]]
do = "kill"
on = "client-0"
at = ["round 40", 12.5]
for = 3
"""

EXPERIMENT = """\
[federation]
clients = 8
byzantine = 2
clients_per_process = 2

[training]
rounds = 100

[attack]
name = "alie"
"""


def write(folder: Path, text: str = TINY) -> str:
    (folder / "tiny.toml").write_text(EXPERIMENT)
    (folder / "scenario.toml").write_text(text)
    return str(folder / "scenario.toml")


# -------------------------------------------------------------------- reading


def test_a_scenario_is_an_experiment_with_a_timeline(tmp_path: Path) -> None:
    loaded = load_scenario(write(tmp_path), overrides=["training.rounds=90"])
    assert (loaded.name, loaded.about, loaded.experiment.training.rounds) == ("scenario", "A small one.", 90)
    delay, kill = loaded.faults
    assert (delay.at, delay.lasting) == ((Moment("start"),), None)
    assert (kill.at, kill.lasting) == ((Moment("round", 40), Moment("s", 12.5)), Span("s", 3))


def test_quick_shrinks_rounds_by_the_runs_length_and_seconds_by_the_factor(tmp_path: Path) -> None:
    loaded = load_scenario(write(tmp_path), quick=True)
    assert loaded.experiment.training.rounds == 10
    assert loaded.experiment.data.dataset == "deploy.chaos.toy:clouds"
    kill = loaded.faults[1]
    assert (kill.at, kill.lasting) == ((Moment("round", 4), Moment("s", 6.25)), Span("s", 1.5))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("delay_ms = 20", "delay_s = 20"), r"fault 1: delay_s: unknown key; did you mean 'delay_ms'\?"),
        (('do = "kill"', 'do = "kil"'), r"fault 2: do = 'kil': did you mean 'kill'\?"),
        (('do = "kill"\n', ""), "fault 2: missing do; one of delay"),
        (('on = "client-0"\n', ""), "fault 2: on: missing"),
        (("accuracy_within", "acuracy_within"), "scenario.acuracy_within: unknown key; did you mean 'accuracy_within'"),
        (("[quick]", "[quik]"), r"quik: unknown key; did you mean 'quick'\?"),
        (("for = 3", "for = 0"), "fault 2: for = 0: expected"),
        (("for = 3", 'for = "3 round trips"'), 'expected "5 rounds"'),
        (("12.5", '"round 0"'), 'the first is "round 1"'),
        (("12.5", "-1"), 'expected "start"'),
        (('at = ["round 40", 12.5]', 'at = "start"'), "needs a process that runs"),
        (('at = ["round 40", 12.5]', "at = []"), "fault 2: at = "),
        (('do = "kill"', 'do = "restart"'), "happens at once: leave out 'for'"),
        (("accuracy_within = 0.1", 'status = ["complete"]'), "did you mean 'completed'"),
        (("experiment = ", "experiment = 3 #"), "scenario.experiment = 3"),
        (("[scenario]", "[scenario"), "is not valid TOML"),
        (('"tiny.toml"', '"nowhere.toml"'), "no experiment 'nowhere.toml'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    assert change[0] in TINY
    with pytest.raises(ConfigError, match=complaint):
        load_scenario(write(tmp_path, TINY.replace(*change)))


def test_a_file_without_quick_has_no_quick_version(tmp_path: Path) -> None:
    text = TINY.replace("[quick]\nrounds = 10\nseconds = 0.5\n", "")
    with pytest.raises(ConfigError, match=r"has no \[quick\] section"):
        load_scenario(write(tmp_path, text), quick=True)


def test_a_seed_without_a_punisher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing in it is drawn"):
        load_scenario(write(tmp_path), seed=3)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "name", ["everything", "flapping_client", "ps_killed", "slow_uplinks", "split", "stragglers", "wan"]
)
def test_every_ready_scenario_can_be_planned(name: str, quick: bool) -> None:
    loaded = load_scenario(name, quick=quick)
    plan = planned(loaded)
    assert plan.faults
    assert len(loaded.about) > 20
    rounds = loaded.experiment.training.rounds
    assert all(moment.value < rounds for fault in plan.faults for moment in fault.at if moment.unit == "round")


def test_there_is_no_ready_scenario_without_a_test() -> None:
    assert sorted(ready_scenarios()) == sorted(READY)


# -------------------------------------------------------------------- moments


@pytest.mark.parametrize("moment", [parse_moment("start"), parse_moment("round 7"), parse_moment(2.5), parse_moment(0)])
def test_a_moment_reads_as_it_is_written(moment: Moment) -> None:
    text = str(moment)
    assert parse_moment(float(text.removesuffix(" s")) if text.endswith(" s") else text) == moment


@pytest.mark.parametrize("wrong", ["round", "round -1", "7", True, float("nan"), float("inf"), -1, None, ["start"]])
def test_a_moment_is_nothing_else(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_moment(wrong)


def test_a_round_never_shrinks_to_none() -> None:
    assert Moment("round", 3).scaled(0.01, 1) == Moment("round", 1)
    assert parse_span("3 rounds").scaled(0.01, 1) == Span("rounds", 1)


# -------------------------------------------------------------------- whom it is about


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (["ps"], ["ps"]),
        (["clients"], ["client-0", "client-1", "client-2"]),
        (["half"], ["client-0"]),
        (["all"], ["client-0", "client-1", "client-2", "adversary"]),
        (["client-[12]", "client-1", "ps"], ["ps", "client-1", "client-2"]),
    ],
)
def test_processes_are_named_one_by_one_or_in_groups(on: list[str], expected: list[str]) -> None:
    assert list(processes(on, NAMES)) == expected


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (["client-1"], {("client-1", "up"), ("client-1", "down")}),
        (["client-1 <-> ps"], {("client-1", "up"), ("client-1", "down")}),
        (["client-1 -> ps"], {("client-1", "up")}),
        (["ps <- client-1"], {("client-1", "up")}),
        (["ps -> client-1"], {("client-1", "down")}),
        (["client-1 <- ps"], {("client-1", "down")}),
        (["half -> ps", "ps -> adversary"], {("client-0", "up"), ("adversary", "down")}),
        (["ps"], {(name, way) for name in NAMES[1:] for way in ("up", "down")}),
    ],
)
def test_links_are_named_by_their_peer_and_direction(on: list[str], expected: set[tuple[str, str]]) -> None:
    assert set(links(on, NAMES)) == expected


@pytest.mark.parametrize(
    ("on", "complaint"),
    [
        ("cleint-0", "did you mean 'client-0'"),
        ("client-9", "names no process of this run"),
        ("xyz", "known: ps, client-0 … adversary"),
        ("client-0 -> client-1", "has the parameter server at one end"),
        ("ps <-> ps", "has the parameter server at one end"),
        ("* -> ps", "at one end only"),
    ],
)
def test_a_name_of_nobody_is_refused(on: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        links([on], NAMES)


def test_a_process_fault_on_a_link_is_refused() -> None:
    with pytest.raises(ConfigError, match="this fault is of processes"):
        processes(["client-0 -> ps"], NAMES)


def test_only_who_dials_can_be_refused() -> None:
    plan = Plan(NAMES, (), ())
    fault = Refuse.model_validate({"do": "refuse", "at": 1, "on": "ps -> client-1"})
    assert plan.links(fault) == (("client-1", "up"),)


# -------------------------------------------------------------------- what is needed


def test_names_are_those_of_the_launcher(tmp_path: Path) -> None:
    assert names_of(load_scenario(write(tmp_path)).experiment) == NAMES


def test_a_plan_needs_what_its_faults_need_and_nothing_that_is_left_out(tmp_path: Path) -> None:
    text = TINY + '\n[[fault]]\ndo = "loss"\non = "all"\nat = 1\nfraction = 0.1\n'
    loaded = load_scenario(write(tmp_path, text))
    assert planned(loaded).needs == {"delay", "loss"}
    plan = planned(loaded, leave_out=["loss"])
    assert (plan.needs, plan.left_out) == ({"delay"}, ("loss",))
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        planned(loaded, leave_out=["los"])


def test_a_fault_the_backend_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"backend proxy: cannot do loss, reordering; "):
        choose_backend("proxy", frozenset({"loss", "reordering", "delay"}))
    assert choose_backend("proxy", frozenset({"delay", "reset"})).backend.name == "proxy"
    with pytest.raises(ConfigError, match="expected auto or one of proxy, netns, netem"):
        choose_backend("smoke signals", frozenset())


def test_auto_reports_whom_it_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.chaos.backend.BACKENDS", {"proxy": "deploy.chaos.proxy:ProxyBackend", "own": "x_y_z:A"})
    with pytest.raises(ConfigError, match="here: proxy: cannot do loss; own: is not part of this installation"):
        choose_backend("auto", frozenset({"loss"}))


@pytest.mark.parametrize("do", ["kill", "stop", "disk_full"])
def test_the_server_does_not_go_for_good(tmp_path: Path, do: str) -> None:
    text = TINY + f'\n[[fault]]\ndo = "{do}"\non = "ps"\nat = 1\n'
    with pytest.raises(ConfigError, match="say how long it lasts with 'for'"):
        planned(load_scenario(write(tmp_path, text)))


def test_a_wiretap_does_not_survive_its_server(tmp_path: Path) -> None:
    text = TINY + '\n[[fault]]\ndo = "restart"\non = "ps"\nat = 1\n'
    overrides = ["attack.knowledge=omniscient", "attack.name=bit_flip"]
    with pytest.raises(ConfigError, match="an omniscient adversary does not survive"):
        planned(load_scenario(write(tmp_path, text), overrides=overrides))


def test_a_clock_fault_needs_libfaketime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "library", lambda: None)
    text = TINY + '\n[[fault]]\ndo = "clock"\non = "client-0"\nat = 1\njump_s = 60\n'
    loaded = load_scenario(write(tmp_path, text))
    with pytest.raises(ConfigError, match="apt install libfaketime"):
        planned(loaded)
    assert planned(loaded, leave_out=["clock"]).clocks == frozenset()


def test_every_link_fault_asks_for_a_known_capability() -> None:
    extra = {"delay_ms": 1, "fraction": 0.5, "bytes_per_s": 1000, "share": 0.5, "jump_s": 1}
    needed: set[str] = set()
    for name, kind in KINDS.items():
        own = {key: value for key, value in extra.items() if key in kind.model_fields}
        fault = kind.model_validate({"do": name, "at": 1, "on": "ps", **own})
        needed |= getattr(fault, "needs", frozenset)()
    assert needed | {"jitter"} == set(CAPABILITIES)


def test_faults_that_hold_together_add_up() -> None:
    one = Conditions(delay_s=0.1, jitter_s=0.01, loss=0.5, rate_bytes_s=100.0)
    two = Conditions(delay_s=0.2, loss=0.5, rate_bytes_s=50.0, cut=True)
    assert combined([one, two]) == Conditions(delay_s=0.1 + 0.2, jitter_s=0.01, loss=0.75, rate_bytes_s=50.0, cut=True)
    assert combined([]) == CLEAR
    assert CLEAR.needs() == frozenset()


# -------------------------------------------------------------------- the punisher


def punisher(**changes: Any) -> Punisher:
    return Punisher.model_validate({"faults": list(SEVERITY), "mean_time_between_failures_s": 1.0} | changes)


def as_text(seed: int) -> list[str]:
    return [fault.model_dump_json() for fault in drawn(punisher(seed=seed), NAMES)]


def test_the_same_seed_gives_the_same_timeline_and_another_another() -> None:
    assert as_text(7) == as_text(7)
    assert as_text(7) != as_text(8)


def test_failures_come_as_often_as_was_asked_for() -> None:
    faults = drawn(punisher(mean_time_between_failures_s=0.1, mean_time_to_repair_s=0.001, until_s=1000.0), NAMES)
    # Poisson with mean 10,000; a draw is left out only when all three clients suffer already. 6 deviations: 1e-9.
    assert abs(len(faults) - 10_000) < 600
    assert {fault.do for fault in faults} == set(SEVERITY)
    assert {fault.on for fault in faults} == {("client-0",), ("client-1",), ("client-2",)}
    assert all(fault.at[0].value < 1000 for fault in faults)


def test_who_suffers_is_spared_meanwhile() -> None:
    busy: dict[tuple[str, ...], float] = {}
    for fault in drawn(punisher(faults=["stop"], mean_time_to_repair_s=5.0), NAMES):
        assert fault.lasting is not None
        assert fault.at[0].value >= busy.get(fault.on, 0.0) - 0.002  # both are rounded
        busy[fault.on] = fault.at[0].value + fault.lasting.value


def test_a_punisher_names_what_it_may_do() -> None:
    with pytest.raises(ValueError, match="did you mean 'kill'"):
        punisher(faults=["kil"])
    with pytest.raises(ConfigError, match="names no process"):
        drawn(punisher(on="client-9"), NAMES)


def test_a_partition_is_a_cut() -> None:
    assert Partition.model_validate({"do": "partition", "at": 1, "on": "ps"}).conditions() == Conditions(cut=True)

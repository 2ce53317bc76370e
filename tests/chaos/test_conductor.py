"""The conductor over real processes that only pretend to train: each fault is done to whom it names, and undone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab_roles import DISK_IS_FULL

from common.config import Experiment, experiment_from
from common.errors import Interrupted, RunFailed, RunFolderExists
from deploy.chaos import conductor as conducting
from deploy.chaos import inflicting
from deploy.chaos.backend import CLEAR, PS, Conditions, Placement
from deploy.chaos.conductor import Conductor, Played
from deploy.chaos.faults import KINDS
from deploy.chaos.invariants import check_processes
from deploy.chaos.plan import Plan, names_of
from deploy.processes import child_context

FAKES = {"check": "check", "ps": "server", "client": "client", "adversary": "client"}
DEADLINE_S = 60.0

Event = dict[str, Any]
Shape = tuple[str, Conditions, Conditions]


class FakeBackend:
    """Notes what it is asked for."""

    name = "fake"
    capabilities = frozenset({"delay", "cut", "rate", "reset", "refuse", "jitter"})

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.resets: list[str] = []

    def probe(self) -> str | None:
        return None

    def open(self, peers: Sequence[str]) -> None:
        pass

    def placement(self, process: str) -> Placement:
        return Placement("127.0.0.1:20999" if process == PS else f"127.0.0.1:{21000 + len(process)}")

    def shape(self, peer: str, up: Conditions, down: Conditions) -> None:
        self.shapes.append((peer, up, down))

    def reset(self, peer: str) -> int:
        self.resets.append(peer)
        return 2

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        pass


class Onlooker:
    """Looks at the processes whenever the conductor says that it did something."""

    def __init__(self, act: Callable[[Event], None]) -> None:
        self.events: list[Event] = []
        self._act = act

    def show(self, event: Event) -> None:
        self.events.append(event)
        self._act(event)

    def tick(self) -> None:
        pass


class Lab:
    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.backend = FakeBackend()
        self.said: list[str] = []
        self.act: Callable[[Event], None] = lambda _: None

    def experiment(self, rounds: int) -> Experiment:
        federation = {"clients": 6, "byzantine": 2, "clients_per_process": 2}
        return experiment_from({"federation": federation, "training": {"rounds": rounds}, "attack": {"name": "alie"}})

    def play(self, *faults: dict[str, Any], rounds: int = 60, deadline_s: float = DEADLINE_S, **roles: str) -> Played:
        experiment = self.experiment(rounds)
        plan = Plan(names_of(experiment), tuple(KINDS[fault["do"]].model_validate(fault) for fault in faults), ())
        onlooker = Onlooker(self._shown)
        entries = {role: f"lab_roles:{name}" for role, name in (FAKES | roles).items()}
        return Conductor(
            experiment,
            self.run_dir,
            plan,
            onlooker,
            child_context("forkserver"),
            self.backend,
            deadline_s=deadline_s,
            entries=entries,
        ).play()

    def _shown(self, event: Event) -> None:
        if "message" in event:
            self.said.append(event["message"])
        self.act(event)

    @property
    def lives(self) -> list[dict[str, Any]]:
        path = self.run_dir / "lives"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def process(self, name: str) -> psutil.Process:
        """The last life of that name."""
        return psutil.Process([life["pid"] for life in self.lives if life["name"] == name][-1])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab of whose processes none may be left."""
    found = Lab(tmp_path)
    yield found
    left = [life for life in found.lives if alive(life["pid"])]
    assert not left


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


# -------------------------------------------------------------------- processes


def test_a_run_that_is_left_alone_completes(lab: Lab) -> None:
    played = lab.play(rounds=3)
    assert (played.status, played.restarts, played.timeline) == ("completed", {}, ())
    assert sorted(life["name"] for life in lab.lives) == ["adversary", "client-0", "client-1", "ps"]
    assert [end.how for end in played.ends] == ["done"] * 5
    assert not any(end.by_lab for end in played.ends)
    assert lab.backend.shapes == []


def test_each_peer_is_told_its_own_address_and_the_server_where_to_listen(lab: Lab) -> None:
    lab.play(rounds=3)
    for life in lab.lives:
        assert life["listens"] == "127.0.0.1:20999"
        assert life["address"] == ("" if life["name"] == "ps" else lab.backend.placement(life["name"]).address)


def test_a_killed_server_is_started_again_on_its_run_while_the_clients_live_on(lab: Lab) -> None:
    played = lab.play({"do": "kill", "on": "ps", "at": ["round 5", "round 20"], "for": 0.1})
    assert (played.status, played.restarts) == ("completed", {"ps": 2})
    servers = [life for life in lab.lives if life["name"] == "ps"]
    assert [life["resume"] for life in servers] == [False, True, True]
    assert len({life["listens"] for life in servers}) == 1
    assert len([life for life in lab.lives if life["name"] == "client-0"]) == 1
    assert check_processes(played.ends).holds


def test_a_restart_is_a_death_and_a_new_life_at_once(lab: Lab) -> None:
    played = lab.play({"do": "restart", "on": "client-1", "at": "round 5"})
    assert played.restarts == {"client-1": 1}
    first, second = [life["pid"] for life in lab.lives if life["name"] == "client-1"]
    assert first != second
    ends = [(end.how, end.by_lab) for end in played.ends if end.name == "client-1"]
    assert ends == [("died", True), ("done", False)]


def test_a_client_that_is_killed_for_good_stays_dead(lab: Lab) -> None:
    played = lab.play({"do": "kill", "on": "client-1", "at": ["round 5", "round 10"]})
    assert (played.status, played.restarts) == ("completed", {})
    first, second = played.timeline
    assert (first.notes, second.notes) == ([], ["not running: client-1"])


def test_a_stopped_process_stands_still_until_it_goes_on(lab: Lab) -> None:
    seen: list[str] = []

    def look(event: Event) -> None:
        message = str(event.get("message"))
        if "over: stop" in message:
            until(lambda: lab.process("client-0").status() != psutil.STATUS_STOPPED)
            seen.append("goes on")
        elif event.get("event") == "round" and "round 5: stop on half" in lab.said[-1:]:
            until(lambda: lab.process("client-0").status() == psutil.STATUS_STOPPED)
            seen.append("stands still")

    lab.act = look
    played = lab.play({"do": "stop", "on": "half", "at": "round 5", "for": "10 rounds"})
    assert seen[0] == "stands still"
    assert seen[-1] == "goes on"
    assert played.ends[-1].how == "done"


def test_a_process_that_is_stopped_to_the_end_still_hears_it(lab: Lab) -> None:
    played = lab.play({"do": "stop", "on": "client-0", "at": "round 5"}, rounds=10)
    assert [end.how for end in played.ends if end.name == "client-0"] == ["done"]


# -------------------------------------------------------------------- links


def test_faults_of_a_link_that_overlap_add_up_and_are_undone_one_by_one(lab: Lab) -> None:
    lab.play(
        {"do": "delay", "on": "client-0", "at": "start", "delay_ms": 10},
        {"do": "delay", "on": "ps -> client-0", "at": "round 5", "delay_ms": 20, "for": "5 rounds"},
        {"do": "partition", "on": "client-1 -> ps", "at": "round 8", "for": "5 rounds"},
        {"do": "reset", "on": "all", "at": "round 20"},
    )
    ten, thirty, cut = Conditions(delay_s=0.01), Conditions(delay_s=0.03), Conditions(cut=True)
    assert lab.backend.shapes == [
        ("client-0", ten, ten),
        ("client-0", ten, thirty),
        ("client-1", cut, CLEAR),
        ("client-0", ten, ten),
        ("client-1", CLEAR, CLEAR),
        ("client-0", CLEAR, CLEAR),  # at the end everything is healed
    ]
    assert lab.backend.resets == ["client-0", "client-1", "adversary"]


# -------------------------------------------------------------------- ends that were not planned


def test_a_server_that_dies_of_itself_is_not_started_again(lab: Lab) -> None:
    played = lab.play({"do": "kill", "on": "client-0", "at": "round 1", "for": 0.1}, ps="server_that_dies")
    assert played.status == "failed"
    assert "ps was killed by SIGKILL" in played.message
    check = check_processes(played.ends)
    assert not check.holds
    assert "ps was killed by SIGKILL" in check.found


def test_a_client_that_cannot_begin_ends_the_run_at_once_and_says_why(lab: Lab) -> None:
    played = lab.play(rounds=100_000, client="client_0_crashes")
    assert played.status == "failed"
    assert "client-0 crashed" in played.message
    assert "divided by zero" in played.message


def test_a_run_that_takes_too_long_is_ended(lab: Lab) -> None:
    played = lab.play(rounds=1_000_000, deadline_s=0.5)
    assert (played.status, played.message) == ("failed", "the run: not over in time; it was ended")


def test_a_client_that_does_not_hear_the_end_is_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "HEAR_S", 0.2)
    monkeypatch.setattr(conducting, "TERMINATE_S", 0.2)
    played = lab.play(rounds=3, client="client_that_is_deaf")
    assert played.status == "completed"
    assert check_processes(played.ends).holds


def test_a_signal_ends_everything(lab: Lab) -> None:
    lab.act = lambda event: os.kill(os.getpid(), signal.SIGINT) if event.get("round") == 5 else None
    with pytest.raises(Interrupted, match="SIGINT"):
        lab.play(rounds=1_000_000)


def test_a_network_that_cannot_go_on_ends_everything_and_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RunFailed("the proxy ended with exit code -9")

    monkeypatch.setattr(lab.backend, "shape", fail)
    with pytest.raises(RunFailed, match="exit code -9"):
        lab.play({"do": "partition", "on": "client-0", "at": "round 5"}, rounds=1_000_000)


@pytest.mark.parametrize("name", ["run", "run-seen"])
def test_a_folder_that_is_not_empty_is_refused(lab: Lab, name: str) -> None:
    folder = lab.run_dir.with_name(name)
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(RunFolderExists, match="is not empty"):
        lab.play(rounds=3)


# -------------------------------------------------------------------- the disk


class FakeDisk:
    """A disk whose fullness is a file."""

    size_mb = 1

    def __init__(self, folder: Path, _size_mb: int) -> None:
        folder.mkdir(exist_ok=True)
        self._marker = folder / DISK_IS_FULL

    def fill(self) -> int:
        self._marker.touch()
        return 1_000_000

    def free(self) -> None:
        self._marker.unlink(missing_ok=True)

    def close(self) -> None:
        self.free()


@pytest.mark.parametrize("holds_s", [0.01, 0.6])
def test_a_server_that_could_not_write_goes_on_with_its_clients_when_there_is_room(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, holds_s: float
) -> None:
    for module in (conducting, inflicting):
        monkeypatch.setattr(module, "SmallDisk", FakeDisk)
    if holds_s < 0.1:  # the disk has room again before the server is gone
        lab.act = lambda event: time.sleep(0.2) if "disk_full on ps" in str(event.get("message")) else None
    played = lab.play({"do": "disk_full", "on": "ps", "at": "round 5", "for": holds_s})
    assert played.status == "completed"
    if "ps" in played.restarts:
        assert [end.status for end in played.ends if end.name == "ps"] == ["store_unwritable", "completed"]
        assert [life["resume"] for life in lab.lives if life["name"] == "ps"] == [False, True]
        assert [end.status for end in played.ends if end.name == "client-1"] == ["failed", "completed"]
    else:  # it never tried to write meanwhile
        assert holds_s < 0.1
    assert check_processes(played.ends).holds
    assert played.timeline[0].notes == ["1.0 of 1 MB taken"]

"""The launcher over real processes that only pretend to train: every end is noticed and said, and nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config import Experiment, experiment_from
from common.errors import InsecureRefused, RunFolderExists, StoreDamaged
from deploy import supervisor
from deploy.local import Ending, run_locally

FAKES = {"check": "ready", "ps": "server", "client": "client", "adversary": "client"}


class Onlooker:
    """Remembers what it was shown, and acts on it as a test wants."""

    def __init__(self, act: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.events: list[dict[str, Any]] = []
        self._act = act

    def show(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._act(event)

    def tick(self) -> None:
        pass

    def said(self, kind: str) -> list[str]:
        return [event["message"] for event in self.events if event["event"] == kind]


@pytest.fixture
def experiment() -> Experiment:
    return experiment_from(
        {
            "federation": {"clients": 6, "byzantine": 2, "clients_per_process": 2},
            "training": {"rounds": 3},
            "attack": {"name": "alie"},
            "network": {"leave_deadline_s": 1.0},
        }
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A new run folder, of whose processes none may be left."""
    folder = tmp_path / "run"
    yield folder
    for pid in pids_of(folder):
        assert not alive(pid), f"process {pid} was left behind"


def pids_of(folder: Path) -> list[int]:
    noted = [json.loads(path.read_text()).get("pid") for path in folder.glob("*.json") if path.name != "hashes.json"]
    server = folder / "ps.pid"
    return [pid for pid in noted if pid is not None] + ([int(server.read_text())] if server.exists() else [])


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launch(experiment: Experiment, run_dir: Path, onlooker: Onlooker | None = None, **roles: str) -> Ending:
    entries = {role: f"fake_roles:{name}" for role, name in (FAKES | roles).items()}
    return run_locally(experiment, run_dir, onlooker or Onlooker(), entries=entries)


def end_on(kind: str, run_dir: Path, status: str = "completed") -> Callable[[dict], None]:
    """Ends the run in good order at the first event of a kind."""

    def act(event: dict[str, Any]) -> None:
        if event["event"] == kind:
            (run_dir / "end").write_text(status)

    return act


def end_when_all_take_part(run_dir: Path, peers: int = 3) -> Callable[[dict], None]:
    """Ends the run in good order once each peer has written what it was given."""

    def wait_and_end() -> None:
        wait_for(lambda: len([*run_dir.glob("client-*.json"), *run_dir.glob("adversary.json")]) == peers)
        (run_dir / "end").write_text("completed")

    def act(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            threading.Thread(target=wait_and_end).start()

    return act


def wait_for(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def signal_self(number: int, *delays_s: float) -> Callable[[dict], None]:
    def act(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            for delay_s in delays_s:
                threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()

    return act


# -------------------------------------------------------------------- in good order


def test_every_process_gets_its_own_part(experiment: Experiment, run_dir: Path) -> None:
    ending = launch(experiment, run_dir, Onlooker(end_when_all_take_part(run_dir)))
    assert (ending.status, ending.message) == ("completed", "as the test said")
    given = {path.stem: json.loads(path.read_text()) for path in run_dir.glob("*.json") if "-" in path.stem}
    assert [given[f"client-{k}"]["ids"] for k in (0, 1)] == [[0, 1], [2, 3]]
    adversary = json.loads((run_dir / "adversary.json").read_text())
    assert adversary["ids"] == adversary["tokens"] == [4, 5]
    assert (adversary["address"], adversary["wiretap"]) == ("127.0.0.1:5", "127.0.0.1:6")
    assert json.loads((run_dir / "hashes.json").read_text()) == [0, 1, 2, 3, 4, 5]
    processes = json.loads((run_dir / "operator" / "processes.json").read_text())
    assert processes["client-1"] == {"pid": given["client-1"]["pid"], "ids": [2, 3]}


def test_ctrl_c_of_the_terminal_reaches_no_child(experiment: Experiment, run_dir: Path) -> None:
    launch(experiment, run_dir, Onlooker(end_when_all_take_part(run_dir)))
    blocked = json.loads((run_dir / "client-0.json").read_text())["blocked"]
    assert {signal.SIGINT, signal.SIGHUP} <= set(blocked)
    assert signal.SIGTERM not in blocked


@pytest.mark.parametrize("status", ["quorum_lost", "budget_exhausted"])
def test_the_parameter_servers_status_is_the_runs(experiment: Experiment, run_dir: Path, status: str) -> None:
    assert launch(experiment, run_dir, Onlooker(end_on("listening", run_dir, status))).status == status


def test_a_client_that_does_not_hear_the_end_is_killed(
    experiment: Experiment, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_S", 0.5)
    monkeypatch.setattr(supervisor, "TERMINATE_S", 0.5)
    begun = time.monotonic()
    ending = launch(experiment, run_dir, Onlooker(end_when_all_take_part(run_dir)), client="hangs")
    assert ending.status == "completed"
    assert time.monotonic() - begun < 20


def test_a_child_that_talks_without_end_holds_nobody_up(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker(end_when_all_take_part(run_dir))
    assert launch(experiment, run_dir, onlooker, client="talks_too_much").status == "completed"
    assert onlooker.said("warning")[0].startswith("client-")
    assert len(onlooker.said("warning")) > 500


# -------------------------------------------------------------------- children that end badly


def test_what_the_check_refuses_ends_the_run_before_there_is_one(experiment: Experiment, run_dir: Path) -> None:
    ending = launch(experiment, run_dir, check="refused")
    assert (ending.status, ending.message, ending.summary) == ("attack_refused", "no such attack", None)
    assert not (run_dir / "ps.pid").exists()


def test_the_death_of_the_parameter_server_is_told_with_its_last_words(experiment: Experiment, run_dir: Path) -> None:
    ending = launch(experiment, run_dir, ps="server_that_dies")
    assert ending.status == "failed"
    assert "ps was killed by SIGKILL" in ending.message
    assert "the last words of the parameter server" in ending.message


def test_a_killed_client_is_shown_at_once_and_the_run_goes_on(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker(end_on("warning", run_dir))
    ending = launch(experiment, run_dir, onlooker, client="client_0_is_killed")
    assert ending.status == "completed"
    (warning,) = onlooker.said("warning")
    assert warning.startswith("client-0 was killed by SIGKILL")
    assert "memory is short" in warning
    kinds = [event["event"] for event in onlooker.events]
    assert kinds.index("warning") < kinds.index("end")


def test_a_clients_traceback_is_shown_where_the_user_looks(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker(end_on("warning", run_dir))
    ending = launch(experiment, run_dir, onlooker, client="client_0_crashes")
    assert ending.status == "completed"
    (warning,) = onlooker.said("warning")
    assert warning.startswith("client-0 crashed")
    assert "ZeroDivisionError: client 0 divided by zero" in warning


def test_a_client_that_cannot_do_what_was_asked_ends_the_run_with_its_error(
    experiment: Experiment, run_dir: Path
) -> None:
    ending = launch(experiment, run_dir, adversary="refused")
    assert ending.status == "attack_refused"
    assert ending.message == "adversary: no such attack"
    assert ending.summary is not None
    assert ending.summary["status"] == "attack_refused"
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "attack_refused"


def test_after_the_first_round_it_is_a_warning(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker(end_on("warning", run_dir))
    ending = launch(experiment, run_dir, onlooker, ps="server_in_its_rounds", adversary="refused")
    assert ending.status == "completed"
    assert onlooker.said("warning") == ["adversary: no such attack"]


def test_without_any_client_left_the_run_has_failed(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker()
    ending = launch(experiment, run_dir, onlooker, client="dies")
    assert ending.status == "failed"
    assert "no client process is left" in ending.message
    assert sum("died with exit code 7" in warning for warning in onlooker.said("warning")) == 2


# -------------------------------------------------------------------- being stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_in_good_order(experiment: Experiment, run_dir: Path, number: int) -> None:
    before = signal.getsignal(number)
    ending = launch(experiment, run_dir, Onlooker(signal_self(number, 0.3)))
    assert (ending.status, ending.message) == ("interrupted", "asked to stop")
    assert ending.summary is not None
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_kills(experiment: Experiment, run_dir: Path) -> None:
    onlooker = Onlooker(signal_self(signal.SIGINT, 0.2, 0.6))
    begun = time.monotonic()
    ending = launch(experiment, run_dir, onlooker, ps="server_that_ignores_sigterm", client="hangs")
    assert (ending.status, ending.message) == ("interrupted", "killed by a second Ctrl-C")
    assert time.monotonic() - begun < 15


def test_the_same_ctrl_c_delivered_twice_is_one(experiment: Experiment, run_dir: Path) -> None:
    ending = launch(experiment, run_dir, Onlooker(signal_self(signal.SIGINT, 0.3, 0.31)))
    assert ending.message == "asked to stop"


def test_stopping_during_a_download_ends_the_download_too(experiment: Experiment, run_dir: Path) -> None:
    download = []

    def act(event: dict[str, Any]) -> None:
        if event["event"] == "note" and event["message"].startswith("download"):
            download.append(int(event["message"].split()[1]))
            os.kill(os.getpid(), signal.SIGINT)

    ending = launch(experiment, run_dir, Onlooker(act), check="fetches_for_long")
    assert ending.status == "interrupted"
    assert not alive(download[0])


def test_a_parameter_server_that_does_not_stop_is_killed(
    experiment: Experiment, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "EVALUATE_DEADLINE_S", 0.2)
    ending = launch(experiment, run_dir, Onlooker(signal_self(signal.SIGTERM, 0.3)), ps="server_that_ignores_sigterm")
    assert ending.status == "interrupted"
    assert "was killed" in ending.message


# -------------------------------------------------------------------- the launcher itself


def test_a_defect_of_the_display_leaves_no_process(experiment: Experiment, run_dir: Path) -> None:
    def act(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(experiment, run_dir, Onlooker(act))


LAUNCHER = """
import sys, json
from pathlib import Path
from common.config import experiment_from
from deploy.local import run_locally

class Silent:
    def show(self, event): pass
    def tick(self): pass

if __name__ == "__main__":
    entries = {role: f"fake_roles:{name}" for role, name in json.loads(sys.argv[3]).items()}
    run_locally(experiment_from(json.loads(sys.argv[2])), Path(sys.argv[1]), Silent(), entries=entries)
"""


def test_a_launcher_killed_by_sigkill_takes_its_children_with_it(
    experiment: Experiment, run_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    words = [str(run_dir), json.dumps(experiment.model_dump(mode="json")), json.dumps(FAKES)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "support")}
    with subprocess.Popen([sys.executable, script, *words], env=environment, start_new_session=True) as launcher:
        wait_for(lambda: len(list(run_dir.glob("client-*.json"))) == 2 and (run_dir / "adversary.json").exists())
        time.sleep(0.2)
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 6  # fork server, its tracker, the parameter server, two clients, an adversary
        launcher.kill()
        launcher.wait()
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left
    # The parameter server came to its end in good order.
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"


def test_the_fork_server_has_one_thread_and_no_torchvision(experiment: Experiment, run_dir: Path) -> None:
    from multiprocessing import forkserver

    launch(experiment, run_dir, Onlooker(end_on("listening", run_dir)))
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    assert server.num_threads() == 1
    maps = {region.path for region in server.memory_maps()}
    assert any("libtorch_cpu" in path for path in maps)
    assert any("cygrpc" in path for path in maps)
    assert not any("torchvision" in path for path in maps)


# -------------------------------------------------------------------- before anything is started


def test_a_folder_that_holds_a_run_is_refused(experiment: Experiment, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "run.sqlite").touch()
    with pytest.raises(RunFolderExists, match="--resume"):
        launch(experiment, run_dir)


def test_an_address_beyond_this_machine_is_refused(experiment: Experiment, run_dir: Path) -> None:
    network = experiment.network.model_copy(update={"address": "0.0.0.0:0"})
    with pytest.raises(InsecureRefused):
        launch(experiment.model_copy(update={"network": network}), run_dir)
    assert not run_dir.exists()


def test_a_run_folder_that_cannot_be_made_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreDamaged, match="--run-dir"):
        launch(experiment, tmp_path / "file" / "run")

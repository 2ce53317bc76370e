"""``byzuldp run`` from outside, with real training: it ends with a summary, and however it ends nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ps.summary import OPERATOR_ONLY

SUPPORT = Path(__file__).parent.parent / "support"
DEADLINE_S = 90.0

EXPERIMENT = f"""\
folder = "{SUPPORT}"

[federation]
clients = 10
byzantine = 2
clients_per_process = 3

[training]
rounds = 20
learning_rate = 0.5
batch_size = 8

[evaluation]
every = 5

[privacy]
epsilon = 50.0
delta = 1e-3

[attack]
name = "alie"

[data]
dataset = "tiny_task:blobs"
partition = "iid"

[model]
name = "logistic"
"""

ENDLESS = ["--set", "training.rounds=100000"]


class Command:
    """``byzuldp run`` in a session of its own, like a shell's foreground job."""

    def __init__(self, folder: Path, *words: str, report: bool = False) -> None:
        experiment = folder / "tiny.toml"
        experiment.write_text(EXPERIMENT)
        self.run_dir = folder / "run"
        what = [] if "--resume" in words else [str(experiment)]  # a resumed run knows its own
        what += [] if report else ["--no-report"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "run", *what, "--run-dir", str(self.run_dir), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._family: list[psutil.Process] = []

    def wait_for_rounds(self, at_least: int = 3) -> None:
        """Until some rounds are done; remembers the whole family then."""
        wait_for(lambda: self._ended() or self._rounds() >= at_least)
        assert self.process.poll() is None, self.process.communicate()
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self._family) >= 6

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def _rounds(self) -> int:
        numbers = [int(path.stem.partition("-")[2]) for path in (self.run_dir / "models").glob("model-*.safetensors")]
        return max(numbers, default=-1)

    def pid_of(self, name: str) -> int:
        return int(json.loads((self.run_dir / "operator" / "processes.json").read_text())[name]["pid"])

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error; nothing of the family may be left."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        _, left = psutil.wait_procs(self._family, timeout=10)
        assert not left, left
        return self.process.returncode, out, err

    def clean_up(self) -> None:
        for process in [*self._family, self.process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait(DEADLINE_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def wait_for(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def begin(*words: str, report: bool = False) -> Command:
        started.append(Command(tmp_path, *words, report=report))
        return started[-1]

    yield begin
    for command in started:
        command.clean_up()


def test_a_run_ends_with_its_summary_its_model_and_its_lines(start: Callable[..., Command]) -> None:
    command = start("--json", report=True)
    code, out, err = command.end()
    assert code == 0, err
    report = command.run_dir / "report.html"
    assert err.endswith(f"report: {report}\n")
    assert "all 20 rounds are done" in report.read_text()
    assert report.stat().st_mode & 0o777 == 0o600
    summary: dict[str, Any] = json.loads(out)
    assert summary == json.loads((command.run_dir / "summary.json").read_text())
    assert (command.run_dir / "summary.json").stat().st_mode & 0o777 == 0o600  # counts of what private data did
    public = json.loads((command.run_dir / "public/summary.json").read_text())
    assert set(summary) - set(public) == set(OPERATOR_ONLY)
    assert (command.run_dir / "public/model.safetensors").stat().st_mode & 0o044 == 0o044
    assert (summary["status"], summary["rounds"], summary["private"]) == ("completed", 20, True)
    assert summary["epsilon"] == 50
    assert 0 < summary["startup_s"] < summary["seconds"]
    assert summary["round_latency_s"]["p50"] > 0
    assert Path(summary["model_file"]).is_file()
    assert "round 20/20" in err
    assert "completed" in err
    assert "\x1b" not in err


def test_ctrl_c_ends_in_good_order_leaves_no_process_and_the_run_can_go_on(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS)
    command.wait_for_rounds()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    code, out, err = command.end()
    assert code == 22, err
    assert "Traceback" not in err
    assert "interrupted" in out
    assert "--resume" in err
    done = json.loads((command.run_dir / "summary.json").read_text())["rounds"]
    again = start("--resume")
    wait_for(lambda: again._ended() or again._rounds() > done)
    again.wait_for_rounds(done + 1)
    again.process.send_signal(signal.SIGTERM)  # this time to the launcher alone
    code, out, err = again.end()
    assert code == 22, err
    assert f"resuming from round {done}" in err
    assert json.loads((command.run_dir / "summary.json").read_text())["rounds"] > done


@pytest.mark.system  # for the time it takes
def test_an_interrupted_run_has_a_report_too(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS, report=True)
    command.wait_for_rounds()
    command.process.send_signal(signal.SIGTERM)
    code, out, err = command.end()
    assert code == 22, err
    assert out.endswith(f"report: {command.run_dir / 'report.html'}\n")
    assert "interrupted" in (command.run_dir / "report.html").read_text()


@pytest.mark.system  # for the time it takes
def test_a_launcher_killed_by_sigkill_leaves_nothing(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS)
    command.wait_for_rounds()
    command.process.kill()
    code, _, _ = command.end()
    assert code == -signal.SIGKILL


@pytest.mark.system  # for the time it takes
def test_a_killed_client_is_shown_and_missed_and_the_run_completes(start: Callable[..., Command]) -> None:
    command = start("--set", "training.rounds=150", "--set", "federation.quorum=6")
    command.wait_for_rounds()
    os.kill(command.pid_of("client-2"), signal.SIGKILL)
    code, _, err = command.end()
    assert code == 0, err
    assert "client-2 was killed by SIGKILL" in err
    assert "missing 6, 7" in err


@pytest.mark.system  # for the time it takes
def test_a_killed_parameter_server_is_a_failed_run(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS)
    command.wait_for_rounds()
    os.kill(command.pid_of("ps"), signal.SIGKILL)
    code, _, err = command.end()
    assert code == 23
    assert "ps was killed by SIGKILL" in err


def test_what_cannot_be_run_is_refused_before_there_is_a_run(start: Callable[..., Command]) -> None:
    command = start("--set", "aggregation.rule=trimmed_meen")
    code, out, err = command.end()
    assert code == 13, err
    assert "trimmed_mean" in err
    assert not out
    assert not (command.run_dir / "run.sqlite").exists()

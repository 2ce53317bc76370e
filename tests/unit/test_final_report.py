"""The report at a run's end: it is there, or one line says why not, and the run has ended as it has either way."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import report_writers
from typer.testing import CliRunner

from deploy import cli, final_report
from deploy.final_report import report_at_end
from deploy.local import Ending


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder that looks as if there were a run in it."""
    (tmp_path / "run.sqlite").touch()
    return tmp_path


def test_where_there_is_no_run_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_report, "child_context", lambda *_: pytest.fail("a process was started"))
    assert report_at_end(tmp_path / "none") == (None, "")


def test_a_report_that_was_written_is_named(run_dir: Path) -> None:
    assert report_at_end(run_dir, start_method="spawn", body=report_writers.writes) == (run_dir / "report.html", "")


@pytest.mark.parametrize(
    ("body", "problem"), [(report_writers.fails, "the disk is full"), (report_writers.dies, "its process died")]
)
def test_what_went_wrong_is_one_line(run_dir: Path, body: Callable[..., None], problem: str) -> None:
    path, said = report_at_end(run_dir, start_method="spawn", body=body)
    assert path is None
    assert said.startswith(problem)
    assert "\n" not in said


def test_one_that_takes_too_long_is_given_up_and_its_process_is_gone(run_dir: Path) -> None:
    before = set(multiprocessing.active_children())  # servers that many tests share
    assert report_at_end(run_dir, start_method="spawn", body=report_writers.hangs, deadline_s=1.0) == (
        None,
        "it took too long",
    )
    assert set(multiprocessing.active_children()) <= before


class Answer:
    """What would be sent to the launcher."""

    def __init__(self) -> None:
        self.said = b""

    def send_bytes(self, data: bytes) -> None:
        self.said = data


@pytest.mark.parametrize(
    ("problem", "said"),
    [(OSError("no space\nleft"), b"\nno space left"), (MemoryError(), b"\nMemoryError")],
)
def test_whatever_is_raised_while_it_is_written_is_told_in_a_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, said: bytes
) -> None:
    def reader(_folder: Path) -> None:
        raise problem

    monkeypatch.setattr("ps.reader.RunReader", reader)
    monkeypatch.setattr(final_report, "_redirect_output", lambda _path: None)
    monkeypatch.setattr("signal.setitimer", lambda *_: None)
    answer = Answer()
    final_report._write(run_dir, 1.0, answer)  # type: ignore[arg-type]
    assert answer.said == said


# -------------------------------------------------------------------- what the command does with it


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """A run that ends as asked for, and a report that turns out as asked for: exit code, output, error output."""
    path = tmp_path / "tiny.toml"
    path.write_text("[federation]\nclients = 7\nbyzantine = 2\n\n[training]\nrounds = 2\n")

    def run(*words: str, status: str = "completed", report: object) -> tuple[int, str, str]:
        def at_end(run_dir: Path, *, start_method: str) -> object:
            assert start_method == "forkserver"
            if isinstance(report, BaseException):
                raise report
            return report

        monkeypatch.setattr(final_report, "report_at_end", at_end)
        summary = {"status": status}
        monkeypatch.setattr("deploy.local.run_locally", lambda *_, **__: Ending(status, "so", tmp_path, summary))
        result = CliRunner().invoke(cli.app, ["run", str(path), *words])
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.mark.parametrize(
    ("status", "code"), [("completed", 0), ("quorum_lost", 21), ("interrupted", 22), ("budget_exhausted", 20)]
)
def test_the_path_is_the_last_line_whatever_the_ending(
    ended: Callable[..., tuple[int, str, str]], status: str, code: int
) -> None:
    found, out, _ = ended(status=status, report=(Path("x/report.html"), ""))
    assert found == code
    assert out.endswith("report: x/report.html\n")


@pytest.mark.parametrize("status", ["completed", "interrupted"])
@pytest.mark.parametrize("report", [(None, "the disk is full"), KeyboardInterrupt()])
def test_a_problem_with_the_report_is_one_warning_and_changes_nothing_else(
    ended: Callable[..., tuple[int, str, str]], status: str, report: object
) -> None:
    usual = ended("--no-report", status=status, report=None)
    code, out, err = ended(status=status, report=report)
    assert (code, out) == usual[:2]
    (warning,) = err.removeprefix(usual[2]).splitlines()
    assert warning.startswith("warning: no report was written")
    assert "byzuldp report" in warning


def test_standard_output_is_json_alone_and_quiet_is_quiet(ended: Callable[..., tuple[int, str, str]]) -> None:
    report = (Path("x/report.html"), "")
    _, out, err = ended("--json", report=report)
    assert out == '{\n  "status": "completed"\n}\n'
    assert err.endswith("report: x/report.html\n")
    assert "report" not in "".join(map(str, ended("--quiet", report=report)))


def test_no_report_is_written_if_none_is_wanted(ended: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = ended("--no-report", report=AssertionError("it was asked for"))
    assert code == 0
    assert "report" not in out + err

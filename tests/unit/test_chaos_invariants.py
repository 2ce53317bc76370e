"""The invariants can be broken, each in every way, and say so; a verdict is only as good as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from common.errors import ConfigError, RunFailed
from deploy.chaos import command, gauntlet, play
from deploy.chaos.conductor import End
from deploy.chaos.faults import Partition
from deploy.chaos.invariants import Check, check_accuracy, check_ending, check_faults, check_models, check_processes
from deploy.chaos.recorder import Recorder, Sighting, recorded, recording_file
from deploy.chaos.report import render_verdict
from deploy.chaos.scenario import ready_scenarios
from deploy.chaos.tabulate import table
from deploy.chaos.timeline import Timeline
from deploy.chaos.verdict import FILE, Run, Verdict, run_of_earlier

HEADS = ["h0", "h1", "h2", "h3"]


def seen(*rounds: int, **changes: str) -> list[Sighting]:
    return [Sighting(r, changes.get(f"model_{r}", f"m{r}"), changes.get(f"head_{r}", f"h{r}")) for r in rounds]


# -------------------------------------------------------------------- models


def test_one_model_a_round_each_in_the_ledger_holds() -> None:
    told = {"client-0": seen(0, 1, 1, 2), "client-1": seen(0, 2, 3)}  # a model may come again, and be missed
    check = check_models(told, HEADS, {3: "m3", 9: "m9"})
    assert check.holds, check.found
    assert check.found == "7 sightings of 4 models by 2 clients: one a round"


@pytest.mark.parametrize(
    ("told", "kept", "complaint"),
    [
        ({"a": seen(0, 1), "b": seen(0, 1, model_1="other")}, {}, "round 1 was published twice: a and b"),
        ({"a": [*seen(0, 1), *seen(1, model_1="other")]}, {}, "round 1 was published twice: a and a"),
        ({"a": seen(0, 1, head_1="other")}, {}, "a was sent a model of round 1 with another ledger's head"),
        ({"a": seen(3, 4)}, {}, "a model of round 4, which is not in the ledger"),
        ({"a": seen(2, 1)}, {}, "a was sent round 1 after round 2"),
        ({"a": seen(2)}, {2: "other"}, "the model of round 2 in the run folder is not the one that was sent"),
        ({"a": []}, {}, "no client recorded any model"),
        ({}, {0: "m0"}, "no client recorded any model"),
    ],
)
def test_a_model_published_twice_or_unaccounted_is_found(
    told: dict[str, list[Sighting]], kept: dict[int, str], complaint: str
) -> None:
    check = check_models(told, HEADS, kept)
    assert not check.holds
    assert complaint in check.found


def test_a_recording_survives_its_process_but_for_an_unfinished_line(tmp_path: Path) -> None:
    import numpy as np

    run_dir = tmp_path / "run"
    for _ in range(2):  # two lives
        with Recorder(recording_file(run_dir, "client-0")) as recorder:
            recorder(3, np.arange(4, dtype=np.float32), b"\x01\x02")
    file = recording_file(run_dir, "client-0")
    assert not file.is_relative_to(run_dir)  # the run folder's disk may be full
    with file.open("a") as torn:
        torn.write('{"round_id": 4')
    first, second = recorded(run_dir)["client-0"]
    assert first == second
    assert (first.round_id, first.head) == (3, "0102")


# -------------------------------------------------------------------- the others


def end(how: str, status: str | None = None, *, by_lab: bool = False, name: str = "client-0") -> End:
    return End(name, how, status, by_lab, f"{name} {how}")


@pytest.mark.parametrize(
    "fair",
    [
        end("died", by_lab=True),
        end("done", "completed"),
        end("failed", "server_unreachable"),
        end("failed", "store_unwritable", name="ps"),
        end("failed", "interrupted", by_lab=True),
    ],
)
def test_an_end_by_the_lab_or_by_giving_up_is_fair(fair: End) -> None:
    assert check_processes([fair]).holds


@pytest.mark.parametrize(
    "unfair",
    [
        end("died"),
        end("crashed"),
        end("crashed", name="ps"),
        end("failed", "ledger_rolled_back"),
        end("failed", "join_refused"),
    ],
)
def test_any_other_end_is_held_against_the_run(unfair: End) -> None:
    check = check_processes([end("done", "completed"), unfair])
    assert not check.holds
    assert unfair.description in check.found


def test_a_run_that_its_faults_did_not_reach_has_not_passed() -> None:
    timeline = Timeline([Partition.model_validate({"do": "partition", "on": "ps", "at": ["round 1", "round 9"]})])
    timeline.due(0.0, 3)
    check = check_faults(timeline.occurrences)
    assert not check.holds
    assert "partition at round 9" in check.found
    timeline.due(0.0, 9)
    assert check_faults(timeline.occurrences).holds


def test_an_ending_that_was_not_expected_is_none() -> None:
    assert check_ending("quorum_lost", "gone", ["completed", "quorum_lost"]).holds
    assert not check_ending("failed", "no", ["completed"]).holds


def test_accuracy_may_lie_so_far_below_and_no_farther() -> None:
    assert check_accuracy(0.90, 0.95, 0.05).holds
    assert check_accuracy(0.99, 0.95, 0.0).holds
    assert not check_accuracy(0.899, 0.95, 0.05).holds
    assert not check_accuracy(None, 0.95, 1.0).holds
    assert not check_accuracy(float("nan"), 0.95, 1.0).holds


# -------------------------------------------------------------------- the verdict


RUN = Run("completed", "fine", "/x", 3.0, 24, 24, 0.95, 0.05, 0.06, 0.1, 0, 0, {})


def verdict(*checks: Check, **changes: Any) -> Verdict:
    timeline = [
        {"do": "kill", "on": ["ps"], "detail": "", "at": "round 2", "for": "1 s", "began_s": 0.5, "began_round": 2}
        | {"ended_s": None, "ended_round": None, "notes": ["a [note]"]}
    ]
    values = {
        "scenario": "tiny",
        "about": "A tiny one.",
        "quick": True,
        "fingerprint": "ab" * 32,
        "backend": "proxy",
        "passed_over": {"netns": "needs root"},
        "facts": {"congestion control": "cubic"},
        "left_out": ("loss",),
        "accuracy_within": 0.05,
        "undisturbed": RUN,
        "disturbed": Run("completed", "fine", "/y", 9.0, 24, 22, 0.94, 0.06, 1.25, 2.0, 3, 5, {"ps": 3}),
        "checks": checks,
        "timeline": tuple(timeline),
    }
    return Verdict(**values | changes)


GOOD, BAD = Check("ledger", True, "whole"), Check("models", False, "round 1 was published twice")


def test_one_broken_invariant_is_enough() -> None:
    assert verdict(GOOD).passed
    assert not verdict(GOOD, BAD).passed
    assert verdict(GOOD, BAD).as_json()["verdict"] == "fail"


def test_a_verdict_shows_what_it_rests_on() -> None:
    from rich.console import Console

    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_verdict(verdict(GOOD, BAD)))
    console.file.close()
    text = console.export_text()
    for said in ("tiny: fail", "broken", "published twice", "needs root", "cubic", "loss", "22 of 24", "3 begun again"):
        assert said in text
    assert "a [note]" in text


def test_a_verdict_becomes_a_row_of_the_table(tmp_path: Path) -> None:
    verdict(GOOD).write(tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    stored = json.loads((tmp_path / FILE).read_text())
    header, line, row = table([stored]).splitlines()
    assert len(header.split("|")) == len(line.split("|")) == len(row.split("|"))
    assert row.startswith("| tiny (quick) | proxy, without loss | pass | 22 | 2 | 3 | 5 | 60 ms | 50 ms | 1250 ms |")


def test_an_earlier_undisturbed_run_stands_for_one_of_the_same_experiment(tmp_path: Path) -> None:
    verdict(GOOD).write(tmp_path)
    assert run_of_earlier(tmp_path, "ab" * 32, "proxy") == RUN
    with pytest.raises(ConfigError, match="its experiment is another one"):
        run_of_earlier(tmp_path, "cd" * 32, "proxy")
    with pytest.raises(ConfigError, match="it went over the backend proxy, here it is netns"):
        run_of_earlier(tmp_path, "ab" * 32, "netns")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_of_earlier(tmp_path / "nowhere", "ab" * 32, "proxy")


@pytest.fixture
def chaos() -> typer.Typer:
    app = typer.Typer()
    app.command()(command.chaos)
    return app


@pytest.mark.parametrize("passes", [True, False])
def test_the_exit_code_is_zero_only_if_all_holds(
    chaos: typer.Typer, monkeypatch: pytest.MonkeyPatch, passes: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(play, "play", lambda *_, **__: verdict(GOOD, *([] if passes else [BAD])))
    words = ["split", "--quick", "--json", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(chaos, words)
    assert json.loads(result.stdout)["verdict"] == ("pass" if passes else "fail")
    if passes:
        assert result.exit_code == 0
    else:
        assert isinstance(result.exception, RunFailed)  # the console script makes its exit code of it
        assert result.exception.exit_code != 0
        assert "models: round 1 was published twice" in str(result.exception)


@pytest.mark.parametrize("failing", ["", "split"])
def test_the_gauntlet_plays_every_ready_scenario_where_it_can_and_makes_a_table(
    chaos: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    compared = []

    def played(loaded: Any, _plan: Any, choice: Any, folder: Path, _shown: Any, *, undisturbed: Run | None) -> Verdict:
        compared.append(undisturbed)
        found = replace(
            verdict(GOOD, *([BAD] if loaded.name == failing else [])),
            scenario=loaded.name,
            backend=choice.backend.name,
            fingerprint=loaded.experiment.fingerprint(),
        )
        folder.mkdir(parents=True)
        found.write(folder)
        return found

    monkeypatch.setattr(gauntlet, "play", played)
    words = ["--all", "--quick", "--backend", "proxy", "--run-dir", str(tmp_path / "all")]
    result = CliRunner().invoke(chaos, words)
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ") and "| proxy" in line]
    assert len(rows) == len(ready_scenarios()) - 2  # those that need loss are named instead
    assert "wan on proxy: this scenario cannot run on the backend proxy: cannot do loss" in result.stderr
    assert (tmp_path / "all" / "table.md").read_text() in result.stdout
    assert compared[0] is None
    assert RUN in compared  # the undisturbed run of one stands for that of the next
    assert (result.exit_code == 0) is (not failing)
    if failing:
        assert "split on proxy: failed" in str(result.exception)


def test_without_a_scenario_the_ready_ones_are_listed(chaos: typer.Typer) -> None:
    result = CliRunner().invoke(chaos, [], catch_exceptions=False)
    assert "ps_killed        The parameter server is killed three times" in result.stdout


def test_a_dry_run_says_what_would_be_done(chaos: typer.Typer) -> None:
    result = CliRunner().invoke(
        chaos, ["everything", "--dry-run", "--backend", "proxy", "--leave-out", "loss"], catch_exceptions=False
    )
    assert result.stdout.startswith("backend proxy\nprocesses ps, client-0, ")
    assert "left out: loss" in result.stdout
    assert "  round 40  partition on half, for 30 s" in result.stdout
    told = CliRunner().invoke(chaos, ["split", "--dry-run", "--backend", "proxy", "--json"], catch_exceptions=False)
    assert [item["do"] for item in json.loads(told.stdout)["timeline"]] == ["partition"]


def test_a_fault_that_no_backend_here_can_do_is_refused(chaos: typer.Typer) -> None:
    result = CliRunner().invoke(chaos, ["wan", "--dry-run", "--backend", "proxy"])
    assert isinstance(result.exception, ConfigError)
    assert "proxy: cannot do loss" in str(result.exception)

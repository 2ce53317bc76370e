"""Sweeps: which runs a file asks for, what is remembered of them, and what is said of the results."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.config import load_experiment
from common.errors import ConfigError, RunFolderInUse, StoreDamaged
from common.privacy.calibration import calibrate
from common.privacy.conversions import epsilon_of
from deploy.sweep.backends import InThisProcess
from deploy.sweep.conduct import Sweep
from deploy.sweep.job import Job, run_job
from deploy.sweep.log import Recorder, recorded
from deploy.sweep.plan import Plan, load_plan, ready_sweeps
from deploy.sweep.points import Point, key_of
from deploy.sweep.results import ERROR, MEASURES, Row
from deploy.sweep.selection import best_of, summary_text
from deploy.sweep.slurm import array_of, slurm_script
from deploy.sweep.spending import spent_on
from deploy.sweep.table import columns_of, read_table, records_of, write_csv, write_parquet

BASE = """\
folder = "{support}"
[federation]
clients = 5
byzantine = 1
[training]
rounds = 2
batch_size = 4
[evaluation]
every = 1
[data]
dataset = "tiny_task:blobs"
partition = "iid"
[model]
name = "logistic"
"""
GRID = """\
experiment = "base.toml"
[grid]
"aggregation.rule" = ["mean", "median"]
"training.learning_rate" = [0.1, 1.0]
"training.seed" = [0, 1]
"""


@pytest.fixture
def plan_of(tmp_path: Path) -> Any:
    support = Path(__file__).resolve().parent.parent / "support"
    (tmp_path / "base.toml").write_text(BASE.format(support=support))

    def made(text: str, *overrides: str) -> Plan:
        (tmp_path / "small.toml").write_text(text)
        return load_plan(tmp_path / "small.toml", overrides)

    return made


# --- what a file asks for


def test_every_combination_is_a_run_the_last_key_varying_fastest(plan_of) -> None:
    plan = plan_of(GRID + '[[zip]]\n"training.client_momentum" = [0.0, 0.5]\n"training.server_momentum" = [0.9, 0.1]\n')
    assert plan.keys[0] == "aggregation.rule"
    assert len(plan.points) == 16
    assert [point.index for point in plan.points] == list(range(16))
    first, second = plan.points[:2]
    assert (first.values["training.client_momentum"], first.values["training.server_momentum"]) == (0.0, 0.9)
    assert (second.values["training.client_momentum"], second.values["training.server_momentum"]) == (0.5, 0.1)
    assert second.experiment.training.server_momentum == 0.1
    assert {p.values["training.client_momentum"] + p.values["training.server_momentum"] for p in plan.points} == {
        0.9,
        0.6,
    }


def test_a_whole_section_can_vary_and_a_key_can_be_written_without_quotes(plan_of) -> None:
    plan = plan_of(
        'experiment = "base.toml"\n[set]\ntraining.rounds = 7\n[grid]\ntraining.seed = [0, 1]\n'
        'attack = [{ name = "none" }, { name = "alie", knowledge = "omniscient" }]\n'
    )
    assert [point.experiment.attack.name for point in plan.points] == ["none", "alie", "none", "alie"]
    assert {point.experiment.training.rounds for point in plan.points} == {7}
    assert plan.points[1].experiment.attack.knowledge == "omniscient"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[grid]\n"training.seed" = [0]', "experiment is missing"),
        ('experiment = "base.toml"', "nothing varies"),
        ('experiment = "base.toml"\n[grid]\n"training.seed" = []', r"training.seed = \[\].*at least one"),
        ('experiment = "base.toml"\n[grid]\n"training.seed" = 3', r"training.seed = 3: expected a list.*\[set\]"),
        ('experiment = "base.toml"\n[grid]\n"training.seed" = [1, 2, 1]', "training.seed lists 1 twice: leave one"),
        ('experiment = "base.toml"\n[gird]\n"training.seed" = [1]', "gird: unknown key; did you mean 'grid'"),
        ('experiment = "base.toml"\n[grid]\n"training.sed" = [1]', "training.sed: unknown key; did you mean 'seed'"),
        ('experiment = "base.toml"\n[grid]\n"training.rounds" = [5, -1]', "run 1 .*training.rounds = -1"),
        (
            'experiment = "base.toml"\n[set]\n"training.seed" = 1\n[grid]\n"training.seed" = [1]',
            r"training.seed is in \[set\] and varies",
        ),
        (
            GRID + '[[zip]]\n"training.rounds" = [1]\n"training.seed" = [2]',
            "training.seed varies in two places",
        ),
        (
            'experiment = "base.toml"\n[[zip]]\n"training.rounds" = [1, 2]\n"training.seed" = [1]',
            "all of one length; training.rounds has 2, training.seed has 1",
        ),
        ('experiment = "base.toml"\n[[zip]]\n"training.rounds" = [1, 2]', "two lists or more"),
        (
            'experiment = "base.toml"\n[grid]\n"attack" = [{name = "alie"}]\n"attack.name" = ["ipm"]',
            "attack is a whole section",
        ),
        (
            'experiment = "base.toml"\n[grid]\n"client.persist_every" = [1, 2]',
            "runs 0 .* and 1 .* are the same experiment",
        ),
        (GRID + '[select]\nby = "accuracy_last"', "select.over is missing"),
        (GRID + '[select]\nover = ["training.learning_rat"]', "does not vary; did you mean 'training.learning_rate'"),
        (GRID + '[select]\nover = ["training.seed"]', "averaged over"),
        (GRID + '[select]\nover = ["training.learning_rate"]\nby = "acuracy_last"', "did you mean 'accuracy_last'"),
        (GRID + '[plot]\nz = "training.learning_rate"', "plot.z: unknown key"),
        (GRID + '[plot]\nx = "training.rounds"', "plot.x: 'training.rounds' does not vary"),
        ('experiment = "nowhere.toml"\n[grid]\n"training.seed" = [1]', "no experiment 'nowhere.toml'"),
        ("experiment = ", "not valid TOML"),
    ],
)
def test_a_mistake_is_told_with_key_value_and_remedy(plan_of, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_of(text)


def test_what_is_set_for_every_run_can_be_set_from_outside_but_not_what_varies(plan_of) -> None:
    assert plan_of(GRID, "training.rounds=9").points[0].experiment.training.rounds == 9
    with pytest.raises(ConfigError, match=r"training\.seed varies"):
        plan_of(GRID, "training.seed=9")


def test_a_key_is_the_effective_configuration_and_nothing_of_the_machine() -> None:
    base = load_experiment("mnist_no_dp")
    assert key_of(base) == key_of(load_experiment("mnist_no_dp", ["training.rounds=800"]))  # as it is by default
    for same in ("network.rpc_deadline_s=7", "data.root=/elsewhere", "client.persist_every=3"):
        assert key_of(load_experiment("mnist_no_dp", [same])) == key_of(base)
    for other in ("training.seed=9", "attack.name=ipm", "privacy.epsilon=3", "model.l2=0.1", "evaluation.every=3"):
        assert key_of(load_experiment("mnist_no_dp", [other])) != key_of(base)


def test_the_ready_sweeps_are_whole() -> None:
    assert len(ready_sweeps()) >= 3
    for name in ready_sweeps():
        plan = load_plan(name)
        assert 0 < len(plan.points) <= 1000
        assert plan.source.read_text().startswith("# ")


# --- what is remembered


def row(key: str = "k", status: str = "completed", **given: Any) -> Row:
    return Row(key, {"training.seed": 1}, status, {"final_accuracy": 0.5, "rounds": 2}, **given)


def test_a_log_gives_back_what_was_written_and_counts_attempts(tmp_path: Path) -> None:
    with Recorder(tmp_path, "sweep") as recorder:
        recorder.begun("k")
        recorder.begun("k")
        recorder.ended(row())
        recorder.begun("never ended")
    found = recorded(tmp_path)
    assert found.row("k") == row(attempts=2)
    assert found.row("never ended") is None
    assert found.begun["never ended"] == 1


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_that_was_cut_short_is_no_line_and_the_next_one_is_whole(tmp_path: Path, cut: int) -> None:
    with Recorder(tmp_path, "sweep") as recorder:
        recorder.ended(row("whole"))
        recorder.ended(row("torn"))
    path = tmp_path / "log/sweep.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(recorded(tmp_path).rows) == {"whole"}
    with Recorder(tmp_path, "sweep") as recorder:
        recorder.ended(row("later"))
    assert set(recorded(tmp_path).rows) == {"whole", "later"}


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    with Recorder(tmp_path, "sweep") as recorder:
        recorder.ended(row())
    with (tmp_path / "log/sweep.jsonl").open("a") as file:
        file.write("{]\n")
    with pytest.raises(StoreDamaged, match=r"sweep\.jsonl, line 2.*delete the line"):
        recorded(tmp_path)


def test_a_failure_does_not_hide_a_result(tmp_path: Path) -> None:
    for name, kept in (("a", row()), ("b", row(status=ERROR))):
        with Recorder(tmp_path, name) as recorder:
            recorder.ended(kept)
    assert recorded(tmp_path).rows["k"].status == "completed"


def test_one_sweep_at_a_time_is_at_work_in_a_folder(tmp_path: Path) -> None:
    with Recorder(tmp_path, "sweep"), pytest.raises(RunFolderInUse, match="another sweep"):
        Recorder(tmp_path, "sweep")


def test_a_table_gives_back_its_rows(plan_of, tmp_path: Path) -> None:
    plan = plan_of(GRID)
    rows = {
        point.key: Row(
            point.key,
            dict(point.values),
            ERROR if point.index == 1 else "completed",
            {} if point.index == 1 else {"final_accuracy": 0.1 * point.index, "private": False, "calibration": "exact"},
            error='it said "no",\nand ended' if point.index == 1 else "",
            exit_code=13 if point.index == 1 else 0,
            attempts=point.index + 1,
            seconds=1.5,
        )
        for point in plan.points[:5]
    }
    write_csv(tmp_path / "table.csv", records_of(plan.points, rows), columns_of(plan.keys))
    again = read_table(tmp_path / "table.csv")
    assert list(again) == [point.key for point in plan.points[:5]]
    for key, written in rows.items():
        assert again[key].values == written.values
        assert {name: value for name, value in again[key].results.items() if value is not None} == written.results
        assert (again[key].status, again[key].error, again[key].attempts) == (
            written.status,
            written.error,
            written.attempts,
        )


def test_another_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StoreDamaged, match=r"not a table of a sweep \(no column"):
        read_table(tmp_path / "table.csv")


def test_parquet_has_the_same_values(plan_of, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'byzuldp[sweep]'")
    plan = plan_of(GRID)
    rows = {point.key: row(point.key) for point in plan.points}
    records, columns = records_of(plan.points, rows), columns_of(plan.keys)
    assert write_parquet(tmp_path / "table.parquet", records, columns)
    table = parquet.read_table(tmp_path / "table.parquet")
    assert table.column_names == columns
    assert table.column("training.learning_rate").to_pylist() == [
        record["training.learning_rate"] for record in records
    ]
    assert table.column("final_accuracy").to_pylist() == [0.5] * 8


# --- running


def sweep_of(plan: Plan, out: Path, said: list[str] | None = None) -> Sweep:
    return Sweep(plan, out, (said if said is not None else []).append)


class Counting(InThisProcess):
    """Notes what it runs."""

    def __init__(self, stop_after: int = 1_000) -> None:
        self.ran: list[str] = []
        self._stop_after = stop_after

    def rows(self, jobs, begun):
        for job in jobs:
            if len(self.ran) == self._stop_after:
                raise KeyboardInterrupt
            begun(job)
            self.ran.append(job.key)
            yield run_job(job)


def without_times(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [
            {k: v for k, v in record.items() if k not in ("seconds", "attempts")} for record in csv.DictReader(file)
        ]


def test_a_sweep_that_was_stopped_goes_on_and_nothing_is_run_twice(plan_of, tmp_path: Path) -> None:
    plan = plan_of(GRID)
    sweep_of(plan, tmp_path / "whole").run(InThisProcess())
    first, second, said = Counting(3), Counting(), []
    with pytest.raises(KeyboardInterrupt):
        sweep_of(plan, tmp_path / "out").run(first)
    assert len(without_times(tmp_path / "out/table.csv")) == 3
    sweep_of(plan, tmp_path / "out", said).run(second)
    assert sorted(first.ran + second.ran) == sorted(point.key for point in plan.points)
    assert without_times(tmp_path / "out/table.csv") == without_times(tmp_path / "whole/table.csv")
    assert said[0] == "8 runs, 3 of them done; 1 at a time"
    assert any("left" in line for line in said)
    third = Counting()
    sweep_of(plan, tmp_path / "out").run(third)
    assert third.ran == []


@pytest.mark.system  # for the time it takes
def test_the_table_alone_is_enough_to_go_on_from(plan_of, tmp_path: Path) -> None:
    plan = plan_of(GRID)
    with pytest.raises(KeyboardInterrupt):
        sweep_of(plan, tmp_path / "out").run(Counting(5))
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed/table.csv").write_bytes((tmp_path / "out/table.csv").read_bytes())
    rest = Counting()
    sweep_of(plan, tmp_path / "committed").run(rest)
    assert len(rest.ran) == 3
    assert len(without_times(tmp_path / "committed/table.csv")) == 8


@pytest.mark.system  # for the time it takes
def test_a_changed_grid_keeps_what_it_still_asks_for_and_forgets_nothing(plan_of, tmp_path: Path) -> None:
    sweep_of(plan_of(GRID), tmp_path / "out").run(InThisProcess())
    (tmp_path / "out/log/sweep.jsonl").unlink()  # only the table was kept
    smaller, backend = plan_of(GRID.replace("[0.1, 1.0]", "[0.1, 2.0]")), Counting()
    sweep_of(smaller, tmp_path / "out").run(backend)
    assert len(backend.ran) == 4
    back = Counting()
    sweep_of(plan_of(GRID), tmp_path / "out").run(back)
    assert back.ran == []


def test_a_failure_is_reported_with_its_code_and_retried_when_asked(plan_of, tmp_path: Path) -> None:
    plan, said = plan_of(GRID.replace('"median"', '"krum"'), "federation.clients=4", "federation.byzantine=1"), []
    sweep = sweep_of(plan, tmp_path / "out", said)
    rows = sweep.run(InThisProcess())
    failures = sweep.failures(rows)
    assert [point.values["aggregation.rule"] for point, _ in failures] == ["krum"] * 4
    assert {failed.exit_code for _, failed in failures} == {13}
    assert all("krum" in failed.error for _, failed in failures)
    text = (tmp_path / "out/summary.md").read_text()
    assert "## Runs without a result" in text
    assert "| 13 |" in text
    again, once_more = Counting(), Counting()
    sweep.run(again)
    assert again.ran == []
    sweep.run(once_more, retry_failed=True)
    assert len(once_more.ran) == 4


@pytest.mark.system  # for the time it takes
def test_a_defect_in_a_users_module_is_a_row_and_the_others_go_on(plan_of, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def data(root):\n    raise ZeroDivisionError('oh')\n")
    plan = plan_of('experiment = "base.toml"\n[grid]\n"data.dataset" = ["broken:data", "tiny_task:blobs"]\n')
    job = sweep_of(plan, tmp_path / "out").job(plan.points[0])
    tree = dict(job.experiment) | {"folder": str(tmp_path)}
    failed = run_job(Job(job.key, job.values, tree, job.run_dir))
    assert failed.status == ERROR
    assert "ZeroDivisionError" in failed.error


@pytest.mark.system  # for the time it takes
def test_one_of_the_grid_is_run_by_its_index_and_the_tables_are_made_of_all(plan_of, tmp_path: Path) -> None:
    plan = plan_of(GRID)
    sweep = sweep_of(plan, tmp_path / "out")
    assert sweep.run_one(5, InThisProcess()).key == plan.points[5].key
    assert sweep.run_one(2, InThisProcess()).status == "completed"
    again = Counting()
    sweep.run_one(2, again)
    assert again.ran == []
    rows, _ = sweep.outcomes()
    sweep.write(rows)
    assert [record["key"] for record in without_times(tmp_path / "out/table.csv")] == [
        plan.points[i].key for i in (2, 5)
    ]
    with pytest.raises(ConfigError, match=r"--only 8: .* has runs 0 to 7"):
        sweep.run_one(8, InThisProcess())


# --- what is said


def test_the_best_is_that_of_the_mean_over_seeds_and_its_spread_is_said(plan_of) -> None:
    plan = plan_of(GRID + '[select]\nover = ["training.learning_rate"]\n')
    scores = {
        ("mean", 0.1): (0.9, 0.1),
        ("mean", 1.0): (0.6, 0.62),
        ("median", 0.1): (0.7, 0.5),
        ("median", 1.0): (0.6,),
    }
    rows = {}
    for point in plan.points:
        seeds = scores[point.values["aggregation.rule"], point.values["training.learning_rate"]]
        if point.values["training.seed"] < len(seeds):
            results = {"accuracy_last": seeds[point.values["training.seed"]], "rounds": 2}
            rows[point.key] = Row(point.key, point.values, "completed", results)
    mean, median = best_of(plan, rows)
    assert (mean.fixed, mean.chosen) == ({"aggregation.rule": "mean"}, {"training.learning_rate": 1.0})
    assert mean.mean == pytest.approx(0.61)
    assert mean.std == pytest.approx(0.02 / math.sqrt(2))
    assert (median.chosen["training.learning_rate"], median.candidates) == (0.1, 2)  # the first of equals


def test_of_a_loss_the_lowest_is_best(plan_of) -> None:
    plan = plan_of(GRID + '[select]\nover = ["training.learning_rate"]\nby = "final_loss"\n')
    rows = {
        point.key: Row(point.key, point.values, "completed", {"final_loss": point.values["training.learning_rate"]})
        for point in plan.points
    }
    assert [best.chosen["training.learning_rate"] for best in best_of(plan, rows)] == [0.1, 0.1]


def private_row(point: Point, rounds: int, **given: Any) -> Row:
    privacy = point.experiment.privacy
    z = calibrate(privacy.epsilon, privacy.delta, point.experiment.training.rounds)
    return Row(point.key, point.values, "completed", {"rounds": rounds, "noise_multiplier": z}, **given)


def test_a_whole_search_costs_what_all_its_runs_and_attempts_compose_to(plan_of) -> None:
    plan = plan_of(GRID + '[set]\n"privacy.epsilon" = 4.0\n"privacy.delta" = 1e-3\n')
    one = spent_on([(plan.points[0], private_row(plan.points[0], 2))])
    assert one.epsilon == pytest.approx(4.0, rel=1e-6)
    runs = [(point, private_row(point, 2)) for point in plan.points]
    z = runs[0][1].results["noise_multiplier"]
    assert spent_on(runs).epsilon == pytest.approx(epsilon_of(math.sqrt(8 * 2) / z, 1e-3, "exact"))
    again = [(point, private_row(point, 2, attempts=2)) for point in plan.points]
    assert spent_on(again).runs == 16
    assert spent_on(again).epsilon == pytest.approx(epsilon_of(math.sqrt(16 * 2) / z, 1e-3, "exact"))
    failed = spent_on([(plan.points[0], Row(plan.points[0].key, {}, ERROR))])
    assert failed.epsilon == pytest.approx(4.0, rel=1e-6)  # what it released is not known: its whole budget
    text = summary_text(plan, {point.key: made for point, made in runs})
    assert "ε in the tables is that of each single run" in text
    assert f"ε = {spent_on(runs).epsilon:.4g} at δ = 0.001 (8 runs)" in text


def test_nothing_bounds_a_search_in_which_a_run_has_no_privacy(plan_of) -> None:
    plan = plan_of(GRID.replace('"training.seed" = [0, 1]', '"privacy.epsilon" = [4.0, 8.0]'), "privacy.delta=1e-3")
    runs = [(point, private_row(point, 2)) for point in plan.points]
    open_plan = plan_of(GRID)
    mixed = spent_on([*runs, (open_plan.points[0], row())])
    assert mixed.epsilon is None
    assert mixed.words() == "no ε: 1 of 9 runs have no privacy"


def test_pictures_have_their_numbers_beside_them(plan_of, tmp_path: Path) -> None:
    plan = plan_of(GRID + '[plot]\nx = "training.learning_rate"\ny = "final_accuracy"\nlines = ["aggregation.rule"]\n')
    rows = {
        point.key: Row(
            point.key, point.values, "completed", {"final_accuracy": 0.2 + 0.1 * point.values["training.seed"]}
        )
        for point in plan.points
    }
    written = sweep_of(plan, tmp_path).write(rows)
    (picture,) = [path for path in written if path.suffix == ".png"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    with picture.with_suffix(".csv").open() as file:
        drawn = list(csv.DictReader(file))
    assert len(drawn) == 4
    assert {round(float(record["final_accuracy_mean"]), 6) for record in drawn} == {0.25}
    assert {round(float(record["final_accuracy_std"]), 4) for record in drawn} == {round(0.1 / math.sqrt(2), 4)}
    assert {record["runs"] for record in drawn} == {"2"}


@pytest.mark.parametrize(
    ("indices", "text"), [([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 4, 9], "0,2-4,9"), ([1, 3], "1,3")]
)
def test_indices_are_written_as_slurm_takes_them(indices: list[int], text: str) -> None:
    assert array_of(indices) == text


def test_a_slurm_script_runs_each_missing_index_once(tmp_path: Path) -> None:
    called = tmp_path / "it's called"
    called.write_text('#!/bin/sh\necho "$@"\n')
    called.chmod(0o755)
    out = Path("/shared/a folder")
    command = [str(called), "sweep", "/x/s.toml", "--out", str(out), "--set", 'data.root="/d d"']
    script = slurm_script("rates", [0, 1, 5], command, out, at_once=4)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --array=0-1,5%4" in lines
    assert "#SBATCH --cpus-per-task=1" in lines
    assert "#SBATCH --output='/shared/a folder/slurm-%A_%a.out'" in lines
    assert not [line for line in lines[lines.index("set -euo pipefail") :] if line.startswith("#SBATCH")]
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env={"SLURM_ARRAY_TASK_ID": "5"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == 'sweep /x/s.toml --out /shared/a folder --set data.root="/d d" --only 5'


def test_measures_are_columns_of_a_summary() -> None:
    from deploy.sweep.results import measures_of

    found = measures_of({"final_accuracy": 0.5, "accuracy_last": {"mean": 0.4, "std": 0.1}, "rounds": 3})
    assert (found["final_accuracy"], found["accuracy_last"], found["accuracy_last_std"]) == (0.5, 0.4, 0.1)
    assert set(MEASURES) <= set(found)
    assert json.dumps(found)

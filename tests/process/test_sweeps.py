"""Sweeps in real processes: the pool gives what one process gives, and nothing that kills a process loses a result."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from federations import until

from deploy.sweep.backends import InThisProcess
from deploy.sweep.conduct import Sweep
from deploy.sweep.log import recorded
from deploy.sweep.plan import Plan, load_plan
from deploy.sweep.pool import Pool
from deploy.sweep.results import ERROR

SUPPORT = Path(__file__).resolve().parent.parent / "support"
ROOT = SUPPORT.parent.parent
BASE = f"""\
folder = "{SUPPORT}"
[federation]
clients = 7
byzantine = 2
[training]
rounds = 4
batch_size = 4
[evaluation]
every = 2
[privacy]
epsilon = 50.0
delta = 1e-3
noise_seed = 2
[attack]
name = "alie"
knowledge = "omniscient"
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
"training.seed" = [0, 1, 2]
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "small.toml").write_text(GRID)
    return load_plan(tmp_path / "small.toml")


def sweep(plan: Plan, out: Path) -> Sweep:
    return Sweep(plan, out, lambda _line: None)


def table(out: Path) -> list[dict[str, str]]:
    """Without what depends on how long things took, and how often they were begun."""
    with (out / "table.csv").open(newline="") as file:
        return [
            {k: v for k, v in record.items() if k not in ("seconds", "attempts")} for record in csv.DictReader(file)
        ]


def test_the_pool_gives_the_table_of_one_process_even_if_a_worker_is_killed(plan: Plan, tmp_path: Path) -> None:
    sweep(plan, tmp_path / "one").run(InThisProcess())
    sweep(plan, tmp_path / "pool").run(Pool(2))
    assert table(tmp_path / "pool") == table(tmp_path / "one")
    assert len(table(tmp_path / "pool")) == 6

    # Once more, of which the first run's process kills itself: it costs that run, and --retry-failed mends it.
    (tmp_path / "deadly.py").write_text(
        "import os, signal, tiny_task\n"
        "def data(root):\n"
        f"    if not os.path.exists({str(tmp_path / 'killed')!r}):\n"
        f"        open({str(tmp_path / 'killed')!r}, 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tiny_task.blobs(root)\n"
    )
    (tmp_path / "base.toml").write_text(
        BASE.replace(str(SUPPORT), str(tmp_path)).replace("tiny_task:blobs", "deadly:data")
    )
    deadly = sweep(load_plan(tmp_path / "small.toml"), tmp_path / "deadly")
    rows = deadly.run(Pool(1))
    ((_, failed),) = deadly.failures(rows)
    assert failed.status == ERROR
    assert "died: signal 9 (out of memory?" in failed.error
    rows = deadly.run(Pool(1), retry_failed=True)
    assert deadly.failures(rows) == []
    same = ("aggregation.rule", "training.seed", "final_accuracy", "final_loss")
    assert [[record[name] for name in same] for record in table(tmp_path / "deadly")] == [
        [record[name] for name in same] for record in table(tmp_path / "one")
    ]
    assert deadly.outcomes()[0][failed.key].attempts == 2


def command(tmp_path: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "deploy.cli", "sweep", str(tmp_path / "small.toml")]
    return [*program, "--out", str(tmp_path / "out"), *arguments]


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(tmp_path, *arguments), env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finished(tmp_path: Path, *arguments: str) -> int:
    with started(tmp_path, *arguments) as process:
        process.communicate(timeout=100)
    return process.returncode


def ended(out: Path) -> int:
    return len(recorded(out).rows)


def workers_of(pid: int) -> list[int]:
    """All processes below one, from the system's table."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_sweep_that_was_ended_by_a_signal_goes_on_and_nothing_is_run_twice(
    plan: Plan, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "small.toml").write_text(GRID.replace("[0, 1, 2]", "[0, 1, 2, 3, 4, 5]"))
    plan = load_plan(tmp_path / "small.toml")
    sweep(plan, tmp_path / "whole").run(InThisProcess())
    first = started(tmp_path, "--jobs", "2", "--set", "training.rounds=4")
    until(lambda: ended(tmp_path / "out") >= 3, "three runs to end")
    below = workers_of(first.pid)
    first.send_signal(number)
    _, told = first.communicate(timeout=60)
    assert first.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 22), told
    until(lambda: not any(alive(pid) for pid in below), "the workers to end")
    before = recorded(tmp_path / "out")
    assert 3 <= len(before.rows) < 12, told
    second = started(tmp_path, "--jobs", "2")
    _, told = second.communicate(timeout=100)
    assert second.returncode == 0, told
    after = recorded(tmp_path / "out")
    assert sum(after.begun.values()) - sum(before.begun.values()) == 12 - len(before.rows)
    assert all(after.begun[key] == 1 for key in before.rows)
    assert table(tmp_path / "out") == table(tmp_path / "whole")


@pytest.mark.slow
def test_a_slurm_scripts_tasks_make_the_table_of_one_process(plan: Plan, tmp_path: Path) -> None:
    sweep(plan, tmp_path / "whole").run(InThisProcess())
    assert finished(tmp_path, "--slurm", str(tmp_path / "job.sh")) == 0
    assert "#SBATCH --array=0-5\n" in (tmp_path / "job.sh").read_text()
    for index in (0, 5):
        assert finished(tmp_path, "--only", str(index)) == 0
    assert finished(tmp_path, "--table") == 0
    whole = table(tmp_path / "whole")
    assert table(tmp_path / "out") == [whole[0], whole[5]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_on_two_nodes_gives_the_table_of_one_process(plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'byzuldp[ray]'")
    from ray.cluster_utils import Cluster

    from deploy.sweep.on_ray import OnRay

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    sweep(plan, tmp_path / "one").run(InThisProcess())
    (tmp_path / "where").mkdir()
    (tmp_path / "noting.py").write_text(
        "import os, ray, tiny_task\n"
        "def data(root):\n"
        "    node = ray.get_runtime_context().get_node_id()\n"
        f"    open(os.path.join({str(tmp_path / 'where')!r}, node), 'a').close()\n"
        "    return tiny_task.blobs(root)\n"
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        backend = OnRay(cluster.address)
        assert backend.width == 2
        sweep(plan, tmp_path / "ray").run(backend)
        assert table(tmp_path / "ray") == table(tmp_path / "one")
        (tmp_path / "base.toml").write_text(
            BASE.replace(str(SUPPORT), str(tmp_path)).replace("tiny_task:blobs", "noting:data")
        )
        sweep(load_plan(tmp_path / "small.toml"), tmp_path / "noted").run(backend)
        assert len(list((tmp_path / "where").iterdir())) == 2  # both nodes had a share
        assert all(json.loads(record["final_accuracy"]) > 0 for record in table(tmp_path / "noted"))
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_dies_costs_its_runs_another_try(plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'byzuldp[ray]'")
    from ray.cluster_utils import Cluster

    from deploy.sweep.on_ray import OnRay

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    sweep(plan, tmp_path / "one").run(InThisProcess())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        doomed = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        conducted = sweep(plan, tmp_path / "ray")
        kill_at = {"left": 2}

        def killing(_line: str) -> None:
            kill_at["left"] -= 1
            if kill_at["left"] == 0:
                cluster.remove_node(doomed, allow_graceful=False)
                time.sleep(0.1)

        object.__setattr__(conducted, "say", killing)
        rows = conducted.run(OnRay(cluster.address))
        assert conducted.failures(rows) == []
        assert table(tmp_path / "ray") == table(tmp_path / "one")
    finally:
        ray.shutdown()
        cluster.shutdown()

"""Run folders that a server must not go on with, and disks that fail it: one clear message, and nothing is lost.

A private run was killed in the middle, with its last rounds still in SQLite's write-ahead log; real servers are started
on damaged copies of its folder. What needs a file system of its own gets a small one in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from federations import Child, ServerProcess, client_process, small_experiment, until

from common.config import Experiment
from common.errors import StoreDamaged, exit_code_of
from ps.main import run_parameter_server
from ps.privacy.ledger import Ledger
from ps.reader import RunReader
from ps.store import RunStore

LAST = 6


def private_experiment() -> Experiment:
    return small_experiment(
        federation={"clients": 3, "byzantine": 1},
        training={"rounds": 100_000, "learning_rate": 0.1, "server_momentum": 0.5},
        aggregation={"rule": "trimmed_mean"},
        privacy={"epsilon": 8.0, "delta": 1e-5},
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose server was killed when it had published round 6."""
    place, experiment = tmp_path_factory.mktemp("killed"), private_experiment()
    with ServerProcess(experiment, place, dies_at=("published", LAST)) as server:
        server.listening()
        with client_process(place, experiment, server.address, server.tokens()):
            server.died()
    assert (server.run_dir / "run.sqlite-wal").stat().st_size > 0
    assert RunReader(server.run_dir).status().round_id == LAST
    return server.run_dir


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file that says something about the run; the lock and SQLite's index of its log do not."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size and path.name != "lock" and not path.name.endswith("-shm")
    }


def assert_refused(process: ServerProcess, status: str, *words: str) -> None:
    """It ends by itself, with the status's exit code and one message that says these words."""
    assert process.exit_code() == exit_code_of(status), process.log()
    (error,) = process.events("error")
    assert error["status"] == status
    assert all(word in error["message"] for word in words), error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in process.log()


# ---------------------------------------------------------------- damage


def truncated(by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - by)


def flipped(offset: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return flip


def overwritten(path: Path) -> None:
    """With its log: SQLite would restore from that what it holds."""
    path.write_bytes(b"not what it was " * 256)
    path.with_name(f"{path.name}-wal").unlink()


MODEL, LOG = f"models/model-{LAST}.safetensors", "run.sqlite-wal"
TWICE = "release rounds twice"

DAMAGE = {
    "torn model": (MODEL, truncated(4), "torn"),
    "flipped bit in the model": (MODEL, flipped(-1), "changed since it was committed"),
    "no model": (MODEL, Path.unlink, "is missing"),
    "torn log": (LOG, truncated(1), TWICE),
    "flipped bit in the log": (LOG, flipped(-5000), TWICE),
    "flipped bit early in the log": (LOG, flipped(30_000), TWICE),
    "no log": (LOG, Path.unlink, TWICE),
    "no database": ("run.sqlite", overwritten, "not a database"),
    "torn configuration": ("experiment.json", truncated(100), "not the configuration"),
    "flipped bit in the configuration": ("experiment.json", flipped(50), "not the configuration"),
    "damaged metrics": ("operator/metrics.sqlite", overwritten, "move the file away"),
    "torn token hashes": ("operator/join_token_hashes.json", truncated(10), "cannot be read"),
}
FOUND_LATER = ("damaged metrics", "torn token hashes")
"""When the run itself was opened, and found whole: SQLite may have taken its log into its database."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_server_refuses_a_damaged_folder_by_the_files_name_and_goes_on_once_it_is_whole(
    run_dir: Path, killed: Path, tmp_path: Path, kind: str
) -> None:
    file, damage, said = DAMAGE[kind]
    damage(run_dir / file)
    found = snapshot(run_dir)
    with ServerProcess(private_experiment(), tmp_path, run_dir=run_dir, resume=True) as server:
        assert_refused(server, "store_damaged", said, str(run_dir / file.removesuffix("-wal")))
    touched = {name for name in found if snapshot(run_dir).get(name) != found[name]}
    assert all(kind in FOUND_LATER and ".sqlite" in name for name in touched), touched
    shutil.copytree(killed, run_dir, dirs_exist_ok=True)
    with RunStore.open(run_dir) as store:
        assert store.latest().round_id == LAST
        assert store.latest().head == RunReader(killed).verify()


def edited(run_dir: Path, section: str, key: str, value: object) -> None:
    """What somebody does who wants more from a run than it promised: both copies of the configuration agree."""
    with closing(sqlite3.connect(run_dir / "run.sqlite", isolation_level=None)) as database:
        (text,) = database.execute("SELECT configuration FROM run").fetchone()
        tree = json.loads(text)
        assert tree[section][key] != value
        tree[section][key] = value
        database.execute("UPDATE run SET configuration = ?", [json.dumps(tree, sort_keys=True)])
    (run_dir / "experiment.json").write_text(json.dumps(tree))


EDITS: list[tuple[str, str, Any]] = [
    ("training", "clip_norm", 0.5),
    ("training", "server_momentum", 0.25),
    ("training", "learning_rate", 0.2),
    ("training", "rounds", 200),
    ("federation", "byzantine", 0),
    ("federation", "clients", 4),
    ("aggregation", "rule", "median"),
    ("privacy", "epsilon", 80.0),
    ("privacy", "delta", 1e-4),
    ("privacy", "noise_seed", 1),
    ("federation", "byzantine", 7),  # and what is no configuration at all
]


@pytest.mark.parametrize(("section", "key", "value"), EDITS)
def test_a_configuration_edited_in_the_database_is_not_what_row_0_was_opened_with(
    run_dir: Path, section: str, key: str, value: object
) -> None:
    edited(run_dir, section, key, value)
    before = RunReader(run_dir).ledger_rows()

    def onlooker(event: dict[str, Any]) -> None:
        pytest.fail(f"the run goes on: {event}")

    with pytest.raises(StoreDamaged, match=r"row 0 of the ledger.*--run-dir"):
        run_parameter_server(private_experiment(), run_dir, resume=True, report=onlooker)
    assert RunReader(run_dir).ledger_rows() == before


def test_a_run_id_edited_in_the_database_is_not_the_ledgers(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "run.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE run SET run_id = 'another'")
    with pytest.raises(StoreDamaged, match="row 0 of the ledger"):
        run_parameter_server(private_experiment(), run_dir, resume=True, report=lambda _: pytest.fail("it goes on"))


def test_the_command_says_once_why_it_does_not_resume(run_dir: Path) -> None:
    edited(run_dir, "training", "clip_norm", 2.0)
    support = Path(__file__).parent.parent / "support"
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "ps",
        "--resume",
        "--run-dir",
        str(run_dir),
        "--quiet",
        "--no-report",
    ]
    environment = os.environ | {"PYTHONPATH": f"{support}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == exit_code_of("store_damaged"), done.stderr
    assert done.stdout == ""
    assert done.stderr.count("error:") == done.stderr.count("row 0") == 1
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- beginning


def test_a_server_killed_before_its_first_commit_is_started_again(tmp_path: Path) -> None:
    experiment = private_experiment()
    with ServerProcess(experiment, tmp_path, dies_at=("before_commit", 1)) as first:
        assert first.died() == "before_commit"
    with ServerProcess(experiment, tmp_path, run_dir=first.run_dir, resume=True) as second:
        assert_refused(second, "store_damaged", "start it again without --resume")
    with ServerProcess(experiment, tmp_path, run_dir=first.run_dir) as third:
        assert third.listening().stop()["status"] == "interrupted"


def test_a_server_killed_after_its_first_commit_goes_on_and_its_clients_can_join(tmp_path: Path) -> None:
    experiment = private_experiment()
    with ServerProcess(experiment, tmp_path, dies_at=("after_commit", 1)) as first:
        assert first.died() == "after_commit"
    with ServerProcess(experiment, tmp_path, run_dir=first.run_dir, resume=True) as second:
        second.listening()
        with client_process(tmp_path, experiment, second.address, second.tokens()) as clients:
            until(lambda: RunReader(second.run_dir).status().round_id >= 2, "two rounds")
            assert second.stop()["status"] == "interrupted"
            assert clients.exit_code() == 0, clients.log()


# ---------------------------------------------------------------- disks


MOUNTS = "BYZULDP_TEST_MAY_MOUNT"


class Disk:
    """A file system in memory, as large as a test says."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.place)], check=True)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=448k", "tmpfs", str(place)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        in_a_namespace(request, made.stderr.strip())
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def in_a_namespace(request: pytest.FixtureRequest, why: str) -> None:
    """Who may not mount runs this test again where he may, if the system has such a place; here it is skipped."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if MOUNTS in os.environ or shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip(f"needs the right to mount a small file system: {why}")
    test = f"{request.path}::{request.node.name}"
    command = [*unshare, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {MOUNTS: "1"}, timeout=110)
    assert done.returncode == 0, done.stdout
    pytest.skip(f"passed in a mount namespace of its own, since here: {why}")


class Federation:
    """A private run on that disk; the clients are told how it ends."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder, self.run_dir, self.experiment = folder, run_dir, private_experiment()

    def server(self, *, resume: bool = False) -> ServerProcess:
        return ServerProcess(self.experiment, self.folder, run_dir=self.run_dir, resume=resume)

    def clients(self, server: ServerProcess, name: str) -> Child:
        return client_process(self.folder, self.experiment, server.address, server.tokens(), name=name)

    def rounds(self) -> int:
        return RunReader(self.run_dir).status().round_id

    def ledger(self) -> Ledger:
        return Ledger.restored((text, head) for _, text, head in RunReader(self.run_dir).ledger_rows())


def test_a_disk_that_fills_up_ends_the_run_with_a_remedy_and_it_goes_on_on_a_larger_one(
    disk: Disk, tmp_path: Path
) -> None:
    run = Federation(tmp_path, disk.place / "run")
    with run.server() as server, run.clients(server.listening(), "first") as clients:
        assert_refused(server, "store_unwritable", str(disk.place), "free some space, then continue with --resume")
        assert clients.exit_code() == 0, clients.log()
        assert clients.wait_for("outcome")["status"] == "failed"
    assert run.rounds() > 2, "the disk was full before anything happened"
    reached, before = run.rounds(), run.ledger()
    disk.remount("size=8m")
    with run.server(resume=True) as server, run.clients(server.listening(), "second") as clients:
        assert server.events("resumed") == [{"event": "resumed", "round": reached}]
        until(lambda: run.rounds() >= reached + 3, "rounds on the larger disk")
        assert server.stop()["status"] == "interrupted"
        assert clients.exit_code() == 0, clients.log()
    assert run.ledger().rows()[: reached + 1] == before.rows()
    assert RunReader(run.run_dir).verify() == run.ledger().head


def test_a_read_only_disk_is_named_and_the_run_goes_on_when_it_is_writable(disk: Disk, tmp_path: Path) -> None:
    run = Federation(tmp_path, disk.place / "run")
    with run.server() as server:
        server.listening().kill()
    disk.remount("ro")
    with run.server(resume=True) as server:
        assert_refused(server, "store_unwritable", str(run.run_dir), "Read-only file system", "--run-dir")
    with ServerProcess(run.experiment, tmp_path, run_dir=disk.place / "another") as server:
        assert_refused(server, "store_unwritable", "another", "Read-only file system", "--run-dir")
    assert RunReader(run.run_dir).status().round_id == 0  # what can be read is read
    disk.remount("rw")
    with run.server(resume=True) as server:
        assert server.listening().stop()["status"] == "interrupted"


def test_a_folder_that_vanishes_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    run = Federation(tmp_path, tmp_path / "run")
    with run.server() as server, run.clients(server.listening(), "client") as clients:
        until(lambda: run.rounds() >= 2, "two rounds")
        moved = run.run_dir.rename(tmp_path / "moved away")
        assert_refused(server, "store_unwritable", str(run.run_dir), "No such file or directory", "restore")
        assert clients.exit_code() == 0, clients.log()
    run.run_dir = moved.rename(run.run_dir)
    reached = run.rounds()
    with run.server(resume=True) as server:
        assert server.listening().events("resumed") == [{"event": "resumed", "round": reached}]
        server.stop()


def test_a_second_server_on_the_folder_ends_and_the_first_does_not_notice(tmp_path: Path) -> None:
    run = Federation(tmp_path, tmp_path / "run")
    with run.server() as first, run.clients(first.listening(), "client") as clients:
        for resume in (True, False):
            before = run.rounds()
            with run.server(resume=resume) as second:
                assert_refused(second, "run_folder_in_use", str(run.run_dir), str(first.pid), "--run-dir")
            until(lambda before=before: run.rounds() >= before + 2, "the first server's rounds")
        assert first.stop()["status"] == "interrupted"
        assert clients.exit_code() == 0, clients.log()
    assert run.ledger().next_round == run.rounds()

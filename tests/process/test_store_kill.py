"""The run folder under SIGKILL: real processes, named points and random instants."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from common.errors import RunFolderInUse, StoreDamaged
from ps.faults import IN_STORE
from ps.store import CommittedRound, PreparedRound, RunReader, RunStore

CHILD = Path(__file__).with_name("store_child.py")
KILLS = 40
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start(mode: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(CHILD), mode, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


class Servers:
    """Servers on one folder, one after the other, each killed with SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._parent = start("loop", folder)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate()  # end of its input: it ends

    def begin(self) -> int:
        """Start one; returns its process id."""
        self._parent.stdin.write("go\n")
        self._parent.stdin.flush()
        word, pid = self.line().split()
        assert word == "pid"
        return int(pid)

    def line(self) -> str:
        return self._parent.stdout.readline()

    def kill(self, pid: int) -> list[str]:
        """Returns what it had acknowledged, beyond what was read."""
        os.kill(pid, signal.SIGKILL)
        return list(iter(self.line, "gone\n"))


def digest(model: CommittedRound) -> str:
    return sha256(model.theta.tobytes() + model.server_momentum.tobytes()).hexdigest()


def check_chain(store: RunStore) -> None:
    head = bytes(32)
    for expected, (round_id, entry, recorded) in enumerate(store.ledger_rows()):
        head = sha256(head + entry.encode()).digest()
        assert (round_id, recorded) == (expected, head)
    assert store.latest().head == head


def check_folder(folder: Path, latest: int) -> None:
    assert sorted(os.listdir(folder / "models")) == sorted(
        f"model-{kept}.safetensors" for kept in range(max(0, latest - 2), latest + 1)
    )
    assert not list(folder.rglob("*.tmp"))


def test_a_server_killed_at_random_times_keeps_every_round_it_acknowledged_and_noises_none_twice(tmp_path):
    folder, published = tmp_path / "run", {}
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown when the test fails
    dice = random.Random(seed)
    with Servers(folder) as servers:
        for kill in range(KILLS):
            server = servers.begin()
            # One in four dies while it begins or takes up the run; the others after some rounds, however slow the disk.
            seen = [servers.line() for _ in range(dice.randint(1, 6) if kill % 4 else 0)]
            time.sleep(dice.uniform(0.0, 0.015 if seen else 0.05))
            for line in seen + servers.kill(server):
                round_id, *content = line.split()
                assert published.setdefault(int(round_id), content) == content, "a round was released twice"
            if not (folder / "run.sqlite").exists() or not started(folder):
                assert not published
                continue
            with RunStore.open(folder) as store:
                latest, acknowledged = store.latest(), max(published, default=-1)
                assert latest.round_id in (acknowledged, acknowledged + 1)
                found = [digest(latest), latest.head.hex()]
                assert published.setdefault(latest.round_id, found) == found
                rows = {round_id: head.hex() for round_id, _, head in store.ledger_rows()}
                assert all(rows[round_id] == head for round_id, (_, head) in published.items())
                check_chain(store)
                check_folder(folder, latest.round_id)
    assert len(published) > KILLS, "the kills came too early to mean anything"


def started(folder: Path) -> bool:
    """Whether the run's first commit is there, by the reader (which repairs nothing)."""
    try:
        RunReader(folder)
    except StoreDamaged as error:
        if "has not begun" not in str(error):
            raise
        return False
    return True


@pytest.fixture(scope="module")
def killed_at_points(tmp_path_factory):
    parent = tmp_path_factory.mktemp("points")
    out, _ = (child := start("points", parent)).communicate()
    assert child.returncode == 0
    before = {name: (int(round_id), *content) for name, round_id, *content in map(str.split, out.splitlines())}
    return parent, before


@pytest.mark.parametrize("point", IN_STORE)
def test_a_server_killed_while_committing_has_the_round_wholly_or_not_at_all(killed_at_points, point):
    parent, before = killed_at_points
    folder = parent / f"commit-{point}"
    round_id, old_digest, old_head = before[folder.name]
    assert round_id == 4
    with RunStore.open(folder) as store:
        latest = store.latest()
        if point == "after_commit":
            assert latest.round_id == 5
            assert latest.head.hex() != old_head
        else:
            assert (latest.round_id, digest(latest), latest.head.hex()) == (4, old_digest, old_head)
        check_chain(store)
        check_folder(folder, latest.round_id)
        theta = np.ones_like(latest.theta)
        following = store.commit(PreparedRound(latest.round_id + 1, theta, theta, '{"after":"the kill"}'))
    with RunStore.open(folder) as store:
        assert digest(store.latest()) == digest(following)
        check_folder(folder, following.round_id)


@pytest.mark.parametrize("point", IN_STORE)
def test_a_server_killed_while_beginning_a_run_leaves_a_run_or_a_folder_to_begin_in(killed_at_points, point):
    folder = killed_at_points[0] / f"create-{point}"
    if point == "after_commit":
        with RunStore.open(folder) as store:
            assert store.latest().round_id == 0
            check_chain(store)
        return
    with pytest.raises(StoreDamaged, match="before it began; start it again without --resume"):
        RunStore.open(folder)
    with pytest.raises(StoreDamaged, match="has not begun"):
        RunReader(folder)
    arguments = {"run_id": "again", "configuration": {"clients": 6}, "fingerprint": "1", "genesis_json": "{}"}
    store, first = RunStore.create(folder, theta=np.zeros(3, np.float32), **arguments)
    with store:
        assert first.round_id == 0
        check_folder(folder, 0)
        assert json.loads((folder / "experiment.json").read_text()) == {"clients": 6}


def test_a_second_server_is_refused_by_process_id_until_the_first_is_killed(tmp_path):
    folder = tmp_path / "run"
    with Servers(folder) as servers:
        server = servers.begin()
        servers.line()
        with pytest.raises(RunFolderInUse, match=rf"process {server}\b.*--run-dir"):
            RunStore.open(folder)
        with pytest.raises(RunFolderInUse, match=rf"process {server}\b"):
            RunStore.create(
                folder, run_id="b", configuration={}, fingerprint="", genesis_json="{}", theta=np.zeros(1, np.float32)
            )
        assert RunReader(folder).status().status == "running"  # reading takes no lock
        servers.kill(server)
    with RunStore.open(folder) as store:
        assert store.latest().round_id >= 0


def test_a_forked_child_neither_holds_the_lock_on_nor_commits(tmp_path):
    script = """
import os, sys, numpy as np
from pathlib import Path
from ps.store import PreparedRound, RunStore
folder, one = Path(sys.argv[1]), np.ones(4, np.float32)
store, _ = RunStore.create(folder, run_id="f", configuration={}, fingerprint="", genesis_json="{}", theta=one)
go, gone = os.pipe()
if (child := os.fork()) == 0:
    os.close(gone)
    try:
        store.commit(PreparedRound(1, one, one, "{}"))
    except RuntimeError as error:
        print(error, flush=True)
    os.read(go, 1)          # outlives its parent's store
    os._exit(0)
store.commit(PreparedRound(1, one, one, "{}"))
store.close()
with RunStore.open(folder) as again:
    print(again.latest().round_id, flush=True)
os.close(gone)
os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "belongs to the process that forked" in done.stdout
    assert "1" in done.stdout.splitlines()


FULL_DISK = """
import sys, subprocess, numpy as np
from pathlib import Path
from common.errors import StoreUnwritable
from ps.store import PreparedRound, RunStore
mount = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]).returncode:
    sys.exit(77)
def round_of(t):
    return PreparedRound(t, np.full(20_000, t, np.float32), np.zeros(20_000, np.float32), '{"t":%d}' % t)
zero = np.zeros(20_000, np.float32)
store, _ = RunStore.create(mount / "run", run_id="f", configuration={}, fingerprint="", genesis_json="{}", theta=zero)
store.commit(round_of(1))
ballast = open(mount / "ballast", "wb", buffering=0)
try:
    while True:
        ballast.write(bytes(4096))
except OSError:
    pass
for _ in range(2):
    try:
        store.commit(round_of(2))
    except StoreUnwritable as error:
        print(error)
    else:
        sys.exit("a commit succeeded on a full disk")
assert store.latest().round_id == 1
ballast.truncate(0)
assert store.commit(round_of(2)).round_id == 2
# Room for the tensors (twice, less a page or so), but none for the database: its write-ahead log has to grow.
for t in range(3, 8):
    ballast.seek(0)
    try:
        while True:
            ballast.write(bytes(4096))
    except OSError:
        pass
    ballast.truncate(ballast.tell() - 164 * 1024)
    try:
        store.commit(round_of(t))
    except StoreUnwritable as error:
        print(error)
        break
    ballast.truncate(0)
else:
    sys.exit("the database never met the full disk")
before = store.latest().round_id
store.close()
ballast.truncate(0)
with RunStore.open(mount / "run") as store:
    assert store.latest().round_id in (before, before + 1)
    t = store.latest().round_id
    assert store.latest().theta[0] == t
    assert store.commit(round_of(t + 1)).round_id == t + 1
"""


def test_a_full_disk_is_named_loses_nothing_and_the_run_goes_on_when_there_is_space(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this system does not allow a private mount")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == second
    assert "model-2.safetensors" in first
    assert "No space left on device" in first
    assert "free some space" in first
    assert "run.sqlite" in last
    assert "free some space" in last


def test_the_store_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, ps.store; sys.exit('torch' in sys.modules)"], timeout=60, env=ENVIRONMENT
    )
    assert done.returncode == 0

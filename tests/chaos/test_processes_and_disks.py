"""What is done to a process or to a disk is seen from outside, and is undone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.chaos.clocks import Clocks, library
from deploy.chaos.disk import FILLER, SmallDisk, problem_with_mounting
from deploy.chaos.squeezing import PERIOD_US, Squeezer

PATIENCE_S = 30.0
needs_mount = pytest.mark.skipif(
    (problem := problem_with_mounting()) is not None, reason=f"no file system can be mounted: {problem}"
)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


# -------------------------------------------------------------------- the processor


@pytest.fixture
def busy() -> Iterator[psutil.Process]:
    """A process that never rests."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def used(process: psutil.Process, for_s: float) -> float:
    """Seconds of processor time a second."""
    began_at, before = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(for_s)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began_at)


def test_a_squeezed_process_gets_its_share_and_no_more_until_it_is_let_go(busy: psutil.Process) -> None:
    squeezer = Squeezer()
    cgroups = Path(f"/proc/{busy.pid}/cgroup")
    before, nice = cgroups.read_text(), busy.nice()
    how = squeezer.squeeze(busy.pid, 0.1)
    try:
        if how.startswith("nice 19"):
            assert busy.nice() == 19
        else:
            assert str(busy.pid) in cgroups.read_text()
            assert used(busy, 1.0) < 0.2
    finally:
        squeezer.release(busy.pid)
    assert (cgroups.read_text(), busy.nice()) == (before, nice)
    assert not Path(how.partition("control group ")[2] or "none").exists()


def test_without_control_groups_it_is_nice_and_that_is_said(busy: psutil.Process, tmp_path: Path) -> None:
    squeezer = Squeezer(tmp_path)
    assert squeezer.squeeze(busy.pid, 0.1).startswith("nice 19 instead of a share: no control group can be made")
    assert busy.nice() == 19
    squeezer.close()
    assert busy.nice() == 0


def test_the_second_version_of_control_groups_is_understood(busy: psutil.Process, tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / str(busy.pid)).mkdir(parents=True)
    (proc / str(busy.pid) / "cgroup").write_text("0::/user.slice\n")
    parent = root / "user.slice"
    parent.mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text("cpu memory\n")
    squeezer = Squeezer(root, proc)
    assert squeezer.squeeze(busy.pid, 0.25).startswith("control group")
    (group,) = parent.glob("byzuldp-*")
    assert (group / "cpu.max").read_text() == f"{PERIOD_US // 4} {PERIOD_US}"
    assert (group / "cgroup.procs").read_text() == str(busy.pid)
    squeezer.close()
    (parent / "cgroup.subtree_control").write_text("memory\n")
    assert "does not give away the processor" in squeezer.squeeze(busy.pid, 0.25)


def test_a_process_that_is_gone_cannot_be_squeezed_but_let_go() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(PATIENCE_S)
    squeezer = Squeezer()
    with contextlib.suppress(ProcessLookupError):
        squeezer.squeeze(process.pid, 0.5)
    squeezer.close()


# -------------------------------------------------------------------- the clock


def test_only_a_process_that_will_meet_a_jump_is_born_with_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib.so").touch()
    monkeypatch.setenv("BYZULDP_LIBFAKETIME", str(tmp_path / "lib.so"))
    clocks = Clocks(tmp_path / "clocks", frozenset({"ps"}))
    assert clocks.environment("ps")["LD_PRELOAD"] == str(tmp_path / "lib.so")
    assert clocks.environment("client-0") == {}
    clocks.set("ps", -90.0)
    assert (tmp_path / "clocks" / "ps.offset").read_text() == "-90.000s\n"
    monkeypatch.setenv("BYZULDP_LIBFAKETIME", str(tmp_path / "gone.so"))
    assert library() is None


@pytest.mark.system
def test_a_clock_jumps_and_jumps_back_and_the_others_do_not(tmp_path: Path) -> None:
    assert library() is not None, "apt install libfaketime"
    clocks = Clocks(tmp_path, frozenset({"ps"}))
    program = (
        "import sys, time\nwhile line := sys.stdin.readline():\n    print(time.time(), time.monotonic(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clocks.environment("ps")},
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def ahead() -> tuple[float, float]:
            """Of us: its wall clock, its monotonic clock."""
            stdin.write("\n")
            stdin.flush()
            wall, monotonic = map(float, stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        assert max(map(abs, ahead())) < 1.0
        clocks.set("ps", 86_400.0)
        until(lambda: abs(ahead()[0] - 86_400.0) < 5.0)
        assert abs(ahead()[1]) < 1.0
        clocks.set("ps", 0.0)
        until(lambda: abs(ahead()[0]) < 5.0)
        process.kill()


# -------------------------------------------------------------------- the disk


def mounted(folder: Path) -> bool:
    return f" {folder} tmpfs " in Path("/proc/mounts").read_text()


@needs_mount
def test_a_full_disk_takes_nothing_until_it_is_freed_and_leaves_its_content(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "run", 8)
    try:
        (disk.folder / "before").write_text("kept")
        (disk.folder / "operator").mkdir()
        (disk.folder / "operator").chmod(0o700)
        assert mounted(disk.folder)
        assert 7e6 < disk.fill() < 9e6
        with pytest.raises(OSError, match="No space left") as caught:
            (disk.folder / "during").write_bytes(bytes(100_000))
        assert caught.value.errno == errno.ENOSPC
        (tmp_path / "elsewhere").write_bytes(bytes(100_000))
        disk.free()
        (disk.folder / "after").write_bytes(bytes(100_000))
        disk.fill()
    finally:
        disk.close()
    disk.close()
    assert not mounted(disk.folder)
    assert (disk.folder / "before").read_text() == "kept"
    assert (disk.folder / "after").stat().st_size == 100_000
    assert (disk.folder / "operator").stat().st_mode & 0o777 == 0o700
    assert not (disk.folder / FILLER).exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]


@needs_mount
def test_a_disk_does_not_stay_mounted_when_the_lab_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = (
        "import sys, time; from pathlib import Path; from deploy.chaos.disk import SmallDisk\n"
        "disk = SmallDisk(Path(sys.argv[1]), 8); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        assert lab.stdout.readline() == "ready\n"
        assert mounted(folder)
        os.kill(lab.pid, signal.SIGKILL)
    until(lambda: not mounted(folder))

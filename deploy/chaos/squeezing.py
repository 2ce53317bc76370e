"""Less of the processor for one process: a control group where that is allowed, nice elsewhere."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["Squeezer"]

PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000
ROOT, PROC = Path("/sys/fs/cgroup"), Path("/proc")


class Squeezer:
    """Squeezes processes and lets them go; closing it lets all go. ``root`` and ``proc`` are the system's.

    A control group holds ``share`` of one core whatever else runs; nice 19 only gives way to others, and is said so.
    """

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        self._groups: dict[int, tuple[Path, Path]] = {}  # by process: its group, and the one it came from
        self._nice: dict[int, int] = {}

    def squeeze(self, pid: int, share: float) -> str:
        """Leave a process ``share`` of one core; returns how, in a few words.

        Raises
        ------
        ProcessLookupError
            There is no such process.
        """
        self.release(pid)
        try:
            return self._group(pid, share)
        except ProcessLookupError:
            raise
        except OSError as problem:
            self._leave_group(pid)
            self._nice.setdefault(pid, os.getpriority(os.PRIO_PROCESS, pid))
            _renice(pid, 19)
            return f"nice 19 instead of a share: no control group can be made ({problem.strerror or problem})"

    def release(self, pid: int) -> None:
        """As it was before; a process that is gone is let go too."""
        self._leave_group(pid)
        before = self._nice.pop(pid, None)
        if before is not None:
            with contextlib.suppress(OSError):  # raising it again may need a right
                _renice(pid, before)

    def close(self) -> None:
        for pid in {*self._groups, *self._nice}:
            self.release(pid)

    def _group(self, pid: int, share: float) -> str:
        quota = max(LEAST_QUOTA_US, int(share * PERIOD_US))
        parent, first = self._controller(pid)
        group = parent / f"byzuldp-{os.getpid()}-{pid}"
        self._groups[pid] = group, parent
        if first:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            if "cpu" not in (parent / "cgroup.subtree_control").read_text().split():
                raise PermissionError(1, f"{parent} does not give away the processor")
            group.mkdir()
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        return f"control group {group}"

    def _controller(self, pid: int) -> tuple[Path, bool]:
        """Where this process's processor is governed, and whether by the first version of control groups."""
        second: Path | None = None
        for line in (self._proc / str(pid) / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                return self._root / "cpu" / path.lstrip("/"), True
            if number == "0":
                second = self._root / path.lstrip("/")
        if second is None:
            raise PermissionError(1, "there are none")
        return second, False

    def _leave_group(self, pid: int) -> None:
        group, parent = self._groups.pop(pid, (None, None))
        if group is None or parent is None:
            return
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


def _renice(pid: int, value: int) -> None:
    """All threads: on Linux nice belongs to each."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), value)

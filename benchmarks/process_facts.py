"""What a process costs, from /proc: memory, file descriptors, processor time."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "Watch", "usage"]

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """At one instant, or the largest of several."""

    rss: int
    """Bytes of memory that are there, those shared with other processes included."""
    uss: int
    """Bytes of memory that are its own: what would be free without it."""
    files: int
    """Open file descriptors."""
    cpu_s: float
    """Processor seconds since it began."""


def usage(pid: int) -> Usage:
    """What a process uses now.

    Raises
    ------
    OSError
        There is no such process (any more).
    """
    folder = Path("/proc", str(pid))
    sizes: dict[str, int] = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        sizes[name] = 1024 * int(value)
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return Usage(
        rss=sizes["Rss:"],
        uss=sizes["Private_Clean:"] + sizes["Private_Dirty:"],
        files=len(os.listdir(folder / "fd")),
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
    )


class Watch:
    """Looks at a process every now and then, on a thread, until it is gone or :meth:`stop` is called."""

    def __init__(self, pid: int, every_s: float = 0.25) -> None:
        self._pid, self._every_s = pid, every_s
        self.first = self.peak = usage(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"watch-{pid}", daemon=True)
        self._thread.start()

    def stop(self) -> Usage:
        """The largest of each that was seen."""
        self._stopped.set()
        self._thread.join()
        return self.peak

    def _look(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            while not self._stopped.wait(self._every_s):
                seen, peak = usage(self._pid), self.peak
                self.peak = Usage(
                    max(seen.rss, peak.rss), max(seen.uss, peak.uss), max(seen.files, peak.files), seen.cpu_s
                )

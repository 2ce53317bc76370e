"""A wall clock that is wrong, for one process: libfaketime, loaded into that process alone.

The system's clock is never touched. A process that is to meet a jump is born with the library and a file that holds
its clock's offset, zero at first; changing the file is the jump. Monotonic clocks go on as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Clocks", "library"]

SETTING = "BYZULDP_LIBFAKETIME"
LIBRARY = "libfaketimeMT.so.1"
NOTICED_S = 1  # the library reads the file again after so long


def library() -> Path | None:
    """libfaketime for programs with threads, where Debian's package puts it or ``BYZULDP_LIBFAKETIME`` names it."""
    if named := os.environ.get(SETTING):
        return Path(named).absolute() if Path(named).is_file() else None
    places = (Path("/usr/lib"), Path("/usr/local/lib"), *sorted(Path("/usr/lib").glob("*-linux-gnu*")))
    return next((file for place in places if (file := place / "faketime" / LIBRARY).is_file()), None)


class Clocks:
    """The offsets of some processes' clocks.

    Parameters
    ----------
    folder
        Where the files lie.
    names
        The processes that may meet a jump; no other is changed in any way.
    """

    def __init__(self, folder: Path, names: frozenset[str]) -> None:
        self._folder, self.names = folder, names
        if names:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            self.set(name, 0.0)

    def environment(self, name: str) -> Mapping[str, str]:
        """What such a process must be born with."""
        found = library() if name in self.names else None
        if found is None:
            return {}
        return {
            "LD_PRELOAD": str(found),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_CACHE_DURATION": str(NOTICED_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",  # its name in older versions
            "FAKETIME_DONT_RESET": "1",  # children see the same clock
        }

    def set(self, name: str, offset_s: float) -> None:
        """Put a clock ahead (or back) of the true one; noticed within about a second."""
        new = self._file(name).with_suffix(".new")
        new.write_text(f"{offset_s:+.3f}s\n")
        new.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.offset"

"""Files that are read again when they change, so that nothing has to be restarted for it.

A file that has become unreadable, or is being replaced just now, changes nothing: what was read last stays in force,
and the log says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import ConfigError

__all__ = ["Reread"]

log = logging.getLogger("byzuldp.files")

T = TypeVar("T")
State = tuple[tuple[int, int, int] | None, ...]


class Reread(Generic[T]):
    """What some files say now.

    Parameters
    ----------
    paths
        The files.
    read
        Reads them all; raises ConfigError for content that will not do.
    every_s
        How often the file system is asked, at most.

    Raises
    ------
    ConfigError
        They cannot be read to begin with.

    Notes
    -----
    May be used from several threads. Replace a file by renaming another over it: one that is written in place can be
    read half-written, which is refused or, for a list, taken for the shorter list it then is.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], *, every_s: float = 0.0) -> None:
        self._paths, self._read, self._every_s = tuple(paths), read, every_s
        self._lock = threading.Lock()
        self._state, self._asked_at = self._now(), time.monotonic()  # before reading: a change meanwhile is seen next
        self._content = read()

    def current(self) -> T:
        """The content, read anew if a file has changed; the same object as before if none has."""
        with self._lock:
            asked_at = time.monotonic()
            if asked_at - self._asked_at < self._every_s:
                return self._content
            self._asked_at, state = asked_at, self._now()
            if state != self._state:
                self._state = state
                try:
                    self._content = self._read()
                except ConfigError as problem:
                    log.warning("%s; what was read before stays in force", problem)
            return self._content

    def _now(self) -> State:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

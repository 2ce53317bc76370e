"""Files that last: whole or not there, whenever the process or the machine stops.

The order is always the same: write to a temporary file, synchronise it, rename it, synchronise the directory. A reader
therefore sees the old file or the new one, never a part of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["TEMPORARY", "sync_directory", "write_durably"]

TEMPORARY = ".tmp"


def sync_directory(folder: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(
    path: Path, *data: bytes | memoryview, mode: int = 0o666, written: Callable[[], None] = lambda: None
) -> None:
    """Write a whole file so that it is there, complete, after any crash; or not at all.

    Parameters
    ----------
    path
        The file's final name; an older file of that name is replaced in one step.
    data
        Its content, in one piece or several.
    mode
        Its permissions, less the process's umask; they hold before the first byte is written.
    written
        Called when the content is durable under its temporary name (a fault point).

    Raises
    ------
    OSError
        The old state stands, and the temporary file is gone.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed; its permissions may be others
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(descriptor)
        written()
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)

"""``log/*.jsonl``: what was begun and what came out, one line each, durable when it is written.

Every process that records has a file of its own, which it alone appends to; they are read together. A line that a crash
cut short is no line. A begun run without an outcome was interrupted: it is run again, and its first attempt counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from types import TracebackType

from common.durable import sync_directory
from common.errors import RunFolderInUse, StoreDamaged, StoreUnwritable
from deploy.sweep.results import Row

__all__ = ["FOLDER", "Recorded", "Recorder", "recorded"]

FOLDER = "log"


class Recorded:
    """What all logs of a sweep say.

    Attributes
    ----------
    rows
        The last outcome of each run, by key.
    begun
        How often each was begun.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.begun: Counter[str] = Counter()

    def row(self, key: str) -> Row | None:
        """The outcome of a run, with its attempts."""
        row = self.rows.get(key)
        return None if row is None else row.tried(self.begun[key])


def recorded(folder: Path) -> Recorded:
    """Read the logs of a sweep's folder.

    Raises
    ------
    StoreDamaged
        A whole line is none that was written here.
    """
    found = Recorded()
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            if not line:  # ends what a crash had cut short
                continue
            try:
                entry = json.loads(line)
                if "begun" in entry:
                    found.begun[entry["begun"]] += 1
                elif "cut" not in entry:
                    row = Row(**entry["row"])
                    before = found.rows.get(row.key)
                    found.rows[row.key] = before if before is not None and before.done and not row.done else row
            except (ValueError, TypeError, KeyError) as problem:
                raise StoreDamaged(
                    f"{path}, line {number}: not a line of this log ({problem}); delete the line: its run is run again"
                ) from None
    return found


class Recorder:
    """Appends to one log; the lock of its file keeps a second process out.

    Raises
    ------
    RunFolderInUse
        Another process records under this name.
    StoreUnwritable
        The folder cannot be written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / FOLDER / f"{name}.jsonl"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise RunFolderInUse(
                    f"{folder}: another sweep is at work there; wait for it, stop it, or choose another --out"
                ) from None
            sync_directory(self._path.parent)
            self._mend()
        except OSError as problem:
            raise StoreUnwritable(
                f"{self._path}: cannot be written: {problem.strerror}; choose another --out"
            ) from None

    def begun(self, key: str) -> None:
        """A run begins now."""
        self._append({"begun": key})

    def ended(self, row: Row) -> None:
        """A run has ended."""
        self._append({"row": row.as_json()})

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _append(self, entry: dict[str, object]) -> None:
        try:
            os.write(self._descriptor, json.dumps(entry, sort_keys=True).encode() + b"\n")
            os.fsync(self._descriptor)
        except OSError as problem:
            raise StoreUnwritable(
                f"{self._path}: cannot be written: {problem.strerror}; free some space and start the sweep again: it "
                "goes on where it was"
            ) from None

    def _mend(self) -> None:
        """Cut off what a crash left of a last line."""
        size = os.fstat(self._descriptor).st_size
        whole = os.pread(self._descriptor, size, 0).rfind(b"\n") + 1
        if whole < size:
            os.ftruncate(self._descriptor, whole)
            os.fsync(self._descriptor)

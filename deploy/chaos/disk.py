"""A run folder with a file system of its own, so that it can be full without the machine's being full.

It is a tmpfs, mounted for as long as the run lasts; at the end its content is copied to where the folder really lies.
A helper process unmounts it should the lab be killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import RunFailed

__all__ = ["SmallDisk", "problem_with_mounting"]

FILLER = "filler"
COMMAND_S = 20.0
_BLOCKS = (1 << 20, 1 << 12)
_WATCH = "import subprocess, sys; sys.stdin.read(); subprocess.run(['umount', '-l', sys.argv[1]], capture_output=True)"


def problem_with_mounting() -> str | None:
    """Why no file system can be mounted here; None if it can. A mount is tried, and taken away."""
    with tempfile.TemporaryDirectory(prefix="byzuldp-") as name:
        try:
            _run("mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "byzuldp-chaos", name)
        except RunFailed as problem:
            return f"{problem}; it needs root, or `unshare -Urm byzuldp chaos …`"
        _run("umount", name)
    return None


class SmallDisk:
    """Mounts a small file system at a run folder that is still empty.

    Raises
    ------
    RunFailed
        It cannot be mounted.
    """

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder, self.size_mb = folder, size_mb
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "byzuldp-chaos", str(folder))
        self._mounted = True
        self._watch = subprocess.Popen(  # noqa: S603 - fixed words
            [sys.executable, "-I", "-c", _WATCH, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def fill(self) -> int:
        """Leave no room; returns the bytes that were taken."""
        descriptor = os.open(self.folder / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        written = 0
        try:
            for block in _BLOCKS:
                with contextlib.suppress(_Full):
                    while True:
                        written += _write(descriptor, bytes(block))
        finally:
            os.close(descriptor)
        return written

    def free(self) -> None:
        """Give the room back."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount, and leave what was in it in the folder. Call it when no process has a file open there."""
        if not self._mounted:
            return
        self._mounted = False
        self.free()
        with tempfile.TemporaryDirectory(prefix=f"{self.folder.name}-", dir=self.folder.parent) as name:
            copy = Path(name) / "content"
            try:
                shutil.copytree(self.folder, copy, symlinks=True)
            finally:
                if self._watch.stdin is not None:
                    self._watch.stdin.close()  # it unmounts
                self._watch.wait(COMMAND_S)
            for item in copy.iterdir():
                shutil.move(item, self.folder / item.name)


class _Full(Exception):
    pass


def _write(descriptor: int, data: bytes) -> int:
    try:
        return os.write(descriptor, data)
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise _Full from None
        raise


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)  # noqa: S603
    except OSError as problem:
        raise RunFailed(f"{words[0]} cannot be run: {problem.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(words)}: not done after {COMMAND_S:.0f} s") from None
    if done.returncode:
        raise RunFailed(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")

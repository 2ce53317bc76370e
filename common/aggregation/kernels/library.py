"""Compile C++ with the system's compiler, keep the library in the user's cache, load it.

A library runs with the user's rights, so it comes only from a folder that nobody else can write to: each folder on the
way to it belongs to the user or to root, and is closed to others (or sticky, like /tmp). A file is written under
another name and renamed, so that processes that compile at once do not disturb each other, and carries a digest of
itself, so that a damaged one is compiled again instead of loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

__all__ = ["Unavailable", "cache_folder", "load_library"]

_TIMEOUT_S = 120.0
_STALE_S = 3600.0  # a file half written for so long has no writer any more
_DIGEST = hashlib.sha256
_MARK = b"byzuldp:sha256:"


class Unavailable(Exception):
    """Why there is no compiled kernel. Callers take the plain path."""


def load_library(source: str, *, optimisation: str) -> ctypes.CDLL:
    """The shared library of that source, compiled now unless the cache has it.

    Parameters
    ----------
    source
        C++17 that needs the standard library and threads.
    optimisation
        ``-O1``, …

    Raises
    ------
    Unavailable
        There is no compiler, it failed, or no folder is safe to load from.
    """
    compiler = _compiler()
    parts = [source, optimisation, *compiler, _version(tuple(compiler)), _processor()]
    path = cache_folder() / f"{_DIGEST(chr(0).join(parts).encode()).hexdigest()[:32]}.so"
    if not _intact(path):
        _compile(compiler, source, optimisation, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # an intact file of another C library, for example
        raise Unavailable(f"cannot load {path}: {error}") from error


def cache_folder() -> Path:
    """Where libraries are kept: made if need be, and safe to load from.

    Raises
    ------
    Unavailable
        Neither the user's cache nor a folder of this process alone can be used.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = base
        for name in ("byzuldp", "kernels"):  # one by one: mkdir's mode is that of the last folder only
            folder /= name
            folder.mkdir(mode=0o700, exist_ok=True)
        if _safe(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return _folder_of_this_process()


@lru_cache(maxsize=1)
def _folder_of_this_process() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="byzuldp-kernels-"))
    except OSError as error:
        raise Unavailable(f"no folder for compiled kernels: {error}") from error
    atexit.register(_remove, folder, os.getpid())
    if not _safe(folder):
        raise Unavailable(f"{folder} is open to other users: set XDG_CACHE_HOME to a folder of your own")
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _safe(folder: Path) -> bool:
    """Whether nobody but the user and root can put a file there, or another folder in its place."""
    folder = folder.resolve()
    for step in (folder, *folder.parents):
        info = step.stat()
        sticky = step != folder and info.st_mode & stat.S_ISVTX
        if info.st_uid not in (os.getuid(), 0) or (info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky):
            return False
    return True


def _intact(path: Path) -> bool:
    try:
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.getuid(), 0) or info.st_mode & 0o022:
            return False
        content, _, digest = path.read_bytes().rpartition(_MARK)
    except OSError:
        return False
    return _DIGEST(content).digest() == digest


def _compile(compiler: list[str], source: str, optimisation: str, path: Path) -> None:
    try:
        _remove_stale(path.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as scratch:
            made = Path(scratch) / "kernel.so"
            text = Path(scratch) / "kernel.cpp"
            text.write_text(source)
            for target in _targets():
                command = [*compiler, "-std=c++17", optimisation, *target, "-fPIC", "-shared", "-pthread"]
                command += ["-ffp-contract=off", "-w", "-o", str(made), str(text)]
                done = subprocess.run(  # noqa: S603 - the compiler found on the path, no shell
                    command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
                )
                if done.returncode == 0:
                    break
            else:
                raise Unavailable(f"{shlex.join(compiler)} failed: {done.stderr.strip()[-2000:]}")
            content = made.read_bytes()
            made.write_bytes(content + _MARK + _DIGEST(content).digest())
            made.chmod(0o700)
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"cannot compile a kernel: {error}") from error


def _targets() -> list[list[str]]:
    """Flags for this processor, then none."""
    return [["-march=native"] if platform.machine() in ("x86_64", "AMD64", "i686") else ["-mcpu=native"], []]


def _remove_stale(folder: Path) -> None:
    """What processes that were killed while they compiled have left."""
    for left in folder.glob(".making-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _compiler() -> list[str]:
    """The command: CXX if set, else the first of the usual names."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in [chosen[0]] if chosen else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return [found, *chosen[1:]]
    raise Unavailable(f"no C++ compiler: {chosen[0] if chosen else 'c++, g++ and clang++'} not found on the path")


@lru_cache(maxsize=8)
def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler found on the path, no shell
            [*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{shlex.join(compiler)} --version: {error}") from error
    return done.stdout


@lru_cache(maxsize=1)
def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    kinds = {platform.machine(), platform.processor(), platform.libc_ver()[1]}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() in ("flags", "Features", "model name", "CPU part", "CPU implementer"):
                kinds.add(line)
    return "\n".join(sorted(kinds))

"""Linux namespaces, which Python 3.11 has no calls for: ``unshare`` and ``setns`` of the C library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["CLONE_NEWNET", "CLONE_NEWNS", "CLONE_NEWUSER", "enter", "unshare"]

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000


def enter(path: Path, kind: int) -> None:
    """Move this thread, and all that it starts later, into the namespace that a file stands for.

    Parameters
    ----------
    kind
        What it must be, for instance :data:`CLONE_NEWNET`.

    Raises
    ------
    OSError
        There is no such namespace, or entering it is not allowed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, kind)
    except OSError as problem:
        raise OSError(problem.errno, f"cannot enter {path}: {problem.strerror}") from None
    finally:
        os.close(descriptor)


def unshare(flags: int) -> None:
    """Give this thread, and all that it starts later, new namespaces.

    Raises
    ------
    OSError
        Not allowed; with :data:`CLONE_NEWUSER` also when this process has several threads.
    """
    _call("unshare", flags)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*map(ctypes.c_int, arguments)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

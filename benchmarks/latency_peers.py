"""Environments of their own for the peers: ``benchmarks/.bench/NAME``, made on first use, each with one Flower.

They never enter the project's own environment, and see nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["CURRENT", "LEGACY", "interpreter"]

LEGACY = "flwr==1.13.1"
"""The last releases with a server and clients that talk gRPC directly; the fastest Flower measured."""
CURRENT = "flwr==1.42.0"
"""SuperLink and SuperNodes."""

_FOLDER = Path(__file__).resolve().parent / ".bench"


def interpreter(requirement: str) -> Path:
    """The Python that has it."""
    folder = _FOLDER / requirement.replace("==", "-")
    python, stamp = folder / "bin" / "python", folder / "ready"
    wanted = f"{sys.version}\n{requirement}\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {requirement} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        (_FOLDER / ".gitignore").write_text("*\n")
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return python

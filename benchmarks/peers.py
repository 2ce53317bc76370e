"""An environment of its own for what we measure ourselves against, beside the project's, whose torch it shares.

``python benchmarks/aggregation.py`` calls :func:`inside`, which makes ``benchmarks/.peers`` on first use and goes on
there. The peers never enter the project's own environment.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["PEERS", "inside"]

PEERS = ("byzfl==0.0.11", "flwr==1.42.0")

_HERE = Path(__file__).resolve().parent
_FOLDER = _HERE / ".peers"
_PYTHON = _FOLDER / "bin" / "python"
_STAMP = _FOLDER / "ready"
_MARK = "BYZULDP_PEERS"


def inside() -> None:
    """Return if this process runs in the environment of the peers; else make it, and become such a process."""
    if os.environ.get(_MARK):
        return
    wanted = "\n".join([sys.version, *PEERS, *site.getsitepackages()])
    if not _STAMP.exists() or _STAMP.read_text() != wanted:
        _make(wanted)
    environment = {**os.environ, _MARK: "1", "PYTHONPATH": str(_HERE.parent)}
    os.execve(_PYTHON, [str(_PYTHON), *sys.argv], environment)  # noqa: S606 - the interpreter just made


def _make(wanted: str) -> None:
    print(f"installing {', '.join(PEERS)} into {_FOLDER}", flush=True)
    venv.create(_FOLDER, with_pip=True, clear=True)
    (_FOLDER / ".gitignore").write_text("*\n")
    # Whatever the peers have no version of their own of comes from the project's environment: torch above all.
    (own,) = (_FOLDER / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
    (own / "project.pth").write_text("\n".join(lines) + "\n")
    command = [str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS]
    subprocess.run(command, check=True)
    _STAMP.write_text(wanted)

"""What clients were sent, written down: the evidence for "no model was published twice".

A client that is sent a model of an earlier round, or another one of the same round, refuses it and ends with a status
of its own, which the lab holds against the run. What it accepted is written down here, so that what different clients
were sent, and what their different lives were, can be compared with each other and with the ledger.

A line of JSON for each model, in one file a process, appended by a single ``write``: a process that is killed leaves
at most its last line unfinished. There is nothing of a client in it; a model that was published is public.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import StoreDamaged

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Recorder", "Sighting", "recorded", "recording_file"]


@dataclass(frozen=True)
class Sighting:
    """A model as it came: its round, SHA-256 of its parameters, and the ledger's head beside it, both in hex."""

    round_id: int
    sha256: str
    head: str


def recording_file(run_dir: Path, name: str) -> Path:
    """Where a process of the run in ``run_dir`` records: beside the run folder, whose disk may be full."""
    return run_dir.with_name(f"{run_dir.name}-seen") / f"{name}.jsonl"


class Recorder:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, round_id: int, theta: np.ndarray[Any, Any], head: bytes) -> None:
        """A model has come."""
        seen = Sighting(round_id, sha256(theta.tobytes()).hexdigest(), head.hex())
        os.write(self._descriptor, json.dumps(asdict(seen)).encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recorded(run_dir: Path) -> dict[str, list[Sighting]]:
    """What each process was sent, in the order in which it came.

    Raises
    ------
    StoreDamaged
        A line is none of ours.
    """
    found: dict[str, list[Sighting]] = {}
    for path in sorted(recording_file(run_dir, "any").parent.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            found[path.stem] = [Sighting(**json.loads(line)) for line in lines if line.endswith("\n")]
        except (TypeError, ValueError) as problem:
            raise StoreDamaged(f"{path}: holds a line that the recorder did not write ({problem})") from None
    return found

"""The layout of a run folder: what is made when it is created, and what is checked and cleared when it is taken up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import RunFolderExists, StoreDamaged
from ps import journal
from ps.durable import TEMPORARY, explaining, sync_directory, write_durably
from ps.tensors import strays

__all__ = ["EXPERIMENT", "LOCK", "MODELS", "check_experiment", "clear", "lay_out", "refuse_orphans", "write_experiment"]

EXPERIMENT = "experiment.json"
LOCK = "lock"
MODELS = "models"


def lay_out(folder: Path) -> None:
    """Make the folder, its parents and its rooms."""
    with explaining(folder, "create the run folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MODELS, "public", "operator"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "operator").chmod(0o700)
        sync_directory(folder)
        sync_directory(folder.parent)


def write_experiment(folder: Path, configuration: Mapping[str, Any]) -> None:
    """Write the readable copy of the configuration."""
    with explaining(folder / EXPERIMENT, "store the configuration"):
        text = json.dumps(configuration, indent=2, allow_nan=False)
        write_durably(folder / EXPERIMENT, f"{text}\n".encode())


def check_experiment(folder: Path, configuration: Mapping[str, Any]) -> None:
    """The readable copy must say what the database says; a lost one is written again.

    Raises
    ------
    StoreDamaged
        Somebody changed it: going on as if nothing had been asked for would be wrong, and so would obeying.
    """
    path = folder / EXPERIMENT
    if not path.exists():
        write_experiment(folder, configuration)
        return
    with explaining(path, "read the stored configuration"):
        text = path.read_bytes()
    try:
        same = json.loads(text) == configuration
    except ValueError:
        same = False
    if not same:
        raise StoreDamaged(
            f"{path}: not the configuration this run was started with, and a run keeps its configuration; delete the "
            "file to go on (it is written again), or start another run in another --run-dir"
        )


def refuse_orphans(folder: Path) -> None:
    """Refuse to begin a run where one has lost its database; the ledger went with it.

    Raises
    ------
    RunFolderExists
        There is an ``experiment.json`` and no ``run.sqlite``.
    """
    if (folder / EXPERIMENT).exists() and not (folder / journal.FILE).exists():
        raise RunFolderExists(
            f"{folder}: holds {EXPERIMENT} of a run, but its {journal.FILE} is missing; restore that file and continue "
            "with --resume, or choose another --run-dir"
        )


def clear(folder: Path, last: int, keep: int) -> None:
    """Remove temporary files, a model whose commit was cut short, and models too old to keep.

    Parameters
    ----------
    last
        The last committed round; −1 when there is none.
    keep
        How many committed models stay.

    Raises
    ------
    StoreDamaged
        There are models the ledger does not know. One round beyond it is a commit that was cut short; more means
        that the database is older than the folder, and going on would release those rounds a second time.
    """
    models = folder / MODELS
    with explaining(models, "clean up after an interrupted round"):
        found = strays(models)
        newest = max((made for made in found.values() if made is not None), default=last)
        if newest > last + 1:
            raise StoreDamaged(
                f"{folder / journal.FILE}: {f'ends at round {last}' if last >= 0 else 'is empty'}, but {MODELS}/ holds "
                f"round {newest}: the database is older than its folder (restored, or its -wal file deleted?); restore "
                "the whole folder as it was, or choose another --run-dir; going on would release rounds twice"
            )
        for path, made in found.items():
            if made is None or not last - keep < made <= last:
                path.unlink()
        (folder / (EXPERIMENT + TEMPORARY)).unlink(missing_ok=True)
        sync_directory(models)

"""The layout of a run folder: what is made when it is created, and what is checked and cleared when it is taken up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.durable import TEMPORARY, sync_directory, write_durably
from common.errors import RunFolderExists, StoreDamaged
from ps import journal
from ps.durable import explaining
from ps.tensors import models_in, settle, unsettled_in

__all__ = [
    "EXPERIMENT",
    "LOCK",
    "MODELS",
    "check_experiment",
    "clear",
    "lay_out",
    "newest_model",
    "refuse_orphans",
    "refuse_rollback",
    "write_experiment",
]

EXPERIMENT = "experiment.json"
LOCK = "lock"
MODELS = "models"


def lay_out(folder: Path) -> None:
    """Make the folder, its parents and its rooms."""
    with explaining(folder, "create the run folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MODELS, "public", "operator"):
            (folder / name).mkdir(exist_ok=True)
        for private in (MODELS, "operator"):
            (folder / private).chmod(0o700)
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


def newest_model(folder: Path) -> int:
    """The round of the newest committed model file; −1 when there is none."""
    models = folder / MODELS
    with explaining(models, "look for models of later rounds"):
        return max(models_in(models).values(), default=-1) if models.is_dir() else -1


def refuse_rollback(folder: Path, last: int, newest: int | None = None) -> None:
    """Refuse a database that has forgotten rounds which its folder remembers.

    SQLite itself does not notice: a write-ahead log that was cut off, or damaged anywhere, simply ends there.

    Parameters
    ----------
    last
        The last committed round; −1 when there is none.
    newest
        As :func:`newest_model` gave it *before* the database was read, where a server may be at work.

    Raises
    ------
    StoreDamaged
        There is the model of a later committed round. Going on would release that round a second time.
    """
    newest = newest_model(folder) if newest is None else newest
    if newest > last:
        raise StoreDamaged(
            f"{folder / journal.FILE}: {f'ends at round {last}' if last >= 0 else 'is empty'}, but {MODELS}/ holds "
            f"round {newest}: the database is older than its folder (restored, or its -wal file damaged or deleted?); "
            "restore the whole folder as it was, or choose another --run-dir; going on would release rounds twice"
        )


def clear(folder: Path, last: int, keep: int) -> None:
    """Finish or remove what an interrupted round left, and remove models too old to keep.

    Call :func:`refuse_rollback` before.

    Parameters
    ----------
    last
        The last committed round; −1 when there is none.
    keep
        How many committed models stay.
    """
    models = folder / MODELS
    with explaining(models, "clean up after an interrupted round"):
        settle(models, last)
        for path in unsettled_in(models):
            path.unlink()
        for path, made in models_in(models).items():
            if made <= last - keep:
                path.unlink()
        (folder / (EXPERIMENT + TEMPORARY)).unlink(missing_ok=True)
        sync_directory(models)

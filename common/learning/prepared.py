"""A data set's decoded arrays on disk, shared by all processes of a machine.

    <root>/prepared/<name>/meta.json
                          train-images.npy  train-labels.npy  test-images.npy  test-labels.npy

They are written once, into a folder of another name that is then renamed, so that whoever looks sees all or nothing.
Opening them is cheap: memory maps, whose pages all processes share, checked by shape, type and size. The content's
SHA-256 is checked after writing and by :func:`prepare_dataset` on what is already there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.learning.readers import TORCHVISION_NAMES, decode
from common.learning.sources import RAW_SETS, fetch_raw

__all__ = [
    "DEFAULT_ROOT",
    "Damaged",
    "Prepared",
    "canonical_name",
    "open_prepared",
    "prepare_dataset",
    "prepared_folder",
]

FORMAT = 1
DEFAULT_ROOT = Path("data")
_ARRAYS = ("train-images", "train-labels", "test-images", "test-labels")


class Damaged(Exception):
    """A prepared folder is not what its meta.json says."""


@dataclass(frozen=True)
class Prepared:
    """Read-only memory maps and what belongs to them."""

    arrays: dict[str, np.ndarray]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def canonical_name(name: str) -> str:
    """torchvision's class names of the sets that have a name of ours become ours."""
    ours = {theirs: name for name, theirs in TORCHVISION_NAMES.items()}
    return ours.get(name, name)


def prepared_folder(name: str, root: Path) -> Path:
    return root / "prepared" / canonical_name(name).replace("/", "-")


def prepare_dataset(
    name: str, root: Path | None, say: Callable[[str], None] = lambda _: None, *, again: bool = False
) -> Path:
    """Fetch a data set where that is possible, decode it, and store its arrays.

    Safe when several processes call it at once: one works, the others wait for it. What is prepared already is checked
    in full (SHA-256) and left as it is, unless ``again``: use that after changing an image folder.

    Parameters
    ----------
    name
        As in :func:`common.learning.readers.decode`.
    root
        The data folder; None is ``./data``.
    say
        Told in a sentence what is being done.
    again
        Decode once more, and replace what is there.

    Returns
    -------
    Path
        The prepared folder.

    Raises
    ------
    DataError
        The data is missing, damaged or unsuitable, or the folder cannot be written.
    """
    name, root = canonical_name(name), DEFAULT_ROOT if root is None else Path(root)
    folder = prepared_folder(name, root)
    with _only_one(folder):
        if not again and folder.exists():
            try:
                open_prepared(folder, content=True)
            except Damaged as problem:
                say(f"{name}: {problem}; preparing it again")
            else:
                say(f"{name}: prepared in {folder}")
                return folder
        if name in RAW_SETS:
            fetch_raw(name, root, say)
        say(f"{name}: decoding")
        decoded = decode(name, root)
        arrays = dict(zip(_ARRAYS, (*decoded.train, *decoded.test), strict=True))
        facts = {"name": name, "num_classes": decoded.num_classes, "mean": decoded.mean, "std": decoded.std}
        try:
            _store(folder, arrays, facts)
        except OSError as problem:
            raise DataError(
                f"cannot write {folder}: {problem}; set data.root to a folder that can be written"
            ) from None
    say(f"{name}: prepared in {folder}")
    return folder


def open_prepared(folder: Path, *, content: bool = False) -> Prepared:
    """Map the arrays of a prepared folder.

    Parameters
    ----------
    folder
        As :func:`prepare_dataset` returned it.
    content
        Also compare the files' SHA-256.

    Raises
    ------
    FileNotFoundError
        Nothing is prepared there.
    Damaged
        A file is missing, or differs from meta.json in shape, type, size or content.
    """
    meta_file = folder / "meta.json"
    text = meta_file.read_text(encoding="utf-8")
    try:
        meta = json.loads(text)
        if meta["format"] != FORMAT:
            raise Damaged(f"{folder} has format {meta['format']}, this version writes {FORMAT}")
        arrays = {key: _map(folder / f"{key}.npy", meta["arrays"][key], content=content) for key in _ARRAYS}
        return Prepared(arrays, int(meta["num_classes"]), tuple(meta["mean"]), tuple(meta["std"]))
    except (ValueError, KeyError, TypeError, OSError) as problem:
        raise Damaged(f"{folder} is damaged ({type(problem).__name__}: {problem})") from None


def _map(file: Path, expected: dict[str, Any], *, content: bool) -> np.ndarray:
    if (size := file.stat().st_size) != expected["bytes"]:
        raise Damaged(f"{file} has {size} bytes, expected {expected['bytes']}")
    array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != expected["shape"] or array.dtype.str != expected["dtype"]:
        raise Damaged(f"{file} is {array.dtype} {array.shape}, expected {expected['dtype']} {expected['shape']}")
    if content and _digest(file) != expected["sha256"]:
        raise Damaged(f"{file} has another SHA-256 than when it was written")
    return array


def _store(folder: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write beside the target, then rename; a folder that was there is moved out of the way first."""
    for abandoned in folder.parent.glob(f".{folder.name}.work-*"):  # by a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.work-"))
    try:
        new, old = work / "new", work / "old"
        new.mkdir()
        described = {}
        for key, array in arrays.items():
            file = new / f"{key}.npy"
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            described[key] = {
                "shape": list(array.shape),
                "dtype": array.dtype.str,
                "bytes": file.stat().st_size,
                "sha256": _digest(file),
            }
            if not np.array_equal(np.load(file, mmap_mode="r"), array):
                raise OSError(f"{file.name} reads back differently")
        meta = {"format": FORMAT, **facts, "arrays": described}
        (new / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.rename(folder, old)  # processes that have it open keep their maps
        os.rename(new, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when the process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = open(folder.parent / f".{folder.name}.lock", "a")  # noqa: SIM115 - closed below
    except OSError as problem:
        raise DataError(f"cannot write in {folder.parent}: {problem}; set data.root to a folder that can be") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return file_digest(handle, "sha256").hexdigest()

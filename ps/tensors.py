"""The model files of a run folder: one safetensors file per round, whole or not there.

``models/model-<round>.safetensors`` holds the parameters θ under ``theta`` and the server momentum R under
``server_momentum``, both flat float32. Both are functions of what was released, so the file holds nothing un-noised.

Until its round is committed the file is called ``….safetensors.prepared``. So the folder itself tells a round that was
committed from one that was cut short, whatever has become of the database since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.durable import TEMPORARY, write_durably
from common.errors import StoreDamaged
from ps.durable import explaining

__all__ = ["FloatVector", "TensorFile", "file_name", "models_in", "read_model", "settle", "unsettled_in", "write_model"]

PREPARED = ".prepared"

THETA = "theta"
SERVER_MOMENTUM = "server_momentum"
HASHED_BESIDE = 1 << 20
"""Bytes from which copies and digest are made while the disk writes; below, starting a thread costs more."""

FloatVector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TensorFile:
    """What the committed row remembers of a model file."""

    name: str
    sha256: str
    size: int
    """Bytes."""
    parameters: int
    """d."""


def file_name(round_id: int) -> str:
    return f"model-{round_id}.safetensors"


def models_in(folder: Path) -> dict[Path, int]:
    """The models of committed rounds in ``models/``, with their rounds."""
    matches = {path: re.fullmatch(r"model-(\d+)\.safetensors", path.name) for path in sorted(folder.iterdir())}
    return {path: int(match[1]) for path, match in matches.items() if match}


def unsettled_in(folder: Path) -> list[Path]:
    """What interrupted rounds left in ``models/``: prepared models, and files that were being written."""
    return [path for path in sorted(folder.iterdir()) if path.name.endswith((PREPARED, TEMPORARY))]


def settle(folder: Path, round_id: int) -> None:
    """The round is committed: give its file its name, unless it has it.

    Not synchronised: should the machine stop now, the database knows better, and this is done again.
    """
    path = folder / file_name(round_id)
    if not path.exists():
        with suppress(FileNotFoundError):
            path.with_name(path.name + PREPARED).replace(path)


def _vectors(data: bytes) -> tuple[FloatVector, FloatVector]:
    """θ and R of a file's content, without a copy; they stand on a bytes object, so nobody can change them."""
    # The format (see _header): the header's length (8 bytes, little-endian), the header in JSON, the tensors.
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    vectors = []
    for key in (THETA, SERVER_MOMENTUM):
        if header[key]["dtype"] != "F32" or len(header[key]["shape"]) != 1:
            raise ValueError(f"{key} is not a float32 vector")
        first, end = header[key]["data_offsets"]
        vectors.append(np.frombuffer(data, dtype="<f4", offset=start + first, count=(end - first) // 4))
    return vectors[0], vectors[1]


def write_model(
    folder: Path, round_id: int, theta: FloatVector, momentum: FloatVector, *, written: Callable[[], None]
) -> tuple[TensorFile, FloatVector, FloatVector]:
    """Write the file of one round durably, as a prepared one: see :func:`settle`.

    Parameters
    ----------
    folder
        The run's ``models/``.
    theta, momentum
        θ and R, float32, shape ``(d,)``.
    written
        Called between writing and renaming (a fault point).

    Returns
    -------
    file, theta, server_momentum
        What to remember of the file, and copies of the vectors that nobody can change.

    Raises
    ------
    OSError
        Nothing was written.
    """
    vectors = [np.ascontiguousarray(vector, dtype="<f4") for vector in (theta, momentum)]
    header, name = _header(theta.size, round_id), file_name(round_id)
    data: list[bytes | memoryview] = [header, *(vector.data.cast("B") for vector in vectors)]
    path, size = folder / (name + PREPARED), sum(map(len, data))
    if size < HASHED_BESIDE:
        write_durably(path, *data, written=written)
        digest, *copies = _copied(header, vectors)
    else:
        with ThreadPoolExecutor(max_workers=1) as beside:
            copying = beside.submit(_copied, header, vectors)
            write_durably(path, *data, written=written)
            digest, *copies = copying.result()
    return TensorFile(name, digest, size, theta.size), copies[0], copies[1]


def _copied(header: bytes, vectors: Sequence[FloatVector]) -> tuple[str, *tuple[FloatVector, ...]]:
    """The digest of the file that has the header and the vectors, and these on memory that nobody can change."""
    digest, copies = sha256(header), list[FloatVector]()
    for vector in vectors:
        copy = vector.tobytes()
        digest.update(copy)
        copies.append(np.frombuffer(copy, dtype="<f4"))
    return digest.hexdigest(), *copies


def _header(parameters: int, round_id: int) -> bytes:
    """Of a file with both vectors. ``safetensors.numpy.save`` copies them more often, for as long as the disk takes."""
    size = 4 * parameters
    header = {
        "__metadata__": {"round": str(round_id)},
        THETA: {"dtype": "F32", "shape": [parameters], "data_offsets": [0, size]},
        SERVER_MOMENTUM: {"dtype": "F32", "shape": [parameters], "data_offsets": [size, 2 * size]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def read_model(folder: Path, expected: TensorFile) -> tuple[FloatVector, FloatVector]:
    """Read θ and R of a committed round, and check them against the row that was committed.

    Returns
    -------
    theta, server_momentum
        Read-only, float32, shape ``(d,)``.

    Raises
    ------
    StoreDamaged
        The file is missing, torn or changed.
    """
    path = folder / expected.name
    # Never advise an older model: going on from it would noise a round a second time, and charge it once.
    remedy = (
        "restore this file from a backup; the run cannot go on from an older model, which would release a round "
        "twice, and a new run needs another --run-dir"
    )
    data = None
    with explaining(path, "read the model of the last committed round"):
        # A server that died between its commit and settle() left the prepared file; one that lives may rename it now.
        for candidate in (path, path.with_name(path.name + PREPARED), path):
            if data is None and candidate.is_file():
                with suppress(FileNotFoundError):
                    data = candidate.read_bytes()
    if data is None:
        raise StoreDamaged(f"{path}: the model of the last committed round is missing; {remedy}")
    if len(data) != expected.size:
        raise StoreDamaged(f"{path}: torn: {len(data)} bytes, but {expected.size} were committed; {remedy}")
    found = sha256(data).hexdigest()
    if found != expected.sha256:
        raise StoreDamaged(
            f"{path}: changed since it was committed: SHA-256 {found[:12]}…, expected {expected.sha256[:12]}…; {remedy}"
        )
    theta, server_momentum = _vectors(data)
    if not theta.size == server_momentum.size == expected.parameters:
        raise StoreDamaged(f"{path}: expected two vectors of {expected.parameters} entries; {remedy}")
    return theta, server_momentum

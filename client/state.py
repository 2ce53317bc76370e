"""A client process's state: one file, whole or not there, that survives its process.

It holds each identity's momentum with the round it belongs to, the latest round and ledger head seen of every run, and
the privacy total of all runs (:mod:`client.lifetime`). It holds no random state: every sampling stream is keyed by
(seed, purpose, client, round), so a client that comes back draws the same batches.

``PATH`` is a safetensors file of mode 0600: momenta as tensors ``m.<identity>``, all else as JSON in its header, and a
SHA-256 over the whole file. Whatever is torn or changed is refused, never repaired or ignored: the privacy total would
be lost with it. ``PATH.seen``, beside it, is the lock, and holds the latest model seen (:class:`client.memory.Seen`):
written in place each round without synchronisation, in microseconds. It survives the death of the process, and may be
lost or torn when the machine loses power; then the state's own, at most ``client.persist_every`` rounds older, counts.

So what is *not* noticed: a parameter server restored to a state that is newer than the last one this client had
persisted when its machine lost power; and whatever was released in rounds of which this client never saw the model.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from client.lifetime import Lifetime
from client.memory import NEVER, Held, Seen
from common.durable import write_durably
from common.errors import RunFolderInUse, StoreDamaged, StoreUnwritable

__all__ = ["Contents", "StateFile", "decode", "encode"]

log = logging.getLogger("byzuldp.client")

FORMAT = 1
_TENSOR = "m."
_BLANK = "0" * 64
_SLOT_BYTES = 512  # one sector, so that it is not torn but for a power failure
_SLOT_AT = 512  # after the process id


@dataclass(frozen=True, eq=False)
class Contents:
    """What a client process remembers.

    Attributes
    ----------
    run_id
        The run the momenta belong to.
    momenta
        Of each identity.
    seen
        By run id.
    """

    run_id: str = ""
    momenta: Mapping[int, Held] = field(default_factory=dict, repr=False)
    seen: Mapping[str, Seen] = field(default_factory=dict)
    lifetime: Lifetime = field(default_factory=Lifetime)


def encode(contents: Contents) -> bytes:
    """The file's bytes."""
    record = {
        "format": FORMAT,
        "run_id": contents.run_id,
        "rounds": {str(client_id): held.round_id for client_id, held in contents.momenta.items()},
        "seen": {run_id: [seen.round_id, seen.head.hex()] for run_id, seen in contents.seen.items()},
        "lifetime": contents.lifetime.to_json(),
    }
    tensors = {
        f"{_TENSOR}{client_id}": np.ascontiguousarray(held.momentum, dtype="<f4")
        for client_id, held in contents.momenta.items()
    }
    data = save(tensors, metadata={"sha256": _BLANK, "state": json.dumps(record)})
    return data.replace(_digest_field(_BLANK), _digest_field(sha256(data).hexdigest()), 1)


def decode(data: bytes) -> Contents:
    """The inverse of :func:`encode`.

    Raises
    ------
    ValueError
        These are not the bytes that :func:`encode` made, or another version's; the message says which.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        metadata = header["__metadata__"]
        digest, record = str(metadata["sha256"]), json.loads(metadata["state"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"its {len(data)} bytes are not those of a client's state") from None
    if sha256(data.replace(_digest_field(digest), _digest_field(_BLANK), 1)).hexdigest() != digest:
        raise ValueError("its SHA-256 is not the one it names: it is torn, or was changed")
    if record.get("format") != FORMAT:
        raise ValueError(f"it has format {record.get('format')!r}, this version reads {FORMAT}")
    momenta = {}
    for client_id, round_id in record["rounds"].items():
        first, end = header[f"{_TENSOR}{client_id}"]["data_offsets"]
        vector = np.frombuffer(data, dtype="<f4", offset=start + first, count=(end - first) // 4)
        momenta[int(client_id)] = Held(round_id, vector)
    seen = {run_id: Seen(round_id, bytes.fromhex(head)) for run_id, (round_id, head) in record["seen"].items()}
    return Contents(record["run_id"], momenta, seen, Lifetime.from_json(record["lifetime"]))


class StateFile:
    """One process's state, locked for as long as it is open.

    Parameters
    ----------
    path
        The file; one that is not there yet is begun.

    Attributes
    ----------
    contents
        As read at the opening or last written; what was written without its momenta, which would be held in vain.

    Raises
    ------
    RunFolderInUse
        Another process has it open.
    StoreDamaged
        It is not what was written, or gone.
    StoreUnwritable
        The operating system refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._slot_path = path, path.with_name(path.name + ".seen")
        self._descriptor = self._lock()
        try:
            self.contents = self._load()
        except BaseException:
            self.close()
            raise

    def write(self, contents: Contents) -> None:
        """Replace the contents, durably.

        Raises
        ------
        StoreUnwritable
            The old ones stand.
        """
        try:
            write_durably(self.path, encode(contents), mode=0o600)
        except OSError as problem:
            raise self._unusable(problem, "write the client's state", self.path) from problem
        self.contents = replace(contents, momenta={})

    def note(self, run_id: str, seen: Seen) -> None:
        """Remember the latest model seen, for as long as the machine runs: no wait for the disk.

        Raises
        ------
        StoreUnwritable
            It could not be written.
        """
        text = json.dumps([run_id, seen.round_id, seen.head.hex()])
        try:
            os.pwrite(self._descriptor, f"{_sum(text)} {text}".ljust(_SLOT_BYTES - 1).encode() + b"\n", _SLOT_AT)
        except OSError as problem:
            raise self._unusable(problem, "note the round seen", self._slot_path) from problem

    def close(self) -> None:
        """Release the lock; closing twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> int:
        descriptor = -1
        try:
            descriptor = os.open(self._slot_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, f"{os.getpid()}\n".ljust(_SLOT_AT).encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").partition("\n")[0]
            os.close(descriptor)
            raise RunFolderInUse(
                f"{self.path}: another client process ({holder or 'unknown'}) has this state open; each needs its own: "
                "stop that one, or name another file with --state"
            ) from None
        except OSError as problem:
            if descriptor >= 0:
                os.close(descriptor)
            raise self._unusable(problem, "open the client's state", self._slot_path) from problem
        return descriptor

    def _load(self) -> Contents:
        blank, noted = self._noted()
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            if not blank:
                raise self._damaged(f"is missing, and {self._slot_path.name} shows that there was one") from None
            return Contents()
        except OSError as problem:
            raise self._unusable(problem, "read the client's state", self.path) from problem
        try:
            contents = decode(data)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise self._damaged(f"is damaged: {problem}") from None
        if noted is None:
            if not blank:
                log.warning(
                    "%s: the latest round seen is not readable, as after a power failure; a parameter server that went "
                    "back to one of the last rounds before it is not noticed",
                    self._slot_path,
                )
            return contents
        run_id, seen = noted
        latest = max(seen, contents.seen.get(run_id, NEVER), key=lambda known: known.round_id)
        return replace(contents, seen={**contents.seen, run_id: latest})

    def _noted(self) -> tuple[bool, tuple[str, Seen] | None]:
        """Whether :meth:`note` was never called, and what it wrote last, if that is whole."""
        text = os.pread(self._descriptor, _SLOT_BYTES, _SLOT_AT).decode(errors="replace").strip()
        checksum, _, rest = text.partition(" ")
        if checksum != _sum(rest):
            return not text, None
        run_id, round_id, head = json.loads(rest)
        return False, (run_id, Seen(round_id, bytes.fromhex(head)))

    def _damaged(self, why: str) -> StoreDamaged:
        return StoreDamaged(
            f"{self.path}: the client's state {why}. Restore it from a backup; or, if you accept that the privacy "
            f"total of all earlier runs is lost with it, delete it and {self._slot_path.name} to begin anew"
        )

    def _unusable(self, problem: OSError, doing: str, path: Path) -> StoreUnwritable:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "make its folder there and writable for this user"
        cause = problem.strerror or str(problem)
        return StoreUnwritable(f"{path}: cannot {doing}: {cause}; {remedy}, or name another file with --state")


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _sum(text: str) -> str:
    return sha256(text.encode()).hexdigest()

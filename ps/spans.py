"""What happened during a round, beside its critical path: transfers, training, drawing the noise.

Spans may overlap, and are never summed; the round's *segments* are what adds up to its latency. A round of n clients
has about 3 n spans, so they are kept as packed records, not as text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["NAMES", "Span", "pack", "unpack"]

NAMES = ("download", "training", "upload", "conditioning", "noise")
"""Model to a client; its own account of its computing, which nobody has verified; momentum from it, first byte to
last; what the server did to the momentum; the noise being drawn."""

_RECORD = struct.Struct("<BiffQ")
_NOBODY = -1


class Span(NamedTuple):
    """Something that took time.

    Attributes
    ----------
    name
        One of :data:`NAMES`.
    client_id
        Whose; None for the server's own.
    start_s
        After θ_t was available.
    seconds
        How long it took.
    num_bytes
        Payload that travelled.
    """

    name: str
    client_id: int | None
    start_s: float
    seconds: float
    num_bytes: int = 0


def pack(spans: Iterable[Span]) -> bytes:
    """As records of 21 bytes."""
    index, packed = _INDEX, _RECORD.pack
    return b"".join(
        packed(index[name], _NOBODY if client_id is None else client_id, start_s, seconds, num_bytes)
        for name, client_id, start_s, seconds, num_bytes in spans
    )


def unpack(data: bytes) -> Sequence[Span]:
    """The spans of :func:`pack`; times have the precision of float32.

    Raises
    ------
    ValueError
        The bytes are no such records.
    """
    if len(data) % _RECORD.size:
        raise ValueError(f"{len(data)} bytes are no whole number of spans")
    return [
        Span(_name(index), None if client_id == _NOBODY else client_id, start_s, seconds, num_bytes)
        for index, client_id, start_s, seconds, num_bytes in _RECORD.iter_unpack(data)
    ]


_INDEX = {name: index for index, name in enumerate(NAMES)}


def _name(index: int) -> str:
    if index >= len(NAMES):
        raise ValueError(f"span {index} has no name")
    return NAMES[index]

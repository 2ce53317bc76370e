"""What happened during a round, beside its critical path: transfers, training, drawing the noise.

Spans may overlap, and are never summed; the round's *segments* are what adds up to its latency. A round of n clients
has about 3 n spans, so they are kept as packed records, not as text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

__all__ = ["NAMES", "Packed", "Span", "pack", "packed", "unpack"]

NAMES = ("download", "training", "upload", "conditioning", "noise")
"""Model to a client; its own account of its computing, which nobody has verified; momentum from it, first byte to
last; what the server did to the momentum; the noise being drawn."""

_RECORD = struct.Struct("<BiffQ")
_pack = _RECORD.pack
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


def packed(name: str, client_id: int | None, start_s: float, seconds: float, num_bytes: int = 0) -> bytes:
    """One span as a record of 21 bytes; to make a :class:`Span` first would take twice as long."""
    return _pack(_INDEX[name], _NOBODY if client_id is None else client_id, start_s, seconds, num_bytes)


def pack(spans: Iterable[Span]) -> bytes:
    """As records of 21 bytes."""
    return spans.data if isinstance(spans, Packed) else b"".join(packed(*span) for span in spans)


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


class Packed(Sequence[Span]):
    """Spans that are unpacked only when somebody looks at them: most rounds' never are.

    Parameters
    ----------
    data
        As of :func:`pack`.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // _RECORD.size

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | Sequence[Span]:
        return unpack(self.data)[place]

    def __iter__(self) -> Iterator[Span]:
        return iter(unpack(self.data))


_INDEX = {name: index for index, name in enumerate(NAMES)}


def _name(index: int) -> str:
    if index >= len(NAMES):
        raise ValueError(f"span {index} has no name")
    return NAMES[index]

"""Tensor frames: the protobuf encoding of the tensor messages, written and read by hand.

A stock protobuf runtime copies a ``bytes`` field several times, which dominates a round from a million parameters
on. So the messages that carry tensors (``ModelMessage``, ``MomentumMessage``, ``TapMessage``) are written and read
here, in exactly the encoding protobuf gives them: the small fields first, the payload last, read as a view. Stubs
generated in any language interoperate, and a test holds both ways together.

========  ======  ==========================
field     type    content
========  ======  ==========================
1         LEN     header (a submessage)
2         LEN     trailer (a submessage)
3         VARINT  offset of the payload
15        LEN     payload
========  ======  ==========================

A frame is a peer's bytes: :func:`decode_frame` raises nothing, it returns :class:`Malformed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from common.rpc.digests import digest_of
from common.rpc.v1.parameter_server_pb2 import Trailer

__all__ = [
    "FRAME_OVERHEAD",
    "MOST_FIELDS",
    "Frame",
    "Malformed",
    "Oversized",
    "decode_frame",
    "encode_frame",
    "tensor_bytes",
    "tensor_frames",
]

FRAME_OVERHEAD = 16 * 1024
"""Bytes a frame may have beyond its payload (headers are far smaller)."""
MOST_FIELDS = 64
"""Fields of one frame: there are four, and room for later versions. Reading takes time for each, and a message may hold
half a million, of which a few a second would keep a server from everything else."""

H = TypeVar("H", bound=Message)

_HEADER, _TRAILER, _OFFSET, _PAYLOAD = 0x0A, 0x12, 0x18, 0x7A
_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Frame(Generic[H]):
    """One message of a tensor's stream."""

    header: H | None
    trailer: Trailer | None
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Malformed:
    """What a peer sent instead of a message, and why it is none."""

    reason: str


@dataclass(frozen=True, slots=True)
class Oversized(Malformed):
    """A message that is larger than a message may be."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_frame(
    *,
    header: Message | None = None,
    trailer: Message | None = None,
    offset: int = 0,
    payload: memoryview | bytes = b"",
) -> bytes:
    """One frame's bytes; the payload is copied once."""
    parts: list[bytes | memoryview] = []
    for tag, part in ((_HEADER, header), (_TRAILER, trailer)):
        if part is not None:
            encoded = part.SerializeToString()
            parts += [bytes((tag,)), _varint(len(encoded)), encoded]
    if offset:
        parts += [bytes((_OFFSET,)), _varint(offset)]
    if len(payload):
        parts += [bytes((_PAYLOAD,)), _varint(len(payload)), payload]
    return b"".join(parts)


def decode_frame(data: bytes, header_type: type[H]) -> Frame[H] | Malformed:
    """Read one frame; the payload is a view into ``data``."""
    view = memoryview(data)
    header: H | None = None
    trailer: Trailer | None = None
    offset, payload, position, fields = 0, view[:0], 0, 0
    try:
        while position < len(view):
            start, fields = position, fields + 1
            if fields > MOST_FIELDS:
                return Malformed(f"more than {MOST_FIELDS} fields in one frame")
            tag, position = _read_varint(view, position)
            kind = tag & 7
            if not 8 <= tag < 1 << 32 or position > start + 5:
                return Malformed(f"field number {tag >> 3} does not exist")
            if kind == _VARINT:
                value, position = _read_varint(view, position)
                if tag == _OFFSET:
                    offset = value
            elif kind == _LEN:
                length, position = _read_varint(view, position)
                part = view[position : position + length]
                if len(part) != length:
                    return Malformed(f"a field of {length} bytes, of which {len(part)} are there")
                position += length
                if tag == _HEADER:  # given twice, the two are one: so protobuf has it
                    header = header or header_type()
                    header.MergeFromString(bytes(part))
                elif tag == _TRAILER:
                    trailer = trailer or Trailer()
                    trailer.MergeFromString(bytes(part))
                elif tag == _PAYLOAD:
                    payload = part
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                return Malformed(f"wire type {kind} does not exist here")  # groups do, in other contracts
    except (DecodeError, ValueError) as problem:
        return Malformed(str(problem) or "the bytes are no message")
    if position > len(view):
        return Malformed("the last field is cut off")
    return Frame(header, trailer, offset, payload)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(view):
            raise ValueError("a number is cut off")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                raise ValueError("a number is longer than 64 bits")
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def tensor_bytes(tensor: npt.NDArray[np.float32]) -> memoryview:
    """The bytes of a contiguous float32 vector in wire order (little-endian), without a copy where that is ours."""
    return np.ascontiguousarray(tensor, dtype="<f4").data.cast("B")


def tensor_frames(header: Message, tensor: npt.NDArray[np.float32], chunk_bytes: int) -> Iterator[bytes]:
    """The frames of a whole tensor: one for each chunk, the header in the first and the trailer in the last of them.

    A message costs about as much as a hundred kilobytes of it, so there are no more than need be.
    """
    data = tensor_bytes(tensor)
    trailer = Trailer(element_count=len(data) // 4, digest=digest_of(data))
    last = max(0, len(data) - 1) // chunk_bytes
    for index in range(last + 1):
        start = index * chunk_bytes
        yield encode_frame(
            header=header if index == 0 else None,
            trailer=trailer if index == last else None,
            offset=start,
            payload=data[start : start + chunk_bytes],
        )

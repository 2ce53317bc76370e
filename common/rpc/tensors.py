"""Receiving a tensor from a stream of frames, checking every byte before use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from common.rpc.digests import digest_of
from common.rpc.frames import Frame, Malformed

__all__ = ["Ended", "Incomplete", "receive_tensor"]

H = TypeVar("H", bound=Message)


class Incomplete(Exception):
    """A tensor that did not arrive whole: cut off, out of order, too long, or not what its digest says."""


class Ended(Incomplete):
    """The stream ended, before a tensor began."""


async def receive_tensor(
    frames: AsyncIterator[Frame[H] | Malformed], expected: int, announced: Callable[[H], int]
) -> tuple[H, npt.NDArray[np.float32] | None]:
    """Read one tensor of ``expected`` float32 elements.

    Parameters
    ----------
    frames
        The stream's iterator; it is read up to the tensor's trailer.
    expected
        d; nothing larger is ever allocated.
    announced
        The element count a header announces; 0 for a header that no tensor follows.

    Returns
    -------
    tuple
        The header, and the tensor (d,) or None when the header announced none.

    Raises
    ------
    Ended
        There is none.
    Incomplete
        The bytes are no tensor of that size.
    """
    first = await _next(frames, Ended)
    if first.header is None:
        raise Incomplete("the first frame has no header")
    count = announced(first.header)
    if count == 0:
        return first.header, None
    if count != expected:
        raise Incomplete(f"{count} elements announced, expected {expected}")
    tensor = np.empty(expected, dtype="<f4")
    buffer, received, frame = tensor.view(np.uint8), 0, first
    while True:
        end = received + len(frame.payload)
        if frame.offset != received and len(frame.payload):
            raise Incomplete(f"a chunk starts at byte {frame.offset}, expected {received}")
        if end > buffer.size:
            raise Incomplete(f"more than {buffer.size} bytes")
        buffer[received:end] = np.frombuffer(frame.payload, dtype=np.uint8)
        received = end
        if frame.trailer is not None:
            break
        frame = await _next(frames)
    if received != buffer.size or frame.trailer.element_count != expected:
        raise Incomplete(f"{received} of {buffer.size} bytes arrived")
    if digest_of(buffer.data) != frame.trailer.digest:
        raise Incomplete("the digest is not that of the bytes received")
    return first.header, tensor


async def _next(frames: AsyncIterator[Frame[H] | Malformed], ended: type[Incomplete] = Incomplete) -> Frame[H]:
    frame = await anext(frames, None)
    if frame is None:
        raise ended("the stream ended before the tensor did")
    if isinstance(frame, Malformed):
        raise Incomplete(frame.reason)
    return frame

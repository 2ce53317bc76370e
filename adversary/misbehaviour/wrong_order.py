"""Momenta whose chunks do not follow each other."""

from __future__ import annotations

from collections.abc import Iterator

from adversary.attacks.parameters import choice, count
from adversary.misbehaviour.breach import Breach, pieces, trailer
from adversary.misbehaviour.misbehaviour import Ground
from client.push import Push
from common.rpc.frames import encode_frame, tensor_bytes

__all__ = ["OverlappingChunks", "ShuffledChunks"]


class ShuffledChunks(Breach):
    """Sends the chunks of each momentum in another order, each with its right offset.

    Parameters
    ----------
    order
        "reversed", or "swapped": only the last two.
    """

    name = "shuffled_chunks"

    def __init__(self, ground: Ground, *, order: str = "reversed", then_answer: bool = True) -> None:
        super().__init__(ground, then_answer=then_answer)
        self._order = choice(self.name, "order", order, ("reversed", "swapped"))

    def broken(self, push: Push) -> Iterator[bytes]:
        data = tensor_bytes(push.momentum)
        chunks = list(pieces(push, data))
        if self._order == "reversed":
            chunks.reverse()
        else:
            chunks[-2:] = reversed(chunks[-2:])
        yield encode_frame(header=push.header())
        for offset, piece in chunks:
            yield encode_frame(offset=offset, payload=piece)
        yield trailer(data, push.momentum.size)


class OverlappingChunks(Breach):
    """Starts each chunk but the first a few bytes early, so that they lie over each other.

    Parameters
    ----------
    by
        How many bytes early.
    """

    name = "overlapping_chunks"

    def __init__(self, ground: Ground, *, by: int = 4, then_answer: bool = True) -> None:
        super().__init__(ground, then_answer=then_answer)
        self._by = count(self.name, "by", by, least=1)

    def broken(self, push: Push) -> Iterator[bytes]:
        data = tensor_bytes(push.momentum)
        yield encode_frame(header=push.header())
        for offset, piece in pieces(push, data):
            start = max(0, offset - self._by)
            yield encode_frame(offset=start, payload=data[start : offset + len(piece)])
        yield trailer(data, push.momentum.size)

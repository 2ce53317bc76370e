"""Momenta that are far too large."""

from __future__ import annotations

from collections.abc import Iterator

from adversary.attacks.parameters import flag
from adversary.misbehaviour.breach import Beside, attempt
from adversary.misbehaviour.misbehaviour import Ground
from adversary.misbehaviour.storm import positive
from client.push import Push, Reply, deliver
from common.rpc.frames import encode_frame

__all__ = ["Oversize"]

GIGABYTE, MEGABYTE = 10**9, 10**6


class Oversize(Beside):
    """Announces a terabyte and sends a gigabyte of it, over and over, whatever the answer is.

    Parameters
    ----------
    gigabytes
        What is announced.
    megabytes
        What is sent. A call that is refused is followed by another until that much has been sent; then comes the next
        momentum.
    then_answer
        Whether the right momentum is sent meanwhile.
    """

    name = "oversize"

    def __init__(
        self, ground: Ground, *, gigabytes: float = 1000.0, megabytes: float = 1000.0, then_answer: bool = True
    ) -> None:
        super().__init__(ground)
        self._announced = max(1, int(positive(self.name, "gigabytes", gigabytes) * GIGABYTE / 4))
        self._bytes = int(positive(self.name, "megabytes", megabytes) * MEGABYTE)
        self._then_answer = flag(self.name, "then_answer", then_answer)

    async def deliver(self, push: Push) -> Reply | None:
        self.begin(push, self._flood(push))
        return await deliver(push) if self._then_answer else None

    async def _flood(self, push: Push) -> None:
        zeros, left = bytes(push.chunk_bytes), self._bytes

        def frames() -> Iterator[bytes]:
            nonlocal left
            yield encode_frame(header=push.header(element_count=self._announced))
            offset = 0
            while left > 0:
                left -= len(zeros)
                yield encode_frame(offset=offset, payload=zeros)
                offset += len(zeros)

        while left > 0:
            before = left
            if await attempt(push, frames()) is None and left == before:
                return  # nobody is there

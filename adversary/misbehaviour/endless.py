"""Momenta that never end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from adversary.attacks.parameters import choice
from adversary.misbehaviour.breach import Beside, attempt
from adversary.misbehaviour.misbehaviour import Ground
from adversary.misbehaviour.storm import Pace, positive
from client.push import Push, Reply
from common.rpc.frames import encode_frame

__all__ = ["Endless"]

FASTEST = 1e6
ZEROS = 64


class Endless(Beside):
    """Begins each momentum and never ends it, as fast as the server reads.

    Parameters
    ----------
    of
        "nothing": messages without any content. "headers": its header again and again. "zeros": payload without end, a
        few bytes at a time, also beyond the model's size.
    frames_per_s
        Not more messages than this; default as many as are taken.
    """

    name = "endless"

    def __init__(self, ground: Ground, *, of: str = "nothing", frames_per_s: float = FASTEST) -> None:
        super().__init__(ground)
        self._of = choice(self.name, "of", of, ("nothing", "headers", "zeros"))
        self._frames_per_s = positive(self.name, "frames_per_s", frames_per_s)

    async def deliver(self, push: Push) -> Reply | None:
        self.begin(push, self._on_and_on(push))
        return None

    async def _on_and_on(self, push: Push) -> None:
        await attempt(push, self._frames(push))

    async def _frames(self, push: Push) -> AsyncIterator[bytes]:
        pace, header, zeros, offset = Pace(self._frames_per_s), encode_frame(header=push.header()), bytes(ZEROS), 0
        yield header
        while True:
            await pace.turn()
            match self._of:
                case "nothing":
                    yield b""
                case "headers":
                    yield header
                case _:
                    yield encode_frame(offset=offset, payload=zeros)
                    offset += len(zeros)

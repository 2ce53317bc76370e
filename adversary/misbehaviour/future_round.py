"""Momenta for a round that is not open yet."""

from __future__ import annotations

from collections.abc import Iterable

from adversary.attacks.parameters import count
from adversary.misbehaviour.breach import Breach
from adversary.misbehaviour.misbehaviour import Ground
from client.push import Push
from common.rpc.frames import tensor_frames

__all__ = ["FutureRound"]


class FutureRound(Breach):
    """Sends each momentum for a later round first, to be there before everybody else.

    Parameters
    ----------
    ahead
        How many rounds later.
    """

    name = "future_round"

    def __init__(self, ground: Ground, *, ahead: int = 1, then_answer: bool = True) -> None:
        super().__init__(ground, then_answer=then_answer)
        self._ahead = count(self.name, "ahead", ahead, least=1)

    def broken(self, push: Push) -> Iterable[bytes]:
        return tensor_frames(push.header(round_id=push.round_id + self._ahead), push.momentum, push.chunk_bytes)

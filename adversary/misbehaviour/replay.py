"""Bytes that were right once, or are somebody else's."""

from __future__ import annotations

from adversary.attacks.parameters import choice, flag
from adversary.misbehaviour.breach import attempt
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from client.push import Push, Reply, deliver
from common.rpc.frames import tensor_frames

__all__ = ["Replay"]


class Replay(Misbehaviour):
    """Sends bytes again: its own of an old round, or what belongs to another identity.

    Parameters
    ----------
    of
        "itself": the first momentum it ever sent, byte for byte, in every later round. "another": over its own
        connection what another of the adversary's identities sends this round, and its own momentum under the name of a
        client that is not the adversary's.
    answer
        Whether it also sends its own momentum, in good order and first.
    """

    name = "replay"

    def __init__(self, ground: Ground, *, of: str = "itself", answer: bool = True) -> None:
        super().__init__(ground)
        self._of = choice(self.name, "of", of, ("itself", "another"))
        self._answer = flag(self.name, "answer", answer)
        self._first: dict[int, list[bytes]] = {}
        self._latest: dict[int, list[bytes]] = {}
        everybody = range(ground.experiment.federation.clients)
        self._stranger = next((client_id for client_id in everybody if client_id not in ground.tokens), None)

    async def deliver(self, push: Push) -> Reply | None:
        self._latest[push.caller.client_id] = push.frames()
        reply = await deliver(push) if self._answer else None
        for frames in self._old(push) if self._of == "itself" else self._foreign(push):
            await attempt(push, frames)
        return reply

    def _old(self, push: Push) -> list[list[bytes]]:
        own, known = push.caller.client_id, len(self._first)
        first = self._first.setdefault(own, self._latest[own])
        return [first] if len(self._first) == known else []

    def _foreign(self, push: Push) -> list[list[bytes]]:
        own = push.caller.client_id
        sent = [frames for client_id, frames in self._latest.items() if client_id != own][:1]
        if self._stranger is not None:
            caller = push.header().caller
            caller.client_id = self._stranger
            sent.append(list(tensor_frames(push.header(caller=caller), push.momentum, push.chunk_bytes)))
        return sent

"""Answers at the last moment, and just after it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from adversary.attacks.parameters import non_negative
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from client.push import Push, Reply, deliver
from common.rpc.frames import Malformed

__all__ = ["EleventhHour", "Late"]


class _Timed(Misbehaviour):
    """Knows from the public settings how long a round waits for those who are missing, and answers accordingly.

    That wait, the grace, begins when enough others have answered. An adversary takes that to be when its own momentum
    is ready, and the round to have begun when its last answer had its reply.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._replied_at: dict[int, float] = {}

    async def deliver(self, push: Push) -> Reply | None:
        now, client_id = asyncio.get_running_loop().time(), push.caller.client_id
        took_s = now - self._replied_at.get(client_id, now)
        await asyncio.sleep(max(0.0, self.wait_s(client_id, self._closes_in(took_s))))
        try:
            reply = await deliver(push)
        finally:
            self._replied_at[client_id] = asyncio.get_running_loop().time()
        self.learn(client_id, in_time=not isinstance(reply, Malformed) and reply.HasField("accepted"))
        return reply

    @abstractmethod
    def wait_s(self, client_id: int, closes_in_s: float) -> float:
        """How long to hold an answer back, in a round that is about to close."""

    def learn(self, client_id: int, *, in_time: bool) -> None:
        """Whether the last answer was in time."""

    def _closes_in(self, took_s: float) -> float:
        network = self.ground.experiment.network
        if self.ground.experiment.privacy.round_timing == "fixed":
            return network.round_period_s - network.publish_margin_s - took_s
        return max(network.grace_floor_s, network.grace_factor * took_s)


class EleventhHour(_Timed):
    """Answers just before a round would close without it, so that every round lasts as long as it may.

    Parameters
    ----------
    seconds_before
        How long before. An answer that came too late makes that longer from then on, by as much again.
    """

    name = "eleventh_hour"

    def __init__(self, ground: Ground, *, seconds_before: float = 0.05) -> None:
        super().__init__(ground)
        self._step_s = non_negative(self.name, "seconds_before", seconds_before)
        self._before_s: dict[int, float] = {}

    def wait_s(self, client_id: int, closes_in_s: float) -> float:
        return closes_in_s - self._before_s.setdefault(client_id, self._step_s)

    def learn(self, client_id: int, *, in_time: bool) -> None:
        if not in_time:
            self._before_s[client_id] += self._step_s


class Late(_Timed):
    """Answers just after a round has closed without it, in every round.

    Parameters
    ----------
    seconds_after
        How long after.
    """

    name = "late"

    def __init__(self, ground: Ground, *, seconds_after: float = 0.05) -> None:
        super().__init__(ground)
        self._after_s = non_negative(self.name, "seconds_after", seconds_after)

    def wait_s(self, client_id: int, closes_in_s: float) -> float:  # noqa: ARG002 - the same for each
        return closes_in_s + self._after_s

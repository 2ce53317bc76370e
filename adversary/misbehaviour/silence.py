"""Silence: joins, shows signs of life, takes the model, and never answers."""

from __future__ import annotations

from adversary.misbehaviour.misbehaviour import Misbehaviour
from client.push import Push, Reply

__all__ = ["Silence"]


class Silence(Misbehaviour):
    """Joins and attends, and answers no round, so that every round waits for it as long as it is patient."""

    name = "silence"

    async def deliver(self, push: Push) -> Reply | None:  # noqa: ARG002
        return None

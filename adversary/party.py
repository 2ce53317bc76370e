"""The adversary's tasks in one event loop: the exchange, and what is done beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from adversary.misbehaviour import Misbehaviour
from client.exchange import Exchange
from client.memory import Outcome
from common.errors import AttackError

__all__ = ["take_part"]


async def take_part(exchange: Exchange | None, misbehaviours: Collection[Misbehaviour]) -> Outcome:
    """Until the exchange learns that the run is over; without one, until a misbehaviour does.

    Raises
    ------
    AttackError
        There is no exchange, and no misbehaviour has anything more to do.
    ByzULDPError
        Why the exchange had to end.
    """
    besides = {asyncio.create_task(one.beside()) for one in misbehaviours}
    main = None if exchange is None else asyncio.create_task(exchange.run())
    running: set[asyncio.Task[Outcome] | asyncio.Task[Outcome | None]] = {*besides, *([main] if main else ())}
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if main in done:
                assert main is not None  # noqa: S101 - None is no task
                return main.result()
            outcomes = [outcome for task in done if (outcome := task.result()) is not None]
            if main is None and outcomes:
                return outcomes[0]
        raise AttackError("no identity takes part, and the misbehaviours have nothing more to do")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

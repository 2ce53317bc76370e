"""An honest client process, from its experiment to the run's end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from client.crew import build_crew
from client.exchange import Exchange, Momentum, Outcome, PublishedModel
from client.keeper import Keeper, refuse_limit_without_state
from client.memory import Forgetful, Memory
from common.config import Experiment
from common.errors import Interrupted
from common.learning.task import build_task, single_threaded
from common.rpc.addresses import parse_address, refuse_insecure
from common.rpc.credentials import refuse_unusable

__all__ = ["run_client"]

log = logging.getLogger("byzuldp.client")

STOPPING = (signal.SIGTERM, signal.SIGINT)


def run_client(
    experiment: Experiment,
    *,
    address: str,
    tokens: Mapping[int, str],
    state: Path | None = None,
    witness: Callable[[PublishedModel], None] | None = None,
) -> Outcome:
    """Take part in a run as the identities that ``tokens`` names, until it ends.

    Parameters
    ----------
    tokens
        Each identity's join token; with TLS it may be empty.
    state
        The file that keeps momenta and the privacy total from one life of this client to the next; None: nothing is
        kept, and a client that comes back starts from m = 0.
    witness
        Told of every model that came and was not refused, one that came twice included. Must not take long.

    Raises
    ------
    Interrupted
        SIGTERM or SIGINT: this client has left, and its state is written.
    ByzULDPError
        Another leaf that says why this process cannot take part (any longer).
    """
    network = experiment.network
    refuse_insecure(
        parse_address(address, setting="the PS's address"), insecure=network.insecure, tls=network.tls.enabled
    )
    refuse_unusable(network.tls, tokens)
    refuse_limit_without_state(experiment, state)
    single_threaded()
    task = build_task(experiment)
    crew = build_crew(experiment, task, sorted(tokens))
    with ExitStack() as resources:
        memory: Memory = Forgetful()
        if state is not None:
            memory = resources.enter_context(
                Keeper(state, crew, experiment, server=address, num_parameters=task.num_parameters)
            )
        # One thread computes, so that heartbeats and pushes go on while a gradient is being taken.
        computing = resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="gradient"))

        async def produce(model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
            if witness is not None:
                witness(model)
            loop = asyncio.get_running_loop()
            # On the same thread: a gradient of a round that was given up may still be under way.
            await loop.run_in_executor(computing, task.model.set_parameters, model.theta)
            for client_id, worker in crew.items():
                try:
                    yield client_id, await loop.run_in_executor(computing, worker.step, model.round_id)
                except Exception as problem:  # one logical client's fault must not become another's
                    log.exception("client %d failed in round %d; it sends zeros", client_id, model.round_id)
                    exchange.report_error(client_id, model.round_id, problem)
                    yield client_id, np.zeros(task.num_parameters, dtype=np.float32)
            memory.round_done()

        exchange = Exchange(
            experiment,
            address=address,
            tokens=tokens,
            schema_hash=task.schema_hash,
            num_parameters=task.num_parameters,
            produce=produce,
            memory=memory,
        )
        return asyncio.run(_unless_stopped(_remembered(exchange, memory)))


async def _remembered(exchange: Exchange, memory: Memory) -> Outcome:
    outcome: Outcome | None = None
    try:
        outcome = await exchange.run()
    finally:
        await memory.finished(outcome)
    return outcome


async def _unless_stopped(taking_part: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Take part; the first SIGTERM or Ctrl-C ends that in good order, a second one at once.

    Raises
    ------
    Interrupted
        There was a signal.
    """
    task, received = asyncio.ensure_future(taking_part), list[signal.Signals]()
    if threading.current_thread() is not threading.main_thread():  # only that one is told of signals
        return await task
    loop = asyncio.get_running_loop()

    def undo() -> None:
        for number in STOPPING:
            loop.remove_signal_handler(number)

    def stop(number: signal.Signals) -> None:
        received.append(number)
        undo()
        task.cancel()

    for number in STOPPING:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(f"stopped by {received[0].name}; start again to go on") from None
    finally:
        undo()

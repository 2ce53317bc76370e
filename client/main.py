"""An honest client process, from its experiment to the run's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from client.crew import build_crew
from client.exchange import Exchange, Momentum, Outcome, PublishedModel
from common.config import Experiment
from common.learning.task import build_task, single_threaded
from common.rpc.addresses import parse_address, refuse_insecure

__all__ = ["run_client"]

log = logging.getLogger("byzuldp.client")


def run_client(experiment: Experiment, *, address: str, tokens: Mapping[int, str]) -> Outcome:
    """Take part in a run as the identities that ``tokens`` names, until it ends.

    Raises
    ------
    ByzULDPError
        A leaf that says why this process cannot take part (any longer).
    """
    refuse_insecure(parse_address(address, setting="the PS's address"), insecure=experiment.network.insecure)
    single_threaded()
    task = build_task(experiment)
    crew = build_crew(experiment, task, sorted(tokens))
    # One thread computes, so that heartbeats and pushes go on while a gradient is being taken.
    with ThreadPoolExecutor(1, thread_name_prefix="gradient") as computing:

        async def produce(model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
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

        exchange = Exchange(
            experiment,
            address=address,
            tokens=tokens,
            schema_hash=task.schema_hash,
            num_parameters=task.num_parameters,
            produce=produce,
        )
        return asyncio.run(exchange.run())

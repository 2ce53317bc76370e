"""Clients that compute nothing: the honest client's own protocol code, over momenta that were made beforehand.

Each identity has an exchange, and so a connection, of its own, although a process hosts several: every model goes down
n times, as it does with n hosts. What the client does with a model and a momentum (checking, hashing, framing) is done
in every round; the gradient is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from client.exchange import Exchange, Outcome, PublishedModel
from common.config import Experiment
from common.errors import Interrupted
from common.learning.task import build_task, single_threaded
from common.randomness import stream
from deploy.bench.asked import Load

if TYPE_CHECKING:
    from deploy.children import Assignment, Report

__all__ = ["LOAD_FILE", "host", "momentum", "take_part", "write_load"]

LOAD_FILE = "bench.json"
NORM = 0.5


def momentum(seed: int, client_id: int, d: int) -> np.ndarray:
    """What an identity sends in every round: float32 (d,), of norm about one half."""
    vector = stream(seed, "bench", client=client_id).standard_normal(d, dtype=np.float32)
    vector *= np.float32(NORM / d**0.5)
    return vector


def write_load(run_dir: Path, load: Load) -> None:
    """Say beside the run folder what its clients do."""
    (run_dir.parent / LOAD_FILE).write_text(json.dumps({"compute_s": load.compute_s, "seed": load.seed}) + "\n")


def take_part(assignment: Assignment, _report: Report) -> tuple[str, str]:
    """The body of a client process of this machine; see :class:`deploy.children.Assignment`."""
    load = Load(**json.loads((assignment.run_dir.parent / LOAD_FILE).read_text()))
    outcome = host(assignment.load(), address=assignment.address, tokens=assignment.tokens, load=load)
    return outcome.status, outcome.message


def host(experiment: Experiment, *, address: str, tokens: Mapping[int, str], load: Load) -> Outcome:
    """Take part in a run as several identities, until it has ended for all of them.

    Raises
    ------
    ByzULDPError
        One of them cannot take part (any longer); the others are stopped.
    """
    single_threaded()
    task = build_task(experiment)
    schema_hash, d = task.schema_hash, task.num_parameters
    del task
    exchanges = [
        _exchange(experiment, address, client_id, token, schema_hash, momentum(load.seed, client_id, d), load)
        for client_id, token in tokens.items()
    ]
    return asyncio.run(_all(exchanges))


def _exchange(
    experiment: Experiment,
    address: str,
    client_id: int,
    token: str,
    schema_hash: bytes,
    own: np.ndarray,
    load: Load,
) -> Exchange:
    async def produce(_model: PublishedModel) -> AsyncIterator[tuple[int, Any]]:
        if load.compute_s > 0:
            await asyncio.sleep(load.compute_s)
        yield client_id, own

    return Exchange(
        experiment,
        address=address,
        tokens={client_id: token},
        schema_hash=schema_hash,
        num_parameters=own.size,
        produce=produce,
    )


async def _all(exchanges: list[Exchange]) -> Outcome:
    tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
    received = list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        for task in tasks:
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(RuntimeError):  # not the main thread
            loop.add_signal_handler(number, stop, number)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    if received:
        raise Interrupted(f"stopped by {received[0].name}")
    for problem in ended:
        if isinstance(problem, Exception):
            raise problem
    return next(one for one in ended if isinstance(one, Outcome))

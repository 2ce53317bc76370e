"""What a simulated round costs beside its gradients.

    make bench-simulation

Fixed: n = 20, MNIST, the paper's CNN (d = 26,010), batches of 20, trimmed mean with f = 4 and no adversary, ε = 20, one
thread of PyTorch. In one process and in turn, so that whatever else the machine does meets all three alike:

- *bare*: the gradients of all clients, in one forward and one backward pass, and nothing else;
- *one by one*: the same gradients, a forward and a backward pass per client;
- *round*: whole rounds of `byzuldp simulate`: batches drawn, gradients, clipping, momentum, conditioning, aggregation,
  noise, step, and the durable commit with its ledger row. Evaluation is off.

Three clocks: on the wall; *path*, the processor time of the thread that everything waits for, which is the wall time of
a machine with a second core to spare for commits, noise and the next batches; and the processor time of all threads.
Quartiles of the ratios over the blocks are reported; ``--seconds`` says for how long. Written to
``benchmarks/results/simulation.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from client.worker import batch_of
from common.config import Experiment, experiment_from
from common.learning.batched import batched_gradients
from common.learning.datasets import to_tensor
from common.learning.partitions import deal_experiment
from common.learning.task import build_task, single_threaded
from deploy.simulate.run import run_simulation

RESULTS = Path(__file__).resolve().parent / "results" / "simulation.json"
CLIENTS, BATCH, BLOCK = 20, 20, 8
MANY = 1_000_000
CLOCKS = ("wall", "path", "cpu")
Times = tuple[float, float, float]


def experiment(model: str) -> Experiment:
    return experiment_from(
        {
            "federation": {"clients": CLIENTS, "byzantine": 4},
            "training": {"rounds": MANY, "batch_size": BATCH, "learning_rate": 0.1, "device": "cpu"},
            "evaluation": {"every": MANY},
            "aggregation": {"rule": "trimmed_mean"},
            "privacy": {"epsilon": 20.0, "delta": 1e-3},
            "data": {"dataset": "mnist", "partition": "classes"},
            "model": {"name": model},
            "client": {"persist_every": MANY},
        }
    )


class Enough(Exception):
    """The time is over."""


def measured(model: str, seconds: float) -> dict[str, object]:
    """The three of them, block by block."""
    asked = experiment(model)
    single_threaded()
    task = build_task(asked)
    shares = deal_experiment(asked, task.dataset.train.labels)
    batches = [
        to_tensor(
            task.dataset.train,
            batch_of(shares[client_id], asked.training, client_id=client_id, round_id=0),
            task.dataset,
        )
        for client_id in range(CLIENTS)
    ]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    together = batched_gradients(task.model, task.dataset.input_shape)
    assert together is not None, f"{model} has no batched gradients"
    out, alone = torch.empty((CLIENTS, task.num_parameters)), torch.empty((CLIENTS, task.num_parameters))

    def bare() -> None:
        together(x, y, [BATCH] * CLIENTS, out)

    def one_by_one() -> None:
        for row, (images, labels) in zip(alone, batches, strict=True):
            row.copy_(task.model.gradient(images, labels))

    bare()
    one_by_one()
    blocks: list[dict[str, Times]] = []
    rounds, block_began, until = 0, clocks(), time.monotonic() + seconds

    def between_rounds(point: str) -> None:
        nonlocal rounds, block_began
        if point != "round_opened":
            return
        if rounds % BLOCK == 0:
            ended = clocks()
            if rounds > BLOCK:  # the first block warms up
                spent = between(block_began, ended, BLOCK)
                blocks.append({"round": spent, "bare": timed(bare), "one_by_one": timed(one_by_one)})
                if time.monotonic() > until:
                    raise Enough
            block_began = clocks()
        rounds += 1

    place = tempfile.TemporaryDirectory(prefix="byzuldp-", dir=os.environ.get("BENCH_DIR"))
    with place as folder, contextlib.suppress(Enough):
        run_simulation(asked, Path(folder) / "run", fault=between_rounds)
    medians = {
        clock: {name: round(1e3 * statistics.median(block[name][k] for block in blocks), 2) for name in blocks[0]}
        for k, clock in enumerate(CLOCKS)
    }
    return {
        "model": model,
        "d": task.num_parameters,
        "blocks": len(blocks),
        "milliseconds": medians,
        "round_to_bare": ratio(blocks, "round", "bare"),
        "one_by_one_to_bare": ratio(blocks, "one_by_one", "bare"),
        "same_bits_as_one_by_one": bool(torch.equal(out, alone)),
        "largest_difference": float((out - alone).abs().max()),
    }


def clocks() -> Times:
    """Seconds, as :data:`CLOCKS` names them."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def timed(work: Callable[[], None], repeats: int = 4) -> Times:
    before = clocks()
    for _ in range(repeats):
        work()
    return between(before, clocks(), repeats)


def between(before: Times, after: Times, times: int) -> Times:
    wall, path, cpu = ((end - begin) / times for begin, end in zip(before, after, strict=True))
    return wall, path, cpu


def ratio(blocks: list[dict[str, Times]], over: str, under: str) -> dict[str, list[float]]:
    """Quartiles over the blocks, by each clock."""
    ratios = np.array([np.divide(block[over], block[under]) for block in blocks])
    return {
        name: [round(float(value), 3) for value in np.percentile(ratios[:, clock], (25, 50, 75))]
        for clock, name in enumerate(CLOCKS)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, for each model")
    parser.add_argument("--models", nargs="*", default=["cnn", "mlp"])
    arguments = parser.parse_args()
    found = [measured(model, arguments.seconds) for model in arguments.models]
    for item in found:
        print(json.dumps(item, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A run made without a network: the server's own parts, and rows from a function instead of clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from common.config import Experiment
from common.errors import ByzULDPError
from common.learning.task import build_task
from ps.faults import no_fault
from ps.inbox import Inbox
from ps.mechanism import noise_of, opened
from ps.opening import begin_run
from ps.round_maker import RoundMaker
from ps.rounds import CloseRound
from ps.timing import RoundTiming

Rows = Callable[[int, int], torch.Tensor]


def make_run(
    folder: Path,
    experiment: Experiment,
    *,
    rounds: int | None = None,
    status: str | None = None,
    rows: Rows = lambda _round_id, _client_id: torch.zeros(()),
    absent: Callable[[int], tuple[int, ...]] = lambda _round_id: (),
) -> Path:
    """Commit ``rounds`` rounds (default all that were planned) and finish; returns the folder.

    ``status`` is ``completed`` by default, or ``interrupted`` where rounds are left.

    ``rows`` gives what a client sends in a round, (d,) or what broadcasts to it; ``absent`` who sends nothing.
    """
    task = build_task(experiment)
    previous, budget, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    store, ledger = begin_run(experiment, folder, task, mechanism, previous, no_fault)
    n, d = mechanism.num_clients, task.num_parameters
    with store:
        inbox = Inbox(n, d, mechanism.condition)
        maker = RoundMaker(
            experiment,
            store=store,
            ledger=ledger,
            budget=budget,
            mechanism=mechanism,
            noise=noise_of(experiment, d),
            inbox=inbox,
        )
        try:
            for round_id in range(experiment.training.rounds if rounds is None else rounds):
                inbox.open()
                for client_id in range(n):
                    if client_id in absent(round_id):
                        continue
                    row = rows(round_id, client_id).to(torch.float32).expand(d).contiguous()
                    writer = inbox.begin(client_id)
                    inbox.write(writer, 0, memoryview(row.numpy().tobytes()))
                    inbox.complete(writer, d, found := inbox.digest(writer), found)
                maker.make(
                    CloseRound(round_id, tuple(inbox.close()), absent(round_id), "all_answered"),
                    RoundTiming(round_id, 0.0),
                )
            whole = rounds in (None, experiment.training.rounds)
            store.finish(status or ("completed" if whole else "interrupted"))
        except ByzULDPError as problem:
            store.finish(problem.status, str(problem))
            raise
    return folder

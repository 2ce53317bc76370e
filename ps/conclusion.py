"""The end of a run, whoever made its rounds: its status, the trained model, the last score, the summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from common.config import Experiment
from common.durable import write_durably
from common.errors import BudgetExhausted
from common.learning.task import Task
from ps.durable import explaining
from ps.evaluation import Evaluator
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Ledger
from ps.privacy.pld import epsilon_pld
from ps.release import Mechanism
from ps.store import EvaluationRecord, RunStore
from ps.summary import summarise, write_summary

__all__ = ["COMPLETED", "MODEL_FILE", "conclude"]

MODEL_FILE = "model.safetensors"
COMPLETED = "completed"


def conclude(
    experiment: Experiment,
    *,
    store: RunStore,
    task: Task,
    ledger: Ledger,
    mechanism: Mechanism,
    evaluator: Evaluator,
    status: str,
    message: str,
    started_at: float,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Status, model, score, summary: in the order in which they matter if something cuts this short.

    Parameters
    ----------
    ledger
        What was spent, every committed round included.
    started_at
        ``time.perf_counter()`` when the run, or this part of it, began.

    Returns
    -------
    dict
        The summary, which is also in ``summary.json``.

    Raises
    ------
    StoreProblem
        The run folder cannot be written.
    """
    latest = store.latest()
    store.finish(status, message)
    _save_model(store, task)
    score = evaluator.finish(latest.round_id, latest.theta)
    private = claim_of(experiment, ledger.genesis.premises, late=store.late_models())
    summary = summarise(
        experiment=experiment,
        ledger=ledger,
        status=status,
        message=message,
        private=private,
        checked=_checked_epsilon(experiment, ledger, status) if private[0] else None,
        rounds=store.rounds(),
        evaluations=store.evaluations(),
        refusals=store.refusals(),
        final=EvaluationRecord(score.round_id, score.accuracy, score.loss, score.images),
        extra={
            "run_id": store.run_id,
            "clients": experiment.federation.clients,
            "byzantine": experiment.federation.byzantine,
            "adversaries": experiment.num_adversaries,
            "rule": mechanism.rule.name,
            "attack": experiment.attack.name,
            "misbehaviour": list(experiment.misbehaviour.names),
            "parameters": task.num_parameters,
            "seconds": time.perf_counter() - started_at,
            "run_dir": str(store.folder),
            "model_file": str(store.folder / "public" / MODEL_FILE),
        },
    )
    with explaining(store.folder / "summary.json", "write the summary"):
        write_summary(store.folder, summary)
    report({"event": "end", "status": status, "message": message})
    return summary


def _checked_epsilon(experiment: Experiment, ledger: Ledger, status: str) -> float | None:
    """ε by an independent accountant, once a run is over for good: it takes seconds."""
    if status not in (COMPLETED, BudgetExhausted.status):
        return None
    return epsilon_pld(ledger, experiment.privacy.delta)


def _save_model(store: RunStore, task: Task) -> None:
    """The trained model under the names of its state dict, for whoever uses it next."""
    from safetensors.torch import save

    theta = torch.from_numpy(store.latest().theta.copy())
    path = store.folder / "public" / MODEL_FILE
    with explaining(path, "write the trained model"):
        write_durably(path, save(task.model.state_dict_from(theta)))
        path.chmod(0o644)

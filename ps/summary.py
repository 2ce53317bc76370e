"""The summary of a run: what ``summary.json`` says.

Numbers that depend on the ledger are recomputed from it here; no ε is ever stored and printed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, pstdev, quantiles
from typing import Any

from common.config import Experiment
from common.errors import publicly
from ps.privacy.ledger import Budget, Ledger
from ps.records import EvaluationRecord, RefusalCount, RoundMetrics

__all__ = ["OPERATOR_ONLY", "summarise", "write_summary"]

FILE = "summary.json"

OPERATOR_ONLY = ("round_latency_s", "bytes_down", "bytes_up", "refusals", "seconds", "startup_s")
"""What depends on who answered, when, and with what: it is not a function of what was released."""


def summarise(
    *,
    experiment: Experiment,
    ledger: Ledger,
    status: str,
    message: str,
    private: tuple[bool, str],
    checked: float | None,
    rounds: Sequence[RoundMetrics],
    evaluations: Sequence[EvaluationRecord],
    refusals: Sequence[RefusalCount],
    final: EvaluationRecord | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The summary of a run as JSON values.

    Keys: ``status``, ``message``, ``private``, ``private_because``, ``premises``, ``neighbouring``, ``rounds``
    (published), ``final_accuracy`` (last model, whole test set), ``accuracy_last`` (mean, std, rounds averaged),
    ``accuracy_max``, ``accuracy_curve`` ([round, accuracy] pairs), ``epsilon`` and ``delta`` (the budget's: guaranteed
    where ``private`` is true), ``epsilon_spent`` (of the releases made), ``epsilon_pld`` (``checked``: the same by an
    independent accountant), ``previous`` (earlier runs that these count), ``noise_multiplier``, ``round_latency_s``
    (p50, p95, max, mean seconds of each phase), ``bytes_down``, ``bytes_up``, ``refusals`` (by kind), and what
    ``extra`` adds.
    """
    budget = Budget.of(ledger.genesis)
    curve = [[record.round_id, record.accuracy] for record in evaluations]
    published = ledger.next_round
    last = [record.accuracy for record in evaluations if record.round_id > published - experiment.evaluation.last]
    by_kind: dict[str, int] = {}
    for refusal in refusals:
        by_kind[refusal.kind] = by_kind.get(refusal.kind, 0) + refusal.count
    return {
        "status": status,
        "message": message,
        "private": private[0],
        "private_because": private[1],
        "premises": list(ledger.genesis.premises) if budget else [],
        "neighbouring": ledger.genesis.neighbouring if budget else None,
        "rounds": published,
        "final_accuracy": final.accuracy if final else None,
        "final_loss": final.loss if final and isfinite(final.loss) else None,
        "accuracy_last": {
            "mean": fmean(last) if last else None,
            "std": pstdev(last) if last else None,
            "rounds": experiment.evaluation.last,
            "evaluations": len(last),
        },
        "accuracy_max": max((accuracy for _, accuracy in curve), default=None),
        "accuracy_curve": curve,
        "epsilon": budget.epsilon if budget else None,
        "epsilon_spent": ledger.epsilon_spent(budget.delta, budget.calibration) if budget else None,
        "epsilon_pld": checked,
        "previous": [text.partition(" ")[0] for text in ledger.genesis.previous],
        "delta": budget.delta if budget else None,
        "calibration": budget.calibration if budget else None,
        "noise_multiplier": ledger.genesis.noise_multiplier or 0.0,
        "round_latency_s": _latency(rounds),
        "bytes_down": sum(record.bytes_down for record in rounds),
        "bytes_up": sum(record.bytes_up for record in rounds),
        "refusals": by_kind,
        **extra,
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """``summary.json`` for the operator alone (mode 0600), and ``public/summary.json`` without what is only theirs.

    How a run ended is told the public by its status alone: the details may be about clients.
    """
    public = {key: value for key, value in summary.items() if key not in OPERATOR_ONLY}
    public["message"] = publicly(summary["status"])
    for path, content, mode in ((folder / FILE, summary, 0o600), (folder / "public" / FILE, public, 0o644)):
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)  # whole, or not at all


def _latency(rounds: Sequence[RoundMetrics]) -> dict[str, Any]:
    """Percentiles of θ_t available → θ_{t+1} available, and the mean of each segment, in seconds."""
    if not rounds:
        return {"p50": None, "p95": None, "max": None, "phases": {}}
    seconds = [record.latency_s for record in rounds]
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    names = dict.fromkeys(name for record in rounds for name in record.segments)
    return {
        "p50": cuts[49],
        "p95": cuts[94],
        "max": max(seconds),
        "phases": {name: fmean(record.segments.get(name, 0.0) for record in rounds) for name in names},
    }

"""Run folders, read into the data of a report.

ε is recomputed from the ledger, whose chain is followed on the way; what is stored of it elsewhere is not looked at.
For a public report nothing is read that only the operator may see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from common.config import Experiment, experiment_from
from common.errors import ConfigError, publicly
from deploy.report.described import command_of, flat, shown_publicly
from deploy.report.model import PrivacyFacts, RunData, ScoredModel
from deploy.report.operations import operations_of
from deploy.report.sampling import spread
from deploy.report.signals import signal_of
from deploy.toml import to_toml
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Budget, Ledger
from ps.privacy.odometer import odometer
from ps.reader import RunReader
from ps.summary import FILE as SUMMARY

__all__ = ["collect", "labels_of"]

_ODOMETER_POINTS = 120


def collect(folder: Path, *, label: str | None = None, public: bool = False) -> RunData:
    """Everything a report shows of a run.

    Raises
    ------
    StoreProblem
        The folder holds no run, or it is damaged.
    """
    reader = RunReader(folder)
    ledger = Ledger.restored((text, head) for _, text, head in reader.ledger_rows())
    status, notes = reader.status(), []
    configuration = flat(dict(reader.run.configuration))
    configuration.pop("folder", None)
    try:
        experiment = experiment_from(dict(reader.run.configuration), where=f"{folder}: the stored configuration")
        command, toml = command_of(experiment, public=public)
    except ConfigError:
        experiment, command = None, "byzuldp run experiment.toml"
        toml = "" if public else to_toml(dict(reader.run.configuration))
        notes.append("The configuration is of another version of byzuldp, which this one cannot read.")
    signal, no_signal = signal_of(experiment, ledger, reader.run.parameters, public=public)
    return RunData(
        label=label or folder.resolve().name,
        run_id=reader.run_id,
        status=status.status,
        message=_publicly(status.status) if public else status.message,
        rounds=ledger.next_round,
        planned=ledger.genesis.rounds,
        parameters=reader.run.parameters,
        command=command,
        toml=toml,
        configuration=shown_publicly(configuration) if public else configuration,
        scores=_scores(reader),
        final=_final(folder, ledger.next_round, public=public),
        privacy=_privacy(experiment, ledger, reader),
        signal=signal,
        no_signal_because=no_signal,
        quorum=experiment.federation.needed if experiment else None,
        clients=ledger.genesis.num_clients,
        operations=None if public else operations_of(reader, experiment, ledger.genesis.num_clients),
        notes=tuple(notes),
    )


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: as few of its last parts as tell them all apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path[-1:])} ({number})" for number, path in enumerate(parts, 1)]


def _publicly(status: str) -> str:
    try:
        return publicly(status)
    except KeyError:
        return ""


def _scores(reader: RunReader) -> list[ScoredModel]:
    return [ScoredModel(record.round_id, record.accuracy, record.loss) for record in reader.evaluations()]


def _final(folder: Path, rounds: int, *, public: bool) -> ScoredModel | None:
    """The last model's score on the whole test set, which is in the summary alone.

    A run that goes on after it was interrupted has an old summary for a while: it is not of the last model.
    """
    try:
        text = (folder / ("public" if public else "") / SUMMARY).read_text(encoding="utf-8")
        summary: dict[str, Any] = json.loads(text)
        accuracy, loss = summary.get("final_accuracy"), summary.get("final_loss")
        if accuracy is None or summary.get("rounds") != rounds:
            return None
        return ScoredModel(rounds, float(accuracy), nan if loss is None else float(loss))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _privacy(experiment: Experiment | None, ledger: Ledger, reader: RunReader) -> PrivacyFacts:
    genesis, budget = ledger.genesis, Budget.of(ledger.genesis)
    if experiment is not None:
        private, because = claim_of(experiment, genesis.premises, late=reader.late_models())
    else:
        private, because = False, "not private: the stored configuration cannot be read by this version"
    places = spread(ledger.next_round + 1, _ODOMETER_POINTS)
    return PrivacyFacts(
        private=private,
        because=because,
        premises=genesis.premises if budget else (),
        neighbouring=genesis.neighbouring,
        epsilon=budget.epsilon if budget else None,
        delta=budget.delta if budget else None,
        calibration=genesis.calibration,
        noise_multiplier=genesis.noise_multiplier or 0.0,
        rounds=places if budget else (),
        spent=odometer(ledger, budget, places) if budget else (),
        spent_now=ledger.epsilon_spent(budget.delta, budget.calibration) if budget else None,
        previous=tuple(text.partition(" ")[0] for text in genesis.previous),
        rows=ledger.next_round + 1,
        head=ledger.head.hex(),
    )

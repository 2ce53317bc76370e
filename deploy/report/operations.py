"""What only the operator may see of a run: times, traffic, who was missing, refusals, faults."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Experiment
from deploy.report.model import ClientFacts, FaultSpan, Floats, Operations
from deploy.report.sampling import telling
from deploy.report.waterfalls import waterfall_of
from ps.reader import RunReader
from ps.records import RefusalCount, RoundMetrics, Span
from ps.timing import SEGMENTS

__all__ = ["DISTURBED", "VERDICT", "operations_of"]

VERDICT, DISTURBED = "verdict.json", "disturbed"
"""As :mod:`deploy.chaos` calls them, whose modules are much to import for two names."""

_ROUNDS_LOOKED_AT = 200
_SPANS_LOOKED_AT = 200_000


def operations_of(reader: RunReader, experiment: Experiment | None, num_clients: int) -> Operations:
    """What the run's operator folder says.

    Raises
    ------
    StoreDamaged
        The metrics cannot be read.
    """
    records, refusals, status = reader.rounds(), reader.refusals(), reader.status()
    latency = np.array([record.latency_s for record in records])
    adversaries = experiment.adversary_ids if experiment else range(0)
    most = max(10, min(_ROUNDS_LOOKED_AT, _SPANS_LOOKED_AT // max(1, 4 * num_clients)))
    looked_at = {records[place].round_id: records[place] for place in telling(latency, most)}
    spans = {round_id: reader.spans(round_id) for round_id in looked_at}
    spans_of = {round_id: found for round_id, found in spans.items() if found}
    faults, scenario = _faults(reader.folder)
    by_kind: Counter[str] = Counter()
    strangers: Counter[str] = Counter()
    for refusal in refusals:
        by_kind[refusal.kind] += refusal.count
        if refusal.client_id is None:
            strangers[refusal.kind] += refusal.count
    return Operations(
        message=status.message,
        started_at=status.created_at,
        updated_at=status.updated_at,
        seconds=_seconds(reader.folder),
        rounds=np.array([record.round_id for record in records], dtype=np.int64),
        latency_s=latency,
        answered=np.array([record.answered for record in records], dtype=np.int64),
        segments=_segments(records),
        bytes_down=sum(record.bytes_down for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        refusals=dict(by_kind),
        strangers=dict(strangers),
        clients=_clients(records, list(spans_of.values()), refusals, adversaries, num_clients),
        looked_at=len(spans_of),
        waterfall=waterfall_of(looked_at, spans, adversaries, len(records)),
        faults=faults,
        scenario=scenario,
        late_models=reader.late_models(),
    )


def _segments(records: Sequence[RoundMetrics]) -> dict[str, Floats]:
    found = dict.fromkeys(name for record in records for name in record.segments)
    names = [name for name in SEGMENTS if name in found] + [name for name in found if name not in SEGMENTS]
    return {name: np.array([record.segments.get(name, np.nan) for record in records], float) for name in names}


def _clients(
    records: Sequence[RoundMetrics],
    rounds: Sequence[Sequence[Span]],
    refusals: Sequence[RefusalCount],
    adversaries: range,
    num_clients: int,
) -> list[ClientFacts]:
    missed = Counter(client for record in records for client in record.missing)
    arrivals: defaultdict[int, list[float]] = defaultdict(list)
    uploads: defaultdict[int, list[float]] = defaultdict(list)
    training: defaultdict[int, list[float]] = defaultdict(list)
    down: Counter[int] = Counter()
    up: Counter[int] = Counter()
    for spans in rounds:
        for span in spans:
            if span.client_id is None:
                continue
            if span.name == "upload":
                arrivals[span.client_id].append(span.start_s + span.seconds)
                uploads[span.client_id].append(span.seconds)
                up[span.client_id] += span.num_bytes
            elif span.name == "download":
                down[span.client_id] += span.num_bytes
            elif span.name == "training":
                training[span.client_id].append(span.seconds)
    refused: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for refusal in refusals:
        if refusal.client_id is not None:
            refused[refusal.client_id][refusal.kind] = refusal.count
    return [
        ClientFacts(
            client_id=client,
            adversary=client in adversaries,
            answered=len(records) - missed[client],
            missed=missed[client],
            arrival_p50=_percentile(arrivals[client], 50),
            arrival_p95=_percentile(arrivals[client], 95),
            upload_p50=_percentile(uploads[client], 50),
            training_p50=_percentile(training[client], 50),
            bytes_down=down[client],
            bytes_up=up[client],
            refusals=refused[client],
        )
        for client in range(num_clients)
    ]


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _seconds(folder: Path) -> float | None:
    try:
        seconds = json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("seconds")
        return None if seconds is None else float(seconds)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _faults(folder: Path) -> tuple[tuple[FaultSpan, ...], str | None]:
    """The timeline of a scenario, where the run is the disturbed one of a chaos folder.

    A verdict that cannot be read is none: the report is of the run.
    """
    folder = folder.resolve()
    try:
        verdict: Mapping[str, Any] = json.loads((folder.parent / VERDICT).read_text(encoding="utf-8"))
        if folder.name != DISTURBED and Path(verdict["disturbed"]["run_dir"]).resolve() != folder:
            return (), None
        return tuple(map(_fault, verdict["timeline"])), str(verdict["scenario"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return (), None


def _fault(item: Mapping[str, Any]) -> FaultSpan:
    return FaultSpan(
        do=str(item["do"]),
        on=tuple(map(str, item["on"])),
        detail=str(item["detail"] or ""),
        began_round=item["began_round"],
        ended_round=item["ended_round"],
        began_s=item["began_s"],
        ended_s=item["ended_s"],
        notes=tuple(map(str, item["notes"])),
    )

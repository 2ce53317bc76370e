"""The rounds whose spans a report carries, made small: the page draws any of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deploy.report.model import Waterfall
from deploy.report.sampling import spread, telling
from ps.records import RoundMetrics, Span

__all__ = ["MOST_CLIENTS", "waterfall_of"]

MOST_CLIENTS = 60
"""Shown of one round: who was last decides how long it took."""

_MOST_SPANS = 40_000
_MICRO = 1e6


def waterfall_of(
    records: Mapping[int, RoundMetrics], spans: Mapping[int, Sequence[Span]], adversaries: range, of: int
) -> Waterfall | None:
    """At most 200 rounds; fewer of a federation of many clients.

    Parameters
    ----------
    records, spans
        Of the rounds that were looked at, by round.
    of
        How many rounds the run has.
    """
    if not records:
        return None
    most = max((len(found) for found in spans.values()), default=0)
    per_round = max(1, min(most, 5 * MOST_CLIENTS))
    chosen = telling(np.array([record.latency_s for record in records.values()]), max(8, _MOST_SPANS // per_round))
    kept = [list(records.values())[place] for place in chosen]
    segments = tuple(dict.fromkeys(name for record in kept for name, took in record.segments.items() if took > 0))
    names = tuple(dict.fromkeys(span.name for record in kept for span in spans[record.round_id]))
    rounds = [_round(record, spans[record.round_id], segments, names) for record in kept]
    how = (
        "all rounds" if len(kept) == of else f"{len(kept)} of {of} rounds: the slowest, and an even spread of the rest"
    )
    if any(shown["k"] < shown["c"] for shown in rounds):
        how += f"; of each at most {MOST_CLIENTS} clients, the last to arrive and an even spread of the rest"
    return Waterfall(segments, names, rounds, (adversaries.start, adversaries.stop), how)


def _round(
    record: RoundMetrics, spans: Sequence[Span], segments: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    end: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        if span.client_id is not None:
            end[span.client_id] = max(end[span.client_id], span.start_s + span.seconds)
    by_end = sorted(end, key=lambda client: (end[client], client))
    shown = by_end
    if len(by_end) > MOST_CLIENTS:
        late = by_end[-2 * MOST_CLIENTS // 3 :]
        early = by_end[: -len(late)]
        shown = [early[place] for place in spread(len(early), MOST_CLIENTS - len(late))] + late
    among = set(shown)
    flat = [
        value
        for span in spans
        if span.client_id is None or span.client_id in among
        for value in (
            names.index(span.name),
            -1 if span.client_id is None else span.client_id,
            round(span.start_s * _MICRO),
            round(span.seconds * _MICRO),
            span.num_bytes,
        )
    ]
    return {
        "r": record.round_id,
        "l": round(record.latency_s * _MICRO),
        "n": record.answered,
        "m": list(record.missing[:MOST_CLIENTS]),
        "x": len(record.missing),
        "s": [
            v
            for name, took in record.segments.items()
            if took > 0
            for v in (segments.index(name), round(took * _MICRO))
        ],
        "c": len(by_end),
        "k": len(shown),
        "p": flat,
    }

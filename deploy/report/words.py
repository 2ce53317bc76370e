"""Numbers and facts of a run as words for the page."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from deploy.report.lanes import lanes_of
from deploy.report.model import ClientFacts, Operations, RunData, percentiles_of

__all__ = [
    "MEANINGS",
    "bytes_words",
    "client_rows",
    "comparison_rows",
    "fact_rows",
    "fault_rows",
    "percent",
    "percentile_rows",
    "seconds_words",
    "tiles",
    "value_words",
]

MOST_CLIENTS = 60

MEANINGS = {
    "open": "until clients may answer",
    "first": "until the first momentum is complete",
    "collect": "until as many have answered as set the pace",
    "grace": "waiting for the others",
    "close": "until the round is being made",
    "noise": "waiting for the noise",
    "transfer": "from host to device",
    "aggregate": "projection, rule and release",
    "step": "server momentum and model step",
    "commit": "made durable on disk",
    "hold": "until the public schedule allows",
    "publish": "until the model is available",
}


def seconds_words(seconds: float | None) -> str:
    """With three digits, in a unit that fits."""
    if seconds is None or not isfinite(seconds):
        return "–"
    if seconds == 0:
        return "0"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def bytes_words(count: int) -> str:
    """Decimal units."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{_digits(value)} {unit}"
        value /= 1000
    return f"{_digits(value)} TB"


def percent(share: float | None) -> str:
    return "–" if share is None or not isfinite(share) else f"{100 * share:.2f} %"


def value_words(value: Any) -> str:
    """A configuration's value."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """The figures to know first: name, value, what to know about it."""
    latest, facts = run.latest, run.operations
    where = "final model, whole test set" if run.final else f"after {latest.round_id} rounds" if latest else "not known"
    found = [("Accuracy", percent(latest.accuracy if latest else None), where)]
    if run.privacy.epsilon is not None:
        kind = "guaranteed" if run.privacy.private else "asked for, not guaranteed"
        found.append(("Privacy budget", f"ε = {run.privacy.epsilon:g}", f"δ = {run.privacy.delta:g}; {kind}"))
        found.append(("Spent so far", f"ε = {_digits(run.privacy.spent_now)}", "by the releases made (odometer)"))
    else:
        found.append(("Privacy", "none", "no noise was asked for"))
    if run.signal is not None and run.signal.ratio is not None:
        found.append(("Signal over noise", _digits(run.signal.ratio), "at most, of what moved the model"))
    if facts is not None and len(facts.latency_s):
        p50, p95, _, longest = percentiles_of(facts.latency_s)
        about = f"p95 {seconds_words(p95)}, longest {seconds_words(longest)}"
        found.append(("Time per round, median", seconds_words(p50), about))
    return found


def fact_rows(run: RunData) -> list[tuple[str, str]]:
    """What the run was, and for the operator how it went."""
    get = run.configuration.get
    rows = [
        ("run", run.run_id),
        ("status", f"{run.status}{f': {run.message}' if run.message else ''}"),
        ("rounds", f"{run.rounds} of {run.planned}"),
        ("clients", _who(run)),
        ("rule", value_words(get("aggregation.rule"))),
        ("attack", _attack(run)),
        ("data", f"{value_words(get('data.dataset'))}, dealt by {value_words(get('data.partition'))}"),
        ("model", f"{value_words(get('model.name'))}, d = {_grouped(run.parameters)}"),
        ("seed", value_words(get("training.seed"))),
    ]
    if run.privacy.epsilon is not None:
        conversion = f"{run.privacy.calibration} calibration"
        rows.append(("noise", f"multiplier z = {run.privacy.noise_multiplier:.6g}, {conversion}"))
    facts = run.operations
    if facts is not None:
        rows += [
            ("began", _clock(facts.started_at)),
            ("last change", _clock(facts.updated_at)),
            ("whole run", seconds_words(facts.seconds)),
            ("traffic", f"{bytes_words(facts.bytes_down)} to the clients, {bytes_words(facts.bytes_up)} from them"),
        ]
        if facts.late_models:
            rows.append(("late models", f"{facts.late_models} published behind the public schedule"))
    return rows


def comparison_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """The same facts of several runs, a row each."""
    rows: list[list[str]] = [
        ["status", *(run.status for run in runs)],
        ["rounds", *(f"{run.rounds} of {run.planned}" for run in runs)],
        ["accuracy", *(percent(run.latest.accuracy if run.latest else None) for run in runs)],
        ["loss", *(_digits(run.latest.loss if run.latest else None) for run in runs)],
        ["private", *("yes" if run.privacy.private else "no" for run in runs)],
        ["ε, budget", *(_digits(run.privacy.epsilon) for run in runs)],
        ["ε, spent", *(_digits(run.privacy.spent_now) for run in runs)],
        ["δ", *("–" if run.privacy.delta is None else f"{run.privacy.delta:g}" for run in runs)],
        ["signal over noise", *(_digits(run.signal.ratio if run.signal else None) for run in runs)],
        ["clients", *(_who(run) for run in runs)],
    ]
    if any(run.operations for run in runs):
        for place, name in enumerate(("p50", "p95", "p99", "longest")):
            rows.append([f"time per round, {name}", *(_latency(run, place) for run in runs)])
        rows.append(["refusals", *(_refusals(run) for run in runs)])
    return rows


def percentile_rows(facts: Operations) -> list[tuple[str, ...]]:
    """One row a segment, and the whole round."""
    whole = float(np.nansum(facts.latency_s)) or 1.0
    rows = []
    for name, values in [*facts.segments.items(), ("whole round", facts.latency_s)]:
        meaning = MEANINGS.get(name, "" if name != "whole round" else "θₜ available → θₜ₊₁ available")
        share = f"{100 * float(np.nansum(values)) / whole:.1f} %"
        rows.append((name, *map(seconds_words, percentiles_of(values)), share, meaning))
    return rows


def client_rows(facts: Operations) -> list[tuple[str, ...]]:
    """All clients where they are few, else those who were missing, refused or late most."""

    def trouble(client: ClientFacts) -> tuple[float, ...]:
        return -client.missed, -sum(client.refusals.values()), -(client.arrival_p95 or 0.0), client.client_id

    chosen = sorted(facts.clients, key=trouble)[:MOST_CLIENTS]
    return [
        (
            f"{client.client_id}{'*' if client.adversary else ''}",
            str(client.answered),
            str(client.missed),
            *map(seconds_words, (client.arrival_p50, client.arrival_p95, client.upload_p50, client.training_p50)),
            *(bytes_words(count) if count else "–" for count in (client.bytes_down, client.bytes_up)),
            ", ".join(f"{kind} {count}" for kind, count in sorted(client.refusals.items())) or "–",
        )
        for client in sorted(chosen, key=lambda client: client.client_id)
    ]


def fault_rows(facts: Operations) -> list[tuple[str, ...]]:
    """The timeline of a scenario, as planned; the number is that of the lane in the figure."""
    lanes = {id(fault): place for place, (_, held) in enumerate(lanes_of(facts.faults), 1) for fault in held}
    return [
        (
            str(lanes.get(id(fault), "–")),
            f"{fault.do}{f' ({fault.detail})' if fault.detail else ''}",
            ", ".join(fault.on),
            _moment(fault.began_s, fault.began_round, "never"),
            _moment(fault.ended_s, fault.ended_round, "at the end" if fault.began_s is not None else "–"),
            "; ".join(fault.notes),
        )
        for fault in facts.faults
    ]


def _moment(seconds: float | None, round_id: int | None, otherwise: str) -> str:
    if seconds is None:
        return otherwise
    return "start" if seconds < 0 else f"round {round_id}, {seconds:.1f} s"


def _who(run: RunData) -> str:
    byzantine = run.configuration.get("federation.byzantine")
    return f"n = {run.clients}, f = {value_words(byzantine)}"


def _attack(run: RunData) -> str:
    get = run.configuration.get
    misbehaviour = get("misbehaviour.name", "none")
    words = [] if get("attack.name", "none") == "none" else [value_words(get("attack.name"))]
    words += [] if misbehaviour in ("none", None) else [f"misbehaviour {value_words(misbehaviour)}"]
    return ", ".join(words) or "none"


def _latency(run: RunData, place: int) -> str:
    facts = run.operations
    return seconds_words(percentiles_of(facts.latency_s)[place] if facts and len(facts.latency_s) else None)


def _refusals(run: RunData) -> str:
    return str(sum(run.operations.refusals.values())) if run.operations else "–"


def _digits(value: float | None) -> str:
    if value is None or value != value:
        return "–"
    if not isfinite(value):
        return "∞"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _grouped(count: int) -> str:
    return f"{count:,}".replace(",", "\u202f")


def _clock(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))

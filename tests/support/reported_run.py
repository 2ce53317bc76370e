"""Run folders with everything that a report can show, made by hand: ledger, scores, times, spans, refusals."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from federations import small_experiment
from made_run import make_run

from ps.journal import next_head
from ps.privacy.rows import LedgerEntry, from_json
from ps.reader import RunReader
from ps.records import EvaluationRecord, Records, RefusalCount, RoundMetrics, Span
from ps.timing import SEGMENTS

__all__ = ["PRIVATE", "SEGMENTS", "add_chaos", "make_reported_run", "measure", "stretch"]

PRIVATE: Mapping[str, Any] = {"epsilon": 3.0, "delta": 1e-3}
_SHARES = np.array([0.01, 0.32, 0.4, 0.1, 0.005, 0.004, 0.0, 0.06, 0.015, 0.05, 0.0, 0.02])


def make_reported_run(
    folder: Path, *, rounds: int = 12, made: int | None = None, spans: bool = True, seed: int = 1, **sections: Any
) -> Path:
    """A run of which ``made`` rounds (default all) were released, with metrics for each of them."""
    given = {
        "training": {"rounds": rounds, "server_momentum": 0.5},
        "aggregation": {"rule": "trimmed_mean"},
        "privacy": PRIVATE,
    }
    tree = {name: {**given.get(name, {}), **sections.get(name, {})} for name in given | sections}
    make_run(folder, small_experiment(**tree), rounds=made)
    measure(
        folder,
        rounds if made is None else made,
        clients=tree.get("federation", {}).get("clients", 5),
        spans=spans,
        seed=seed,
    )
    return folder


def measure(folder: Path, rounds: int, *, clients: int, spans: bool = True, seed: int = 1, offset: float = 0.0) -> None:
    """Metrics of so many rounds; the last client is slow, and misses every fifth round."""
    random = np.random.default_rng(seed)
    records = Records(folder / "operator" / "metrics.sqlite")
    for round_id in range(rounds):
        latency = offset + 0.08 * float(random.lognormal(0.0, 0.25)) * (6.0 if round_id % 37 == 11 else 1.0)
        missing = (clients - 1,) if round_id % 5 == 4 else ()
        records.round(
            RoundMetrics(
                round_id,
                1.7e9 + 100 * offset + round_id,
                latency,
                dict(zip(SEGMENTS, (latency * _SHARES / _SHARES.sum()).tolist(), strict=True)),
                clients - len(missing),
                missing,
                40 * clients,
                40 * (clients - len(missing)),
                _spans(random, clients, latency, missing) if spans else (),
            )
        )
        if round_id % max(1, rounds // 40) == 0 or round_id == rounds - 1:
            share = 1 - 0.9 * float(np.exp(-4 * (round_id + 1) / rounds)) - 0.02 * float(random.random())
            records.evaluation(EvaluationRecord(round_id + 1, share, 2.3 * (1.02 - share), 200))
    refused = (("late", clients - 1, rounds // 5), ("equivocation", 1, 2), ("not_a_member", None, 3))
    records.refusals([RefusalCount(kind, client, count, 0, rounds - 1) for kind, client, count in refused if count])
    records.close()


def _spans(random: np.random.Generator, clients: int, latency: float, missing: Sequence[int]) -> list[Span]:
    found = [Span("noise", None, 0.001, latency * 0.2)]
    for client in range(clients):
        if client in missing:
            continue
        down, train = latency * 0.05 * (1 + float(random.random())), latency * 0.4 * float(0.7 + 0.5 * random.random())
        up = latency * (0.25 if client == clients - 1 else 0.08)
        found += [
            Span("download", client, 0.001, down, 40),
            Span("training", client, 0.001 + down, train),
            Span("upload", client, 0.001 + down + train, up, 40),
            Span("conditioning", client, 0.001 + down + train + up, latency * 0.01),
        ]
    return found


def stretch(folder: Path, rounds: int) -> None:
    """More releases in the ledger, up to ``rounds`` of them, chained as a server would; there are no models of them."""
    reader = RunReader(folder)
    (done, text, head) = reader.ledger_rows()[-1]
    last, rows = from_json(text), []
    assert isinstance(last, LedgerEntry)
    for round_id in range(done, rounds):
        text = replace(last, round_id=round_id, nonce=f"{round_id:064x}").to_json()
        head = next_head(head, text)
        rows.append((round_id + 1, text, head))
    with sqlite3.connect(folder / "run.sqlite") as database:
        database.executemany("INSERT INTO ledger VALUES (?, ?, ?)", rows)
        database.execute("UPDATE run SET round_id = ?, status = 'completed'", (rounds,))


def add_chaos(place: Path, run: Path, rounds: int) -> None:
    """A verdict beside a run named ``disturbed``, as ``byzuldp chaos`` leaves it."""

    def fault(do: str, on: str, began: int | None, ended: int | None, detail: str = "") -> dict[str, Any]:
        return {
            "do": do,
            "on": [on],
            "detail": detail,
            "at": f"round {began}",
            "for": None,
            "began_s": None if began is None else 0.1 * began,
            "began_round": began,
            "ended_s": None if ended is None else 0.1 * ended,
            "ended_round": ended,
            "notes": [],
        }

    timeline = [
        fault("delay", "client-0", rounds // 6, rounds // 3, "delay_ms = 200"),
        fault("kill", "ps", rounds // 2, rounds // 2),
        fault("stop", "client-2", rounds // 2, None),
        fault("delay", "client-0", 3 * rounds // 4, rounds - 1, "delay_ms = 200"),
        fault("partition", "client-1", None, None),
    ]
    verdict = {"scenario": "made <up>", "timeline": timeline, "disturbed": {"run_dir": str(run)}}
    (place / "verdict.json").write_text(json.dumps(verdict))

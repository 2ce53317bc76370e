"""What the record of a round costs: CPU time of each part, measured alone, at n clients of one process each.

Every client has four spans a round (download, training, upload, conditioning), and the server one; that is the most
there can be. Times are of the threads' own CPU, so whatever else the machine does counts as little as it can. A dozen
rounds are written in a transaction, as where a round takes 40 ms; beside rounds that follow at once, there are some
with so much sleep between them, after which nothing is in the processor's caches.

    make bench-recorder
    .venv/bin/python benchmarks/recorder.py --clients 300
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from timing import facts

from ps.records import GATHER_S, RoundMetrics
from ps.spans import NAMES
from ps.status import StatusPage
from ps.store import RunStore
from ps.timing import SEGMENTS, RoundTiming
from ps.tracing import QUEUED, Tracing

RESULT = Path(__file__).parent / "results" / "recorder.md"
TARGET_US = 100.0
WARM_UP = 50
PACE_S = 0.04  # of rounds of 20 clients
PARTS = {
    "segments": "while the round goes on, on whichever thread ends one",
    "spans": "while the round goes on, each where it ends",
    "record": "on the event loop, once the next round is open",
    "hand over": "there too: to the thread that writes",
    "observers": "there too: handed to the threads of the status page and of the traces",
}


def measure(
    clients: int, rounds: int, pace_s: float, folder: Path
) -> tuple[dict[str, list[float]], list[float], float, int]:
    """Microseconds of CPU of each part of each round, and of the clock of each handing over; then, a round, those of
    CPU of the thread that writes, and bytes of disk."""
    store, _ = RunStore.create(
        folder, run_id="0" * 16, configuration={}, fingerprint="", genesis_json="{}", theta=np.zeros(10, np.float32)
    )
    page, traces = StatusPage("", lambda _: None), Tracing("")
    taken: dict[str, list[float]] = {name: [] for name in PARTS}
    elapsed: list[float] = []
    others_ns = 0
    for round_id in range(rounds + WARM_UP):
        if round_id == WARM_UP:
            others_ns = _others_ns()
        now, cpu = time.monotonic(), _Cpu(taken, round_id >= WARM_UP)
        timing = RoundTiming(round_id, now)
        for segment in SEGMENTS:
            timing.ends(segment)
        cpu.took("segments")
        for client_id in range(clients):
            for name in NAMES[:4]:
                timing.span(name, client_id, now, 0.1, 104_040)
        timing.span("noise", None, now, 0.001)
        cpu.took("spans")
        metrics = RoundMetrics(
            round_id=round_id,
            started_at=time.time(),
            latency_s=timing.latency_s,
            segments=timing.segments,
            spans=timing.spans,
            answered=clients,
            missing=(),
            bytes_down=104_040 * clients,
            bytes_up=104_040 * clients,
        )
        cpu.took("record")
        began = time.perf_counter()
        store.record_round(metrics)
        elapsed.append((time.perf_counter() - began) * 1e6)
        cpu.took("hand over")
        page.observe(metrics)
        traces.observe(metrics)
        cpu.took("observers")
        if pace_s:
            time.sleep(pace_s)
        elif round_id % round(GATHER_S / PACE_S) == 0:
            store._records.flush()
    store.rounds()  # all of them are written
    writing_us = (_others_ns() - others_ns) / 1e3 / rounds
    store.close()
    size = (folder / "operator" / "metrics.sqlite").stat().st_size
    return taken, elapsed[WARM_UP:], writing_us, size // (rounds + WARM_UP)


def _others_ns() -> int:
    """CPU time of all threads but this one."""
    return time.process_time_ns() - time.thread_time_ns()


class _Cpu:
    """The CPU time of this thread since it was last asked for."""

    def __init__(self, taken: dict[str, list[float]], counts: bool) -> None:
        self._taken, self._counts, self._at = taken, counts, time.thread_time_ns()

    def took(self, part: str) -> None:
        now = time.thread_time_ns()
        if self._counts:
            self._taken[part].append((now - self._at) / 1e3)
        self._at = time.thread_time_ns()


def enqueue_us(calls: int) -> float:
    """Handing a round to the thread that sends traces: what ``observe`` costs where a collector is named."""
    traces = Tracing("")
    traces._thread = object()  # type: ignore[assignment]
    record = RoundMetrics(0, 0.0, 0.1)
    per_call = []
    for _ in range(calls // QUEUED):
        began = time.thread_time_ns()
        for _ in range(QUEUED):
            traces.observe(record)
        per_call.append((time.thread_time_ns() - began) / 1e3 / QUEUED)
        while not traces._queue.empty():
            traces._queue.get_nowait()
    return statistics.median(per_call)


def report(clients: int, rounds: int) -> str:
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="byzuldp-") as folder:
        taken, elapsed, writing_us, size = measure(clients, rounds, 0.0, Path(folder) / "run")
        cold, _, cold_writing_us, _ = measure(clients, rounds // 10, PACE_S, Path(folder) / "cold")
    totals = [sum(parts) + writing_us for parts in zip(*taken.values(), strict=True)]
    median = statistics.median(totals)
    cold_us = statistics.median(sum(parts) for parts in zip(*cold.values(), strict=True)) + cold_writing_us
    verdict = f"met ({median:.0f} µs)" if median <= TARGET_US else f"missed: {median:.0f} µs"
    later = [sum(parts) for parts in zip(*(taken[name] for name in ("record", "hand over", "observers")), strict=True)]

    def row(name: str, values: list[float], where: str) -> str:
        shares = (percentile(values, percent) for percent in (5, 50, 95))
        return f"| {name} | {' | '.join(f'{share:.1f}' for share in shares)} | {where} |"

    num_spans = 4 * clients + 1
    if clients == 20:
        outcome = f"Target, at n = 20: at most {TARGET_US:.0f} µs a round (median): {verdict}."
    else:
        outcome = f"At n = {clients}, {median / num_spans:.2f} µs a span."
    lines = [
        "# The recorder of rounds",
        "",
        f"`make bench-recorder`: {rounds} rounds of n = {clients} clients, measured alone:",
        f"{num_spans} spans and {len(SEGMENTS)} segments each. CPU time, in µs a round.",
        "Ratios travel; microseconds do not: beside other work on the same cores it takes two or three times as long,",
        "and p5 is what is nearest to an idle machine.",
        "",
        *(f"- {name}: {value}" for name, value in facts().items()),
        f"- load average before and after: {before:.1f}, {os.getloadavg()[0]:.1f}",
        "",
        "| part | p5 | median | p95 | when |",
        "| --- | --- | --- | --- | --- |",
        *(row(name, taken[name], where) for name, where in PARTS.items()),
        f"| write | | {writing_us:.1f} (mean) | | on the records' own thread, some rounds in a transaction |",
        row("**all**", totals, ""),
        "",
        outcome,
        "",
        "Of this only the segments and the spans are between θₜ and θₜ₊₁: the record is made once the next model is",
        "available and the next round open. It keeps the event loop busy there for",
        f"{statistics.median(later):.0f} µs (median): what arrives in that moment waits that long.",
        f"By the clock handing over takes {statistics.median(elapsed):.0f} µs (median), {percentile(elapsed, 95):.0f}",
        f"(p95) or {max(elapsed):.0f} (longest).",
        f"With {PACE_S * 1e3:.0f} ms of sleep before each round, so that all code and data come from memory, it is",
        f"{cold_us:.0f} µs.",
        f"{size:,} bytes of disk a round.",
        f"Where a collector is named (`monitoring.otlp`), handing a round over takes {enqueue_us(6400):.1f} µs.",
        "Making and sending the spans, on that thread, is not counted, nor what the status page does when it is looked",
        "at, on its own.",
    ]
    return "\n".join(lines) + "\n"


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    page = report(given.clients, given.rounds)
    print(page)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page)


if __name__ == "__main__":
    main()

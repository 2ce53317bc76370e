"""What the latency benchmark found, as a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["bound", "page"]

MIB = 1 << 20
CHUNK_BYTES = 1 << 20
FASTER = 4.0
"""Times Flower's legacy server that we are to be, everywhere."""
MOST = {"20x26010": 1.5, "20x1000000": 1.5, "20x10000000": 1.7}
"""Times the streaming echo that a round may take."""

Raw = Mapping[str, Any]


def bound(clients: int, dimension: int) -> int:
    """Bytes that the parameter server may need over what it has when idle.

    The matrix, eight vectors, two chunks for each stream that carries a tensor (a pull and a push of every client),
    and 64 MB.
    """
    return 4 * dimension * (clients + 8) + 2 * CHUNK_BYTES * 2 * clients + 64_000_000


def page(tree: Raw) -> str:
    """Markdown."""
    rows = tree["rows"]
    lines = [
        "# Round latency",
        "",
        "`make bench-latency`. Medians over rounds, milliseconds; ratios travel, milliseconds do not. Ours are whole",
        "rounds from one model available to the next: the trimmed mean with f = n/5, Gaussian noise at ε = 10 for the",
        "run, a durable commit. One process a client everywhere, and no training in any; our clients make their",
        "momenta and the digests of them once. In each row ours and the echoes were measured before and after Flower.",
        "",
        "The echo is a bare grpc.aio server with our options that takes d floats from each client and then sends d to",
        "each, in chunks as ours, looking at nothing: with a push and a pull a round, as the protocol has them; over",
        "one held call, the least that gRPC can do; and unary, the tensor as one message.",
        "",
        "## Against Flower",
        "",
        *_table(
            ("n; d", "ours", f"Flower, legacy server (target ≥ {FASTER:g}×)", "Flower, SuperLink"),
            *(
                (_name(row), _ms(_ours(row)), _faster(row["flower"], row, FASTER), _faster(row["superlink"], row))
                for row in rows.values()
            ),
        ),
        "",
        "## Against an echo of the same bytes",
        "",
        *_table(
            ("n; d", "ours", "streaming echo", "over one held call", "unary echo"),
            *(
                (
                    _name(row),
                    _ms(_ours(row)),
                    _over(row, "calls", MOST.get(name)),
                    _over(row, "stream"),
                    _over(row, "unary"),
                )
                for name, row in rows.items()
            ),
        ),
        "",
        "## Where a round goes",
        "",
        *_table(
            ("n; d", "phases, medians", "processor time of a server a round"),
            *((_name(row), _listed(row["segments"]), _listed(row["cpu_s"])) for row in rows.values()),
        ),
        "",
        "## What the parameter server holds",
        "",
        "Its largest resident size over what it had when it began to listen, MiB; the bound is n·d·4 + 8·d·4 bytes,",
        "two chunks for each stream and 64 MB.",
        "",
        *_table(
            ("n; d", "idle", "peak over idle", "bound"),
            *(
                (
                    _name(row),
                    f"{row['idle_rss'] / MIB:,.0f}",
                    f"{(row['peak_rss'] - row['idle_rss']) / MIB:,.0f}"
                    + _verdict(row["peak_rss"] - row["idle_rss"] <= bound(row["clients"], row["dimension"])),
                    f"{bound(row['clients'], row['dimension']) / MIB:,.0f}",
                )
                for row in rows.values()
            ),
        ),
        "",
        "## How it was measured",
        "",
        *_facts(rows),
        "",
    ]
    return "\n".join(lines)


def _facts(rows: Raw) -> list[str]:
    lines = [f"- {name}: {value}" for name, value in next(iter(rows.values()))["machine"].items()]
    for row in rows.values():
        load = " and ".join(f"{value:.1f}" for value in row["load"])
        counts = [
            f"{sum(map(len, row['ours']))} rounds of ours",
            f"{sum(map(len, row['echo']['calls']))} of each echo",
            f"{len(row['flower'])} of Flower's legacy server",
        ]
        if row["superlink"]:
            counts.append(f"{len(row['superlink'])} of its SuperLink")
        measured = f"measured {row['measured']}, {row['seconds']:.0f} s, load average {load}"
        lines.append(f"- n; d = {_name(row)}: {', '.join(counts)}; {measured}")
    return lines


def _name(row: Raw) -> str:
    return f"{row['clients']}; {row['dimension']:,}"


def _median(runs: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for run in runs for value in run)


def _ours(row: Raw) -> float:
    return _median(row["ours"])


def _faster(rounds: Sequence[float], row: Raw, target: float | None = None) -> str:
    if not rounds:
        return "not measured"
    theirs = statistics.median(rounds)
    ratio = theirs / _ours(row)
    verdict = "" if target is None else _verdict(ratio >= target)
    return f"{_ms(theirs)}: {ratio:,.1f}×{verdict}"


def _over(row: Raw, shape: str, target: float | None = None) -> str:
    theirs = _median(row["echo"][shape])
    ratio = _ours(row) / theirs
    verdict = "" if target is None else f" (target ≤ {target}){_verdict(ratio <= target)}"
    return f"{_ms(theirs)}: {ratio:.2f}{verdict}"


def _verdict(met: bool) -> str:
    return "" if met else " **missed**"


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in seconds.items())


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


def _table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]

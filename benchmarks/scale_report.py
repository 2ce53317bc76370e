"""What the scale benchmark found, as a page and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import google.protobuf
import grpc
from timing import facts

if TYPE_CHECKING:
    from scale import Measured

__all__ = ["as_json", "page"]

TARGET = 1.5
"""Times the bare echo; for the median round."""
MIB = 1 << 20


def ratio(one: Measured, shape: str) -> float:
    """The median round over the echo's."""
    return statistics.median(one.latency) / statistics.median(one.echo[shape])


def page(found: Sequence[Measured], *, command: str, began: float, load: tuple[float, float, float]) -> str:
    """Markdown."""
    if not all(one.latency and one.echo["calls"] and one.echo["stream"] for one in found):
        return "\n".join(["no result", *(problem for one in found for problem in one.lost[:20])]) + "\n"
    lines = [
        "# Scale",
        "",
        f"`make bench-scale` (`{command}`), {time.strftime('%Y-%m-%d', time.gmtime(began))}. Real connections over",
        "loopback, one for each client, hosted by processes that train nothing; a parameter server in a process of its",
        "own; the trimmed mean with f = n/20, Gaussian noise, a durable commit of every round. Ratios travel;",
        "milliseconds do not.",
        "",
        *(f"- {name}: {value}" for name, value in _facts().items()),
        f"- load average before and after: {load[0]:.1f}, {os.getloadavg()[0]:.1f}",
        f"- the whole took {time.time() - began:.0f} s",
        "",
        "The bare echo is a grpc.aio server that takes d floats from each client and then sends d floats to each,",
        "looking at nothing: the same driver processes, options, chunks and number of connections. Once with a push",
        "and a pull a round, as the protocol has them; once with one call held for all rounds, the least that gRPC can",
        "do. Rounds before and after the run count alike.",
        "",
        "## A round",
        "",
        *_table(
            ("n", "d", "rounds", "p50, ms", "p95, ms", "echo p50, ms", "round over echo", "over one held call", "lost"),
            *(
                (
                    f"{one.setting.clients:,}",
                    f"{one.setting.d:,}",
                    str(one.setting.rounds),
                    _ms(statistics.median(one.latency)),
                    _ms(_p95(one.latency)),
                    f"{_ms(statistics.median(one.echo['calls']))}; {_ms(statistics.median(one.echo['stream']))} held",
                    f"{ratio(one, 'calls'):.2f} (target ≤ {TARGET})",
                    f"{ratio(one, 'stream'):.2f}",
                    str(len(one.lost) or "none"),
                )
                for one in found
            ),
        ),
        "",
    ]
    for one in found:
        setting = one.setting
        segments = ", ".join(f"{name} {_ms(value)}" for name, value in one.segments.items())
        sentences = (
            f"n = {setting.clients:,}, d = {setting.d:,}: ε = {setting.epsilon:g}, δ = {setting.delta:g} for the run.",
            f"{one.answers:,} momenta counted, of {setting.clients * setting.rounds:,}.",
            f"Median segments, ms: {segments}.",
            f"Processor seconds a round: parameter server {one.ps_cpu_s:.2f}, drivers {one.driver_cpu_s:.2f};",
            f"of the echo {one.echo_cpu_s['calls']:.2f} and {one.echo_driver_cpu_s['calls']:.2f}, over one held call",
            f"{one.echo_cpu_s['stream']:.2f} and {one.echo_driver_cpu_s['stream']:.2f}.",
            f"All had joined after {one.joined_s:.1f} s.",
        )
        lines += [" ".join(sentences), ""]
    lines += [
        "## What the parameter server holds",
        "",
        "Beyond what it has when it begins to listen. The formula is that of docs/limits.md, without its term for",
        "calls and with all calls that peers could open, each of them stalled with a full chunk.",
        "",
        *_table(
            ("n", "d", "own memory (USS), MiB", "RSS, MiB", "formula without calls, MiB", "formula, MiB", "files"),
            *(_memory_row(one) for one in found),
        ),
        "",
    ]
    return "\n".join(lines)


def as_json(found: Sequence[Measured], *, began: float, load: tuple[float, float, float]) -> dict[str, Any]:
    """All of it."""
    return {
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": time.time() - began,
        "load_before": load[0],
        **_facts(),
        "target": TARGET,
        "settings": [
            {
                **asdict(one),
                "d": one.setting.d,
                "ratio": {shape: ratio(one, shape) for shape in one.echo},
                "p50_s": statistics.median(one.latency),
                "p95_s": _p95(one.latency),
            }
            for one in found
        ],
    }


def _facts() -> dict[str, str]:
    ours = facts()
    libraries = f"grpc {grpc.__version__}, protobuf {google.protobuf.__version__}"
    return {
        "processor": ours["processor"],
        "software": f"{ours['software']}, {libraries}, {platform.system()} {platform.release()}",
    }


def _memory_row(one: Measured) -> tuple[str, ...]:
    assert one.idle is not None
    assert one.peak is not None
    without_calls = one.formula.total - one.formula.streams
    return (
        f"{one.setting.clients:,}",
        f"{one.setting.d:,}",
        f"{(one.peak.uss - one.idle.uss) / MIB:.0f} over {one.idle.uss / MIB:.0f}",
        f"{(one.peak.rss - one.idle.rss) / MIB:.0f} over {one.idle.rss / MIB:.0f}",
        f"{without_calls / MIB:.0f}",
        f"{one.formula.total / MIB:,.0f}",
        str(one.peak.files),
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.2g}"


def _table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]

"""Medians of functions measured in turn, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

__all__ = ["facts", "interleaved", "milliseconds"]

_BUDGET_S = 0.3  # of one function in one repetition
_MOST_CALLS = 9


def interleaved(functions: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Seconds that each function takes: the median over all its calls, after one call that does not count.

    Every repetition calls each function in turn: a quick one several times, a slow one once.
    """
    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = max(1, min(_MOST_CALLS, int(_BUDGET_S / max(_seconds(function), 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            taken[name] += [_seconds(function) for _ in range(calls[name])]
    return {name: statistics.median(values) for name, values in taken.items()}


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def milliseconds(seconds: float) -> str:
    """Three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def facts() -> dict[str, str]:
    """What the numbers depend on."""
    cpu, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        entries = dict(
            (part.strip() for part in line.split(":", 1)) for line in info.read_text().splitlines() if ":" in line
        )
        cpu, flags = entries.get("model name", cpu), entries.get("flags", entries.get("Features", ""))
    vectors = [name for name in ("sse2", "avx", "avx2", "avx512f", "asimd", "sve") if name in flags.split()]
    return {
        "processor": f"{cpu}, {os.cpu_count()} cores, {', '.join(vectors) or 'unknown vector instructions'}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "threads": f"{torch.get_num_threads()} of torch",
    }

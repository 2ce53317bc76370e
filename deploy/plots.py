"""Small plots made of characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["bar", "plot", "sparkline"]

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_WIDTHS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per value, the latest ``width`` of them; the lowest is low, the highest high.

    What is not finite is shown as a dot.
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return "·" * len(shown)
    low, span = min(finite), max(finite) - min(finite)

    def level(value: float) -> str:
        if not math.isfinite(value):
            return "·"
        return _HEIGHTS[1 + round(7 * (value - low) / span)] if span else _HEIGHTS[4]

    return "".join(map(level, shown))


def bar(share: float, width: int) -> str:
    """A horizontal bar of ``share`` (0 to 1) of ``width`` characters, to an eighth of a character."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_WIDTHS[rest] if rest else "")


def plot(points: Sequence[tuple[float, float]], *, width: int, height: int, top: float = 1.0) -> list[str]:
    """Columns of ``points`` (x, y), with y from 0 to ``top``: ``height`` strings, the highest row first.

    Each column shows the mean of the values whose x falls into it; one that has none repeats the one before.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return []
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in finite:
        columns[round((width - 1) * (x - first) / (last - first)) if last > first else width - 1].append(y)
    eighths, current = [], 0.0
    for column in columns:
        current = sum(column) / len(column) if column else current
        eighths.append(round(8 * height * min(max(current / top, 0.0), 1.0)))
    return ["".join(_HEIGHTS[min(max(e - 8 * row, 0), 8)] for e in eighths) for row in reversed(range(height))]

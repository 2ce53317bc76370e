"""Verdicts as rows of a Markdown table: ``python -m deploy.chaos.tabulate runs/chaos-*/verdict.json``.

The files are those that ``byzuldp chaos`` leaves, or what it prints with ``--json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["row", "table"]

COLUMNS = (
    "scenario",
    "backend",
    "verdict",
    "rounds",
    "lost",
    "begun again",
    "incomplete",
    "median round",
    "undisturbed",
    "95% of rounds",
    "undisturbed",
    "accuracy",
    "undisturbed",
)


def row(verdict: Mapping[str, Any]) -> list[str]:
    """One scenario's cells."""
    before, after = verdict["undisturbed"], verdict["disturbed"]
    name = verdict["scenario"] + (" (quick)" if verdict["quick"] else "")
    without = f", without {', '.join(verdict['left_out'])}" if verdict["left_out"] else ""
    return [
        name,
        verdict["backend"] + without,
        verdict["verdict"],
        _number(after["rounds"]),
        _number(after["lost"]),
        _number(after["begun_again"]),
        _number(after["incomplete"]),
        _milliseconds(after["latency_p50_s"]),
        _milliseconds(before["latency_p50_s"]),
        _milliseconds(after["latency_p95_s"]),
        _milliseconds(before["latency_p95_s"]),
        _percent(after["accuracy"]),
        _percent(before["accuracy"]),
    ]


def table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The whole table, sorted by scenario and backend."""
    rows = sorted(map(row, verdicts))
    numbers = "|".join(["---"] * 3 + ["---:"] * (len(COLUMNS) - 3))
    lines = [" | ".join(COLUMNS), numbers, *(" | ".join(cells) for cells in rows)]
    return "\n".join(f"| {line} |" if line != numbers else f"|{line}|" for line in lines) + "\n"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.0f} ms"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def main(paths: Sequence[str]) -> None:
    sys.stdout.write(table([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Curves of a sweep, with the seeds' spread, as PNG; and what they are drawn from, as CSV beside each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from deploy.report.palette import DASHES, GRID, INK, SERIES, SOFT
from deploy.sweep.plan import Plan, Plot
from deploy.sweep.points import shown
from deploy.sweep.results import Row
from deploy.sweep.selection import group_by
from deploy.sweep.table import write_csv

__all__ = ["draw"]

Curve = list[tuple[Any, float, float | None, int]]
"""x, mean over the runs there, their standard deviation (None for one), how many."""


def draw(plan: Plan, rows: Mapping[str, Row], folder: Path) -> list[Path]:
    """One picture per panel; the paths written. None where nothing is to be drawn."""
    if plan.plot is None:
        return []
    plot = plan.plot
    runs = [(point, row) for point in plan.points if (row := rows.get(point.key)) is not None]
    written: list[Path] = []
    for panel, inside in group_by(runs, plot.panels).items():
        curves: dict[str, Curve] = {}
        for line, along in group_by(inside, plot.lines).items():
            name = ", ".join(_words(key, value) for key, value in zip(plot.lines, line, strict=True))
            curve: Curve = []
            for at in group_by(along, [plot.x]).values():
                values = [value for _, row in at if (value := row.results.get(plot.y)) is not None]
                if values:
                    x, spread = at[0][0].values[plot.x], stdev(values) if len(values) > 1 else None
                    curve.append((x, fmean(values), spread, len(values)))
            if curve:
                curves[name or plot.y] = _ordered(curve)
        if not curves:
            continue
        title = ", ".join(_words(key, value) for key, value in zip(plot.panels, panel, strict=True))
        path = folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{plot.y} {title}").strip("-")[:80] + ".png")
        while path in written:  # two long titles that begin alike
            path = path.with_stem(f"{path.stem}-{len(written)}")
        folder.mkdir(exist_ok=True)
        _picture(curves, plot, title or plan.name, path)
        records = [
            {"line": name, plot.x: x, f"{plot.y}_mean": mean, f"{plot.y}_std": spread, "runs": count}
            for name, curve in curves.items()
            for x, mean, spread, count in curve
        ]
        write_csv(path.with_suffix(".csv"), records, list(records[0]))
        written.append(path)
    return written


def _picture(curves: Mapping[str, Curve], plot: Plot, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    everywhere = _ordered([point for curve in curves.values() for point in curve])
    numeric = all(isinstance(x, int | float) for x, *_ in everywhere)
    names = list(dict.fromkeys(shown(x) for x, *_ in everywhere))
    for number, (name, curve) in enumerate(curves.items()):
        xs = [float(x) if numeric else names.index(shown(x)) for x, *_ in curve]
        means, spreads = [mean for _, mean, _, _ in curve], [spread or 0.0 for _, _, spread, _ in curve]
        colour, dash = SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]
        axes.plot(xs, means, color=colour, linestyle=dash, marker="o", markersize=3.5, linewidth=1.6, label=name)
        low, high = ([mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    if numeric:
        values = sorted({float(x) for x, *_ in everywhere})
        if values[0] > 0 and values[-1] / values[0] >= 10:
            axes.set_xscale("log")
    else:
        ticks = [_words("", name).strip() for name in names]
        axes.set_xticks(range(len(names)), ticks, rotation=20, ha="right")
    if "accuracy" in plot.y:
        axes.set_ylim(-0.02, 1.02)
    axes.set_title(title, color=INK, fontsize=11)
    axes.set_xlabel(plot.x, color=INK)
    axes.set_ylabel(plot.y.replace("_", " "), color=INK)
    axes.grid(color=GRID)
    axes.tick_params(colors=SOFT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(curves) > 1 or plot.lines:
        axes.legend(fontsize=8, frameon=False)
    new = path.with_name(path.name + ".tmp")
    figure.savefig(new, dpi=160, format="png", metadata={"Software": None})
    new.replace(path)


def _ordered(curve: Curve) -> Curve:
    """By x where it is a number, else as the grid has it."""
    if all(isinstance(x, int | float) for x, *_ in curve):
        return sorted(curve, key=lambda point: float(point[0]))
    return curve


def _words(key: str, value: str) -> str:
    """A setting in a legend; of a section its values, which say enough."""
    with suppress(ValueError):
        if isinstance(tree := json.loads(value), dict):
            return " ".join(_plain(inside) for inside in tree.values())
    return f"{key.rpartition('.')[2].replace('_', ' ')} {value}"


def _plain(value: Any) -> str:
    return ", ".join(map(_plain, value)) if isinstance(value, list) else shown(value).replace("_", " ")

"""Figures for the operator: where a round's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.report.clients import answers, arrivals
from deploy.report.drawing import Drawing, blockwise, label_axes, or_empty, plain_ticks, unit_of
from deploy.report.lanes import draw_faults, lanes_of
from deploy.report.legends import legend_below, legend_height, line_style, short
from deploy.report.model import Floats, Operations, RunData, percentiles_of
from deploy.report.palette import INK, PAPER, SERIES, SOFT, segment_colour
from deploy.report.sampling import POINTS, blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparing_figures", "operator_figures"]

_LANES = 14
_SHARES = ((50.0, "p50"), (95.0, "p95"))


def operator_figures(run: RunData) -> list[Drawing]:
    """Of one run; none where nothing was recorded."""
    facts = run.operations
    if facts is None or not len(facts.rounds):
        return []
    figures = [_over_rounds(run, facts), _phases(facts), _percentiles(facts), answers(run, facts), arrivals(facts)]
    return [figure for figure in figures if figure is not None]


def comparing_figures(runs: Sequence[RunData]) -> list[Drawing]:
    """Of several runs over each other: the median latency."""
    there = [(place, run) for place, run in enumerate(runs) if run.operations and len(run.operations.rounds)]
    if not there:
        return []
    curves = [(run, place, _blocks(run.operations, 50.0)) for place, run in there if run.operations]
    scale, unit = unit_of(float(np.nanmax([np.nanmax(ys) for _, _, (_, ys) in curves])))

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        handles = [axes[0].plot(xs, ys * scale, **line_style(place))[0] for _, place, (xs, ys) in curves]
        label_axes(axes[0], f"time per round ({unit})")
        axes[0].set_ylim(bottom=0)
        legend_below(figure, handles, [short(run.label) for run, _, _ in curves])

    def rows() -> Iterator[Sequence[Any]]:
        for run, _, (xs, ys) in curves:
            for x, y in zip(xs, ys, strict=True):
                yield run.label, float(x), float(y)

    caption = f"Median of θₜ available → θₜ₊₁ available, over blocks of rounds where there are more than {POINTS}."
    height = 200 + legend_height([short(run.label) for run, _, _ in curves])
    columns = ("run", "round", "latency_p50_s")
    return [Drawing("latency", "Time per round", caption, plot, columns, rows, height=height, operator=True)]


def _blocks(facts: Operations, percent: float) -> tuple[Floats, Floats]:
    return blocks(facts.rounds, facts.latency_s, lambda values: float(np.percentile(values, percent)))


def _over_rounds(run: RunData, facts: Operations) -> Drawing:
    """Latency, and below it what was done to the run."""
    lanes = lanes_of(facts.faults)
    shown = lanes[:_LANES]
    scale, unit = unit_of(float(np.percentile(facts.latency_s, 95)))
    single = len(facts.rounds) <= POINTS

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        handles, labels = [], ["p50", "p95", "longest"]
        if single:
            marker = "o" if len(facts.rounds) == 1 else None
            handles += axes[0].plot(facts.rounds, facts.latency_s * scale, marker=marker, **line_style(0))
            for place, (percent, _) in enumerate(_SHARES, 1):
                level = float(np.percentile(facts.latency_s, percent)) * scale
                handles.append(axes[0].axhline(level, **line_style(place), linewidth=1.2))
            labels = ["a round", "p50 of all", "p95 of all"]
        else:
            for place, (percent, _) in enumerate(_SHARES):
                xs, ys = _blocks(facts, percent)
                handles += axes[0].plot(xs, ys * scale, **line_style(place))
            xs, ys = blocks(facts.rounds, facts.latency_s, lambda values: float(values.max()))
            handles += axes[0].plot(xs, ys * scale, linewidth=0.9, **line_style(2))
        axes[0].set_ylabel(f"time per round ({unit})")
        if facts.latency_s.min() > 0 and facts.latency_s.max() / np.median(facts.latency_s) > 30:
            axes[0].set_yscale("log")
        else:
            axes[0].set_ylim(bottom=0)
        if shown:
            draw_faults(axes, shown, run.rounds)
        axes[-1].set_xlabel("round")
        plain_ticks(axes[0].yaxis)
        plain_ticks(axes[-1].xaxis)
        legend_below(figure, handles, labels)

    def rows() -> Iterator[Sequence[Any]]:
        for round_id, latency in zip(facts.rounds, facts.latency_s, strict=True):
            yield int(round_id), float(latency)

    caption = "θₜ available → θₜ₊₁ available." + blockwise(len(facts.rounds))
    if shown:
        caption += " Below: the faults of the scenario, numbered as in the table."
    if len(lanes) > len(shown):
        caption += f" {len(lanes) - len(shown)} more are in the table alone."
    return Drawing(
        "latency",
        "Time per round" + (", and the faults" if shown else ""),
        caption,
        plot,
        ("round", "latency_s"),
        rows,
        height=220 + (26 + 13 * len(shown) if shown else 0),
        panels=(150.0, 10.0 + 13.0 * len(shown)) if shown else (1.0,),
        operator=True,
    )


def _phases(facts: Operations) -> Drawing | None:
    names = [name for name, values in facts.segments.items() if np.nansum(values) > 0]
    if not names:
        return None
    idle = [name for name in facts.segments if name not in names]
    means = {
        name: blocks(facts.rounds, np.nan_to_num(values), _mean)
        for name, values in facts.segments.items()
        if name in names
    }
    xs = next(iter(means.values()))[0]
    stacked = np.array([means[name][1] for name in names])
    totals = stacked.sum(axis=0)
    scale, unit = unit_of(float(np.percentile(totals, 95)))
    ceiling = max(3.0 * float(np.median(totals)), 1.25 * float(np.percentile(totals, 95)))

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        colours = [segment_colour(name, place)[0] for place, name in enumerate(names)]
        areas: list[Any]
        if len(xs) > 1:
            areas = axes[0].stackplot(xs, stacked * scale, colors=colours, edgecolor=PAPER, linewidth=0.25)
        else:
            bottoms = np.cumsum(stacked[:, 0]) - stacked[:, 0]
            areas = [
                axes[0].bar(xs, height * scale, bottom=bottom * scale, color=colour, width=0.5)
                for height, bottom, colour in zip(stacked[:, 0], bottoms, colours, strict=True)
            ]
        if totals.max() > ceiling:  # one slow round would flatten all others
            axes[0].set_ylim(0, ceiling * scale)
        label_axes(axes[0], f"time per round ({unit})")
        axes[0].margins(x=0.01)
        legend_below(figure, areas, names, columns=4)

    def rows() -> Iterator[Sequence[Any]]:
        for place, round_id in enumerate(facts.rounds):
            yield int(round_id), *(or_empty(facts.segments[name][place]) for name in names)

    caption = "The segments of a round, one on the other: they add up to its time."
    size = -(-len(facts.rounds) // POINTS)
    caption += f" Means of {size} rounds each." if size > 1 else ""
    if totals.max() > ceiling:
        caption += " Peaks are cut off; the figure of the time per round has them."
    if idle:
        caption += f" No time was taken by {', '.join(idle)}."
    columns = ("round", *(f"{name}_s" for name in names))
    title = "Where a round's time goes"
    return Drawing("phases", title, caption, plot, columns, rows, height=214 + 14 * -(-len(names) // 4), operator=True)


def _percentiles(facts: Operations) -> Drawing | None:
    entries = [(name, percentiles_of(values)) for name, values in facts.segments.items() if np.nansum(values) > 0]
    entries = [*entries, ("whole round", percentiles_of(facts.latency_s))]
    positive = [value for _, values in entries for value in values if value > 0]
    if not positive:
        return None
    scale, unit = unit_of(float(np.nanmax([values[0] for _, values in entries])))
    least = max(min(positive), max(positive) * 1e-7)

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        handles: list[Any] = []
        for place, (_, values) in enumerate(entries):
            p50, p95, p99, most = (max(value, least) * scale for value in values)
            whole = place == len(entries) - 1
            axes[0].plot([p50, most], [place, place], color=INK if whole else SOFT, linewidth=1.0)
            handles = [
                *axes[0].plot([p50], [place], "o", color=SERIES[0], markersize=5.5),
                *axes[0].plot([p95], [place], "D", color=SERIES[1], markersize=4.5),
                *axes[0].plot([p99], [place], "s", color=SERIES[2], markersize=4),
                *axes[0].plot([most], [place], "|", color=INK, markersize=8),
            ]
        axes[0].set_xscale("log")
        axes[0].set_xlim(least * scale / 2, max(positive) * scale * 2)
        axes[0].set_yticks(range(len(entries)), [short(name, 14) for name, _ in entries])
        axes[0].set_ylim(len(entries) - 0.4, -0.6)
        axes[0].set_xlabel(f"time ({unit}, logarithmic)")
        plain_ticks(axes[0].xaxis)
        legend_below(figure, handles, ["p50", "p95", "p99", "longest"], columns=4)

    def rows() -> Iterator[Sequence[Any]]:
        for name, values in entries:
            yield name, *map(or_empty, values)

    return Drawing(
        "percentiles",
        "Percentiles of each segment",
        "Over all recorded rounds, each segment for itself: percentiles do not add up.",
        plot,
        ("segment", "p50_s", "p95_s", "p99_s", "longest_s"),
        rows,
        height=90 + 15 * len(entries),
        operator=True,
    )


def _mean(values: Floats) -> float:
    return float(values.mean())

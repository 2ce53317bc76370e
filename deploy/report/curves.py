"""Figures of one or several runs over their rounds: accuracy, loss, ε, signal against noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.report.drawing import Drawing, number, plain_ticks
from deploy.report.legends import legend_below, legend_height, line_style, short
from deploy.report.model import Floats, RunData
from deploy.report.palette import INK, SERIES, SOFT
from deploy.report.sampling import POINTS, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["public_figures"]

_WIDE = 1000.0  # between the largest and the smallest of a curve: then its axis is logarithmic


def public_figures(runs: Sequence[RunData]) -> list[Drawing]:
    """What can be drawn of what was released, runs over each other; signal and noise of a single run."""
    figures = [_accuracy(runs), _loss(runs), _epsilon(runs)]
    if len(runs) == 1:
        figures += [*_release(runs[0]), *_displacement(runs[0])]
    return [figure for figure in figures if figure is not None]


def _over_each_other(
    runs: Sequence[RunData],
    curve: Callable[[RunData], tuple[Sequence[float], Sequence[float]]],
    *,
    name: str,
    title: str,
    caption: str,
    unit: str,
    column: str,
    finish: Callable[[Axes], None] = lambda _axes: None,
) -> Drawing | None:
    curves = [curve(run) for run in runs]
    there = [(run, xs, ys) for run, (xs, ys) in zip(runs, curves, strict=True) if len(xs)]
    if not there:
        return None
    places = {id(run): place for place, run in enumerate(runs)}

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        handles, labels = [], []
        for run, xs, ys in there:
            kept = spread(len(xs), POINTS)
            style = line_style(places[id(run)])
            drawn = axes[0].plot(
                [xs[k] for k in kept], [ys[k] for k in kept], marker="o" if len(xs) <= 40 else None, ms=3, **style
            )
            handles.append(drawn[0])
            labels.append(short(run.label))
        axes[0].set_xlabel("round")
        axes[0].set_ylabel(unit)
        finish(axes[0])
        plain_ticks(axes[0].xaxis)
        plain_ticks(axes[0].yaxis)
        if len(runs) > 1:
            legend_below(figure, handles, labels)

    def rows() -> Iterator[Sequence[Any]]:
        for run, xs, ys in there:
            for x, y in zip(xs, ys, strict=True):
                yield run.label, x, y

    height = 200 + (legend_height([short(run.label) for run, _, _ in there]) if len(runs) > 1 else 0)
    return Drawing(name, title, caption, plot, ("run", "round", column), rows, height=height)


def _accuracy(runs: Sequence[RunData]) -> Drawing | None:
    def curve(run: RunData) -> tuple[Sequence[float], Sequence[float]]:
        return [score.round_id for score in run.scores], [100 * score.accuracy for score in run.scores]

    def finish(axes: Axes) -> None:
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), min(100.0, high) if high > 100 else high)

    caption = "Share of the public test set that the model after so many rounds classifies correctly."
    return _over_each_other(
        runs,
        curve,
        name="accuracy",
        title="Accuracy",
        caption=caption,
        unit="test accuracy (%)",
        column="accuracy_percent",
        finish=finish,
    )


def _loss(runs: Sequence[RunData]) -> Drawing | None:
    def curve(run: RunData) -> tuple[Sequence[float], Sequence[float]]:
        finite = [score for score in run.scores if isfinite(score.loss)]
        return [score.round_id for score in finite], [score.loss for score in finite]

    def finish(axes: Axes) -> None:
        values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()])
        _logarithmic_if_wide(axes, values)

    return _over_each_other(
        runs,
        curve,
        name="loss",
        title="Loss",
        caption="Mean loss on the public test set; a model whose loss is not finite is left out.",
        unit="test loss (nats per image)",
        column="loss_nats",
        finish=finish,
    )


def _epsilon(runs: Sequence[RunData]) -> Drawing | None:
    def curve(run: RunData) -> tuple[Sequence[float], Sequence[float]]:
        pairs = [(t, e) for t, e in zip(run.privacy.rounds, run.privacy.spent, strict=True) if isfinite(e)]
        return [t for t, _ in pairs], [e for _, e in pairs]

    deltas = {run.privacy.delta for run in runs if run.privacy.delta is not None}
    budgets = {run.privacy.epsilon for run in runs if run.privacy.epsilon is not None}

    def finish(axes: Axes) -> None:
        highest = max(float(np.max(np.asarray(line.get_ydata(), float))) for line in axes.get_lines())
        for budget in budgets:
            axes.axhline(budget, color=SOFT, linestyle=(0, (1.5, 1.5)), linewidth=1.0)
        top = max([highest, *budgets])
        axes.set_ylim(0, top * 1.12 if top > 0 else 1.0)
        if len(budgets) == 1:
            (budget,) = budgets
            axes.annotate(
                f"budget ε = {number(budget)}",
                (0.01, budget),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(0, 2),
                fontsize=9.2,
                color=INK,
            )

    caption = (
        "ε of the releases so far, recomputed from the ledger: an odometer, true at a round chosen in advance. What is "
        "guaranteed, whenever the run stops, is the budget (dotted)."
    )
    at = f"δ = {number(next(iter(deltas)))}" if len(deltas) == 1 else "at each run's δ"
    return _over_each_other(
        runs,
        curve,
        name="epsilon",
        title="Privacy spent",
        caption=caption,
        unit=f"ε spent ({at})",
        column="epsilon",
        finish=finish,
    )


def _release(run: RunData) -> list[Drawing]:
    signal = run.signal
    if signal is None:
        return []
    scale = signal.clip_norm or 1.0
    unit = "L2 norm (multiples of C)" if signal.clip_norm else "L2 norm (no unit)"
    kept = spread(len(signal.rounds), POINTS)

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        rounds, noise = signal.rounds[kept].astype(float), signal.noise[kept] / scale
        marker = "o" if len(kept) == 1 else None
        most = np.full(len(kept), signal.most / scale)
        first = axes[0].plot(rounds, most, marker=marker, **line_style(0))
        second = axes[0].plot(rounds, noise, marker=marker, **line_style(1))
        _between(axes[0], rounds, most, noise)
        _finish_norms(axes[0], np.concatenate([most, noise]), unit)
        legend_below(figure, [first[0], second[0]], ["signal, at most", "noise"])

    def rows() -> Iterator[Sequence[Any]]:
        for round_id, noise in zip(signal.rounds, signal.noise, strict=True):
            yield int(round_id), signal.most, float(noise)

    caption = (
        "One release: the largest norm the aggregate can have before the noise, and the norm √d σ of the noise. The "
        "aggregate's own norm is not released, so it is not here."
    )
    columns = ("round", "signal_at_most_l2", "noise_l2")
    return [Drawing("release", "Signal and noise of each release", caption, plot, columns, rows, height=220)]


def _displacement(run: RunData) -> list[Drawing]:
    signal = run.signal
    if signal is None or len(signal.until) < 2:
        return []

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        by_signal, by_noise = np.array(signal.moved_by_signal), np.array(signal.moved_by_noise)
        first = axes[0].plot(signal.until, by_signal, **line_style(0))
        second = axes[0].plot(signal.until, by_noise, **line_style(1))
        _between(axes[0], np.array(signal.until, float), by_signal, by_noise)
        _finish_norms(axes[0], np.concatenate([by_signal, by_noise]), "distance θ moves (L2, no unit)")
        legend_below(figure, [first[0], second[0]], ["by training, at most", "by noise, about"])

    def rows() -> Iterator[Sequence[Any]]:
        yield from zip(signal.until, signal.moved_by_signal, signal.moved_by_noise, strict=True)

    caption = "All releases so far: noise adds up like √rounds, training in one direction like rounds."
    if signal.ratio is not None:
        caption += f" Signal over noise at the end: {signal.ratio:.3g}; below 1, a run is not expected to learn well."
    columns = ("rounds", "moved_by_training_at_most_l2", "moved_by_noise_about_l2")
    return [
        Drawing("displacement", "How far signal and noise move the model", caption, plot, columns, rows, height=220)
    ]


def _between(axes: Axes, xs: Floats, signal: Floats, noise: Floats) -> None:
    """Shade what noise has above signal: there a run does not learn well."""
    axes.fill_between(xs, signal, noise, where=list(noise > signal), color=SERIES[1], alpha=0.10, linewidth=0)


def _finish_norms(axes: Axes, values: Floats, unit: str) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(unit)
    if values.min() > 0 and values.max() / values.min() > 8:
        axes.set_yscale("log")
        axes.set_ylim(values.min() / 1.6, values.max() * 1.6)
    else:
        axes.set_ylim(0, 1.15 * values.max())
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)


def _logarithmic_if_wide(axes: Axes, values: Floats) -> None:
    if values.size and values.min() > 0 and values.max() / values.min() > _WIDE:
        axes.set_yscale("log")
        axes.set_ylim(values.min() / 1.6, values.max() * 1.6)

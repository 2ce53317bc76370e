"""Figures for the operator: who answered, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.report.drawing import Drawing, blockwise, label_axes, or_empty, unit_of
from deploy.report.legends import legend_below, line_style
from deploy.report.model import Operations, RunData
from deploy.report.sampling import blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["answers", "arrivals"]

_FEW_CLIENTS = 80


def answers(run: RunData, facts: Operations) -> Drawing:
    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        xs, ys = blocks(facts.rounds, facts.answered.astype(float), lambda values: float(values.min()))
        handles = [
            *axes[0].plot(xs, ys, drawstyle="steps-mid", **line_style(0)),
            axes[0].axhline(run.clients, **line_style(2), linewidth=1.1),
        ]
        labels = ["answered", f"roster: {run.clients}"]
        if run.quorum is not None:
            handles.append(axes[0].axhline(run.quorum, **line_style(1), linewidth=1.1))
            labels.append(f"quorum: {run.quorum}")
        axes[0].set_ylim(0, run.clients * 1.08)
        label_axes(axes[0], "answers (clients)")
        legend_below(figure, handles, labels)

    def rows() -> Iterator[Sequence[Any]]:
        yield from zip(facts.rounds.tolist(), facts.answered.tolist(), strict=True)

    caption = "Whose momenta were there when the round closed." + blockwise(len(facts.rounds), "the fewest")
    return Drawing("answers", "Answers", caption, plot, ("round", "answered"), rows, height=205, operator=True)


def arrivals(facts: Operations) -> Drawing | None:
    known = [client for client in facts.clients if client.arrival_p50 is not None]
    if not known:
        return None
    p50 = np.array([client.arrival_p50 or 0.0 for client in known])
    p95 = np.array([client.arrival_p95 or 0.0 for client in known])
    scale, unit = unit_of(float(np.percentile(p95, 95)))

    def plot(figure: Figure, axes: Sequence[Axes]) -> None:
        handles, labels = [], []
        for place, (adversary, label, marker) in enumerate(
            ((False, "honest: p50, bar to p95", "o"), (True, "adversary", "^"))
        ):
            chosen = [k for k, client in enumerate(known) if client.adversary == adversary]
            if not chosen:
                continue
            ids = np.array([known[k].client_id for k in chosen])
            colour = line_style(place)["color"]
            few = len(known) <= _FEW_CLIENTS
            if few:
                axes[0].vlines(ids, p50[chosen] * scale, p95[chosen] * scale, color=colour, linewidth=1.0, alpha=0.7)
            else:
                axes[0].plot(ids, p95[chosen] * scale, ".", color=colour, markersize=1.6, alpha=0.5)
            handles += axes[0].plot(ids, p50[chosen] * scale, marker, color=colour, markersize=4.5 if few else 2.0)
            labels.append(label if few else label.replace("bar to p95", "pale p95"))
        axes[0].set_ylim(bottom=0)
        label_axes(axes[0], f"after θₜ was available ({unit})")
        axes[0].set_xlabel("client (id)")
        legend_below(figure, handles, labels)

    def rows() -> Iterator[Sequence[Any]]:
        for client in facts.clients:
            yield (
                client.client_id,
                client.answered,
                client.missed,
                or_empty(client.arrival_p50),
                or_empty(client.arrival_p95),
                or_empty(client.upload_p50),
                or_empty(client.training_p50),
                client.bytes_down,
                client.bytes_up,
                sum(client.refusals.values()),
            )

    caption = f"When each client's momentum was complete, in the {facts.looked_at} rounds that were looked at."
    columns = (
        "client",
        "answered_rounds",
        "missed_rounds",
        "arrival_p50_s",
        "arrival_p95_s",
        "upload_p50_s",
        "training_p50_unverified_s",
        "bytes_down",
        "bytes_up",
        "refusals",
    )
    return Drawing("arrivals", "Arrivals", caption, plot, columns, rows, height=215, operator=True)

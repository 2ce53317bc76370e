"""Faults on the timeline of a run: a lane for each kind and target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.report.model import FaultSpan
from deploy.report.palette import SERIES, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_faults", "lanes_of"]


def lanes_of(faults: Sequence[FaultSpan]) -> list[tuple[str, list[FaultSpan]]]:
    """Faults of one kind on the same targets share a lane of the timeline."""
    lanes: dict[tuple[str, tuple[str, ...], str], list[FaultSpan]] = {}
    for fault in faults:
        if fault.began_round is not None:
            lanes.setdefault((fault.do, fault.on, fault.detail), []).append(fault)
    return [(do, held) for (do, _, _), held in lanes.items()]


def draw_faults(axes: Sequence[Axes], lanes: Sequence[tuple[str, list[FaultSpan]]], rounds: int) -> None:
    """Bars in the second axes, shades over the first; a fault of no length is a diamond."""
    for place, (_, faults) in enumerate(lanes):
        colour = SERIES[place % len(SERIES)]
        for fault in faults:
            begin = fault.began_round or 0
            end = rounds if fault.ended_round is None else fault.ended_round
            if end > begin:
                axes[1].barh(place, end - begin, left=begin, height=0.62, color=colour, alpha=0.8, linewidth=0)
            else:
                axes[1].plot([begin], [place], marker="D", markersize=4, color=colour)
            axes[0].axvspan(begin, max(end, begin), color=SOFT, alpha=0.10, linewidth=0.6)
    axes[1].set_yticks(range(len(lanes)), [f"{place + 1} {do}" for place, (do, _) in enumerate(lanes)])
    axes[1].set_ylim(len(lanes) - 0.4, -0.6)
    axes[1].tick_params(axis="y", length=0)
    axes[1].grid(visible=False, axis="y")

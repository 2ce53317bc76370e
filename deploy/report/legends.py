"""Legends, and the lines they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deploy.report.palette import DASHES, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["legend_below", "legend_height", "line_style", "short"]


def line_style(place: int) -> dict[str, Any]:
    """Colour and dashes of the run at a place: both differ between neighbours, and no two of forty agree."""
    return {"color": SERIES[place % len(SERIES)], "linestyle": DASHES[place % len(DASHES)]}


def short(label: str, most: int = 26) -> str:
    """A label that fits a legend; its end tells runs apart."""
    cut = label if len(label) <= most else f"…{label[1 - most :]}"
    return f" {cut}" if cut.startswith("_") else cut  # matplotlib leaves such names out


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 0) -> None:
    """Under the axes, where nothing else is."""
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=columns or _columns(labels),
        handlelength=2.4,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def legend_height(labels: Sequence[str]) -> int:
    """Points that :func:`legend_below` needs for it."""
    return 6 + 14 * -(-len(labels) // _columns(labels))


def _columns(labels: Sequence[str]) -> int:
    return min(len(labels), max(1, 48 // (max(map(len, labels), default=1) + 6)))

"""A figure as SVG for the page, as PNG and as CSV."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.report.palette import GRID, INK, PAPER, SOFT, as_variables
from deploy.report.sampling import POINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Drawing", "blockwise", "label_axes", "number", "or_empty", "plain_ticks", "unit_of"]

_POINTS_PER_INCH = 72
WIDTH = 340
"""Of every figure, in points: it is legible at the width of a phone, where a point is about a pixel."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.6,
    "axes.labelsize": 9.6,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 9.2,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 9.2,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 9.2,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "byzuldp",  # and one figure always the same file
}


@dataclass(frozen=True)
class Drawing:
    """One figure.

    Attributes
    ----------
    name
        Of its files, and unique in a page.
    title, caption
        For people; the caption says what cannot be drawn: sampling, premises.
    plot
        Draws into the axes it is given.
    columns, rows
        The data, units in the names of the columns.
    height
        In points.
    panels
        Axes below each other, as shares of the height.
    operator
        Whether only the operator may see it.
    """

    name: str
    title: str
    caption: str
    plot: Callable[[Figure, Sequence[Axes]], None]
    columns: tuple[str, ...]
    rows: Callable[[], Iterator[Sequence[Any]]]
    height: int = 210
    panels: tuple[float, ...] = (1.0,)
    operator: bool = False

    def svg(self) -> str:
        """For the page: colours are its variables, text is text in its font, ids are this figure's own."""
        with _drawn(self) as figure, io.StringIO() as file:
            figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
            text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        referred = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))
        text = re.sub(r' id="([^"]+)"', lambda m: f' id="{self.name}-{m[1]}"' if m[1] in referred else "", text)
        text = re.sub(r'(url\(|href=")#', rf"\1#{self.name}-", text)
        text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
        text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', self._opening, text, count=1)
        text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
        return as_variables(re.sub(r"\n\s*", "\n", text)).strip()

    def png(self) -> bytes:
        """In the light colours."""
        with _drawn(self) as figure, io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=220, facecolor=PAPER)
            return file.getvalue()

    def csv(self) -> str:
        """The data, a line of column names first."""
        with io.StringIO(newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(self.rows())
            return file.getvalue()

    def _opening(self, found: re.Match[str]) -> str:
        from html import escape

        return (
            f'<svg class="figure" viewBox="{found[1]}" role="img" aria-label="{escape(self.title)}" '
            'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        )


@contextmanager
def _drawn(drawing: Drawing) -> Iterator[Figure]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font lacks, no room for a margin
        size = (WIDTH / _POINTS_PER_INCH, drawing.height / _POINTS_PER_INCH)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04, hspace=0.06)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(
            len(drawing.panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": list(drawing.panels)}
        )[:, 0]
        drawing.plot(figure, list(axes))
        yield figure


def number(value: float) -> str:
    """As short as it can be said: for an axis."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def plain_ticks(axis: Any) -> None:
    """Numbers as people write them, also on a logarithmic axis, and few enough to stand apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if axis.get_scale() != "log":
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=axis.axis_name == "x"))
        return
    low, high = sorted(axis.get_view_interval())
    decades = [tick for tick in LogLocator(numticks=6).tick_values(low, high) if low <= tick <= high]
    if len(decades) < 2:
        finer = [tick for tick in LogLocator(subs=(1, 2, 5), numticks=6).tick_values(low, high) if low <= tick <= high]
        decades = finer if len(finer) > 1 else [low, high]
    axis.set_major_locator(FixedLocator(decades[:: max(1, -(-len(decades) // 6))]))
    axis.set_minor_formatter(NullFormatter())


def label_axes(axes: Axes, unit: str) -> None:
    """Rounds along, ``unit`` up."""
    axes.set_xlabel("round")
    axes.set_ylabel(unit)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)


def unit_of(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which so many seconds are best read."""
    if not seconds < 1.0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def blockwise(rounds: int, what: str = "each curve's value") -> str:
    """What a caption says of a curve of so many rounds."""
    size = -(-rounds // POINTS)
    return f" A point is {what} of {size} rounds." if size > 1 else ""


def or_empty(value: float | None) -> float | str:
    """A cell of a CSV file."""
    return "" if value is None or value != value else float(value)

"""The live view of a run, drawn for a terminal of any size: what matters most is kept when there is little room."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from deploy.plots import sparkline
from deploy.progress import Progress, seconds_words
from deploy.report.palette import SEGMENTS

__all__ = ["BORDERS", "panel_of"]

BORDERS = 2
"""Lines of the frame, above and below the rows."""

LEGEND, LEGEND_LINES = 5, 2  # segments with a name of their own; all others are one
SPARKS = 32
_COLOURS = {name: Style(color=dark) for name, _, dark in SEGMENTS}
_FILLINGS = "█▓▒░▚·"  # where there are no colours
_OTHERS, _OTHERS_STYLE = "others", Style(color="#93989e")


class _Row(NamedTuple):
    """One line. Those of the highest ``rank`` go first when there is no room."""

    rank: int
    name: str
    content: RenderableType


def panel_of(progress: Progress, now: float, *, width: int, height: int, colour: bool = True) -> Panel:
    """What is known of the run, at most ``width`` columns and ``height`` lines (but three lines at least).

    Parameters
    ----------
    now
        Monotonic seconds, for a wait that counts down.
    colour
        Whether colours are shown; without them the segments of a round differ by their filling.
    """
    room = max(8, width - 4 - 10 - 2)  # between the frame's edges, beside the longest name
    rows = _rows(progress, now, room, colour)
    while len(rows) > max(1, height - BORDERS):
        rows.remove(max(rows, key=lambda row: row.rank))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(row.name, row.content)
    where = f"run {progress.run_id} at {progress.address}" if progress.address else "starting"
    title, height = Text(progress.name, style="bold"), len(rows) + BORDERS
    return Panel(table, title=title, subtitle=Text(where), title_align="left", width=width, height=height)


def _rows(progress: Progress, now: float, room: int, colour: bool) -> list[_Row]:
    rows = [
        _Row(0, "round", _done(progress, room)),
        _Row(2, "accuracy", _with_curve(progress.accuracy_words(), progress.accuracies.values, "green", room)),
        _Row(1, "privacy", _with_curve(progress.spent_words(), progress.epsilons.values, "magenta", room)),
        _Row(4, "round time", _with_curve(_latency(progress), progress.latencies, "cyan", room)),
    ]
    if progress.segments:
        bar, *legend = _phases(progress.segments, room, colour)
        rows += [_Row(5, "last round", bar), *(_Row(6, "", line) for line in legend)]
    rows.append(_Row(3, "answered", Text(progress.answered_words(), style="yellow" if progress.missing else "")))
    if progress.live is not None and progress.clients:
        few = progress.live < progress.clients
        rows.append(_Row(7, "members", Text(f"{progress.live} of {progress.clients} live", style="yellow" * few)))
    rows.append(_Row(9, "refusals", Text(progress.refusals_words())))
    if progress.num_warnings:
        rows.append(_Row(8, "faults", Text(progress.faults_words(), style="yellow")))
    if url := progress.status_url:
        rows += _folded(10, "status", url, room, f"link {url}")
    if progress.end is not None:
        rows += _folded(-1, "end", f"{progress.end[0]}: {progress.end[1]}", room)
    elif waiting := progress.waiting(now) or progress.note:
        rows += _folded(-1, "now", waiting, room, "cyan")
    return rows


def _folded(rank: int, name: str, words: str, room: int, style: str = "") -> list[_Row]:
    """What may be longer than a line, and is of no use when cut off."""
    lines = textwrap.wrap(words, room, max_lines=3, placeholder=" …") or [""]
    return [_Row(rank, "" if number else name, Text(line, style=style)) for number, line in enumerate(lines)]


def _done(progress: Progress, room: int) -> RenderableType:
    words = f"{progress.round} of {progress.of}"
    left = f"{seconds_words(progress.left_s)} left" if progress.round < progress.of and progress.left_s else ""
    width = room - len(words) - len(left) - 4
    if width < 4:
        return Text(f"{words}  {left}")
    bar = Table.grid(padding=(0, 2))
    bar.add_row(words, ProgressBar(total=max(1, progress.of), completed=progress.round, width=min(40, width)), left)
    return bar


def _with_curve(words: str, values: Sequence[float], style: str, room: int) -> Text:
    """Words, and a curve in what they leave; it is of the whole run where it is not of the last rounds."""
    width = min(SPARKS, room - len(words) - 2)
    shown = Text(words)
    if width >= 4 and len(values) > 1:
        shown.append("  ").append(sparkline(_thinned(values, width), width), style=style)
    return shown


def _latency(progress: Progress) -> str:
    if not progress.latencies:
        return "–"
    words = seconds_words(progress.latency_s)
    return f"{words} (median)" if len(progress.latencies) > 1 else words


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many, evenly spread; the last one always."""
    kept = list(values)
    if len(kept) <= most:
        return kept
    return [kept[-1 - (most - 1 - k) * (len(kept) - 1) // (most - 1)] for k in range(most)]


def _phases(segments: Mapping[str, float], room: int, colour: bool) -> list[Text]:
    """The last round as a bar of its segments, and what they are in at most two lines; the small ones together."""
    for named in range(LEGEND, 0, -1):
        shown = _largest(segments, named)
        looks = _looks(shown, colour)
        legend = _legend(shown, looks, room)
        if len(legend) <= LEGEND_LINES:
            break
    bar, at, done, whole = Text(), 0, 0.0, sum(segments.values()) or 1.0
    for (_, seconds), (mark, style) in zip(shown, looks, strict=True):
        done += seconds
        until = round(room * min(1.0, done / whole))
        bar.append(mark * (until - at), style=style)
        at = until
    return [bar, *legend]


def _legend(shown: Sequence[tuple[str, float]], looks: Sequence[tuple[str, Style]], room: int) -> list[Text]:
    lines = [Text()]
    for (name, seconds), (mark, style) in zip(shown, looks, strict=True):
        entry = Text.assemble((f"{mark} ", style), f"{name} {seconds_words(seconds)}")
        if lines[-1] and lines[-1].cell_len + 2 + entry.cell_len > room:
            lines.append(Text())
        lines[-1].append("  " * bool(lines[-1])).append_text(entry)
    return lines


def _largest(segments: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The largest ones, in the order of the round; the rest as one, at its end."""
    kept = sorted((name for name in segments if segments[name] > 0), key=lambda name: -segments[name])[:most]
    rest = sum(seconds for name, seconds in segments.items() if name not in kept)
    return [(name, segments[name]) for name in segments if name in kept] + ([(_OTHERS, rest)] if rest > 0 else [])


def _looks(shown: Sequence[tuple[str, float]], colour: bool) -> list[tuple[str, Style]]:
    if colour:
        return [("█", _COLOURS.get(name, _OTHERS_STYLE)) for name, _ in shown]
    return [(mark, Style()) for mark in _FILLINGS[: len(shown)]]

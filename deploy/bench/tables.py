"""A measurement, and a comparison of two, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.bench.comparing import Compared, Comparison
from deploy.bench.result import Measurement, Point
from deploy.bench.statistics import ALPHA, FEWEST_BLOCKS

__all__ = ["milliseconds", "render_comparison", "render_measurement"]

COLUMNS = ("p50", "p95", "p99", "max")
SELDOM = 100  # rounds, with fewer of which the 99th percentile is little else than the longest
MEANING = {
    "open": "until clients may answer",
    "first": "until the first momentum is complete",
    "collect": "until all but f have answered",
    "grace": "the wait for the rest",
    "close": "until the round's thread begins",
    "noise": "the wait for the noise",
    "transfer": "host to device",
    "aggregate": "rule, noise, server momentum",
    "step": "the model step",
    "commit": "made durable",
    "hold": "the wait for a public schedule",
    "publish": "until the next model is available",
    "download": "a model, to one client",
    "training": "a client's computing, by its own account",
    "upload": "a momentum, first byte to last",
    "conditioning": "what the server does to a momentum",
}


def milliseconds(seconds: float) -> str:
    """Three digits, or the thousandths of a millisecond."""
    value = 1e3 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def render_measurement(measurement: Measurement) -> RenderableType:
    """Every point, then what all of them depend on."""
    return Group(*(_of_point(point) for point in measurement.points), _facts(measurement))


def _of_point(point: Point) -> RenderableType:
    noise = "no noise" if point.epsilon is None else f"ε = {point.epsilon:g} at δ = {point.delta:g}"
    title = f"{point.name}; {point.rule}, f = {point.byzantine}, {noise}; milliseconds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("", style="dim")
    table.add_row("round", *_row(point.round_s), "from one model available to the next", style="bold")
    for name, values in point.phases_s.items():
        table.add_row(f"  {name}", *_row(values), MEANING.get(name, ""))
    if point.spans_s:
        table.add_row("beside it", *[""] * len(COLUMNS), "these overlap, and do not add up", style="bold")
        for name, values in point.spans_s.items():
            table.add_row(f"  {name}", *_row(values), "being drawn" if name == "noise" else MEANING.get(name, ""))
    said = [
        f"{point.rounds} rounds in {_count(len(point.runs_s), 'run')}, {point.warm_up} of each left out before; "
        f"{point.bytes['down'] / 1e6:,.2f} MB down and {point.bytes['up'] / 1e6:,.2f} MB up a round; " + _who(point)
    ]
    if point.missing:
        said.append(f"{_count(point.missing, 'momentum', 'momenta')} did not count: these are not full rounds")
    if point.rounds < SELDOM:
        said.append(f"of {point.rounds} rounds the p99 is little else than the longest")
    return Group(table, *(Text(line, style="dim") for line in said), Text())


def _who(point: Point) -> str:
    where = (
        "clients elsewhere"
        if point.processes is None
        else _count(point.processes, "client process", "client processes")
    )
    return where + (f", computing for {point.compute_s:g} s" if point.compute_s else ", computing nothing")


def _facts(measurement: Measurement) -> RenderableType:
    before, after = (f"{value:.1f}" for value in measurement.load_average)
    lines = [
        f"network: {measurement.network}; seed {measurement.seed}; load average before and after: {before}, {after}",
        "; ".join(f"{name}: {value}" for name, value in measurement.machine.items()),
    ]
    return Group(*(Text(line, style="dim") for line in lines))


def render_comparison(comparison: Comparison) -> RenderableType:
    """What has changed from A to B, point by point."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("A p50, ms", "right"),
        ("B p50, ms", "right"),
        ("B over A", "right"),
        ("range", "right"),
        ("p", "right"),
        ("blocks", "right"),
        ("verdict", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in comparison.points:
        table.add_row(*_compared(one))
    return Group(table, *(Text(line, style="dim") for line in _remarks(comparison)))


def _compared(one: Compared) -> Sequence[str]:
    found = one.difference
    span = "" if math.isnan(found.low) else f"{found.low:.3f} to {found.high:.3f}"
    return (
        one.name,
        milliseconds(one.before),
        milliseconds(one.after),
        f"{found.ratio:.3f}",
        span,
        f"{one.p:.2g}" if found.enough else "",
        f"{found.blocks[0]}, {found.blocks[1]}",
        one.verdict,
    )


def _remarks(comparison: Comparison) -> Iterable[str]:
    yield (
        f"A difference is claimed where there is none with probability {ALPHA:.0%} at most, for the whole table; p is "
        f"already corrected for its {_count(len(comparison.points), 'line')}."
    )
    few = [one.difference.block_rounds for one in comparison.points if not one.difference.enough]
    if few:
        needed = FEWEST_BLOCKS * max(few)
        yield (
            f"Rounds that follow one another are alike here, in blocks of up to {max(few)}; {FEWEST_BLOCKS} blocks are "
            f"needed on either side: measure with --rounds {needed} at least, or with --runs."
        )
    if any(one.difference.p_runs is None and one.difference.enough for one in comparison.points):
        yield "One run each: what changes from run to run is not known; measure with --runs 5 to have it tested too."
    yield from comparison.remarks


def _row(values: Mapping[str, float]) -> list[str]:
    return [milliseconds(values[name]) for name in COLUMNS]


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"

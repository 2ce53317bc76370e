"""The end of a run as a table: what was reached, what it cost in privacy and time, and where things are."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.plots import bar, plot
from deploy.progress import seconds_words

__all__ = ["render_summary", "save_picture"]

PICTURE_WIDTH = 100

# What a summary calls the parts of a round, in words.
PHASES = {
    "open": "open the round",
    "first": "until the first momentum",
    "collect": "clients compute and send",
    "grace": "wait for the rest",
    "close": "close the round",
    "noise": "wait for the noise",
    "transfer": "to the device",
    "aggregate": "aggregate",
    "step": "model step",
    "commit": "commit to disk",
    "hold": "wait for the schedule",
    "publish": "publish",
}

_LATENCIES = (("median", "p50"), ("95%", "p95"), ("longest", "max"))


def render_summary(summary: Mapping[str, Any]) -> RenderableType:
    """The final table.

    Parameters
    ----------
    summary
        As in ``summary.json``; a key that is missing or null is shown as a dash or left out.
    """
    parts: list[RenderableType] = [_facts(summary)]
    latency = summary.get("round_latency_s") or {}
    if phases := latency.get("phases"):
        parts += [Text("\nwhere a round's time goes (mean)", style="bold"), _phases(phases)]
    if curve := summary.get("accuracy_curve"):
        parts += [Text("\naccuracy on the test set", style="bold"), _curve(curve)]
    done = summary.get("status") == "completed"
    return Panel(
        Group(*parts),
        title=Text(f"{summary.get('status', 'unknown')}: {summary.get('message', '')}", style="bold"),
        title_align="left",
        border_style="green" if done else "yellow",
    )


def save_picture(summary: Mapping[str, Any], path: Path, *, title: str = "byzuldp run") -> None:
    """Write the final table as an SVG that needs nothing from elsewhere."""
    console = Console(
        record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(render_summary(summary))
    drawn = console.export_svg(title=title, unique_id="byzuldp")
    drawn = re.sub(r"@font-face\s*\{.*?\}", "", drawn, flags=re.DOTALL)  # they would be fetched from a web host
    path.write_text(drawn, encoding="utf-8")


def _facts(summary: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    last, latency = summary.get("accuracy_last") or {}, summary.get("round_latency_s") or {}
    accuracy = f"[bold]{_percent(summary.get('final_accuracy'))}[/bold] of the test set, final model"
    if last.get("mean") is not None:
        accuracy += (
            f"; last {last.get('rounds')} rounds {_percent(last['mean'])} ± {_percent(last.get('std'))}"
            f"; best {_percent(summary.get('accuracy_max'))}"
        )
    times = [f"{word} {seconds_words(latency.get(key))}" for word, key in _LATENCIES]
    rows = [
        ("accuracy", accuracy),
        ("privacy", _privacy(summary)),
        ("rounds", f"{summary.get('rounds', '–')}{_who(summary)}"),
        ("round time", ", ".join(times)),
        ("whole run", _duration(summary)),
        ("network", f"{_bytes(summary.get('bytes_down'))} to the clients, {_bytes(summary.get('bytes_up'))} from them"),
        ("refusals", _refusals(summary.get("refusals") or {})),
        ("model", summary.get("model_file")),
        ("run folder", summary.get("run_dir")),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, Text.from_markup(value) if name == "accuracy" else Text(str(value)))
    return table


def _duration(summary: Mapping[str, Any]) -> str | None:
    if summary.get("seconds") is None:
        return None
    startup = summary.get("startup_s")
    return seconds_words(summary["seconds"]) + (f", start-up {seconds_words(startup)}" if startup is not None else "")


def _privacy(summary: Mapping[str, Any]) -> str:
    because = str(summary.get("private_because") or "")
    if not summary.get("private"):
        return "NOT PRIVATE: " + (because.removeprefix("not private: ") or "it was not asked for")
    epsilon, spent, delta = summary.get("epsilon"), summary.get("epsilon_spent"), summary.get("delta")
    words = f"ε = {_number(epsilon)}, δ = {_number(delta)}"
    if spent is not None:
        words += f"; spent so far ε = {_number(spent)}" if summary.get("status") != "completed" else ""
    words += f"; noise multiplier {_number(summary.get('noise_multiplier'))}"
    return f"{words}\n{because}" if because else words


def _who(summary: Mapping[str, Any]) -> str:
    if summary.get("clients") is None:
        return ""
    words = f" with {summary['clients']} clients, {summary.get('adversaries', 0)} of them adversaries"
    words += f" ({summary['attack']})" if summary.get("adversaries") else ""
    return words + f"; rule {summary.get('rule', '–')}, f = {summary.get('byzantine', '–')}"


def _refusals(refusals: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(refusals.items())) or "none"


def _phases(phases: Mapping[str, float]) -> Table:
    whole = sum(phases.values()) or 1.0
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    for name, seconds in phases.items():
        share = seconds / whole
        table.add_row(PHASES.get(name, name), seconds_words(seconds), f"{share:.0%}", bar(share, 28))
    return table


def _curve(curve: Sequence[Sequence[float]]) -> Table:
    points = [(float(round_id), float(accuracy)) for round_id, accuracy in curve]
    rows = plot(points, width=60, height=6)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(style="green", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row("100%" if number == 0 else "0%" if number == len(rows) - 1 else "", f"▕{row}")
    first, last = f"round {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    table.add_row("", Text(f" {first}{last:>{60 - len(first)}}", style="dim"))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _bytes(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"

"""A verdict for people: the checks, both runs beside each other, the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.chaos.backend import Choice
from deploy.chaos.plan import Plan
from deploy.chaos.timeline import Timeline
from deploy.chaos.verdict import Run, Verdict
from deploy.progress import seconds_words

__all__ = ["render_plan", "render_verdict"]


def render_plan(plan: Plan, choice: Choice) -> str:
    """What would be done, as lines of text."""
    lines = [
        f"backend {choice.backend.name}" + "".join(f"; not {name}: {why}" for name, why in choice.passed_over.items()),
        f"processes {', '.join(plan.names)}",
        *([f"left out: {', '.join(plan.left_out)}"] if plan.left_out else []),
    ]
    for item in Timeline(plan.faults).occurrences:
        fault = item.fault
        lasting = "" if fault.momentary else f", for {fault.lasting}" if fault.lasting else ", to the end"
        detail = f" ({fault.detail()})" if fault.detail() else ""
        lines.append(f"{item.at!s:>12}  {fault.do} on {', '.join(fault.on)}{detail}{lasting}")
    return "\n".join(lines) + "\n"


def render_verdict(verdict: Verdict) -> RenderableType:
    """The final panel."""
    parts: list[RenderableType] = [_network(verdict), _checks(verdict), _runs(verdict.undisturbed, verdict.disturbed)]
    if verdict.timeline:
        parts += [Text("\ntimeline", style="bold"), _timeline(verdict)]
    title = f"{verdict.scenario}: {'pass' if verdict.passed else 'fail'}"
    style = "green" if verdict.passed else "red"
    return Panel(Group(*parts), title=Text(title, style=f"bold {style}"), title_align="left", border_style=style)


def _network(verdict: Verdict) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right", no_wrap=True)
    facts.add_column(ratio=1)
    facts.add_row("backend", verdict.backend)
    for name, why in verdict.passed_over.items():
        facts.add_row(f"not {name}", Text(why))
    for name, value in verdict.facts.items():
        facts.add_row(name, Text(value))
    if verdict.left_out:
        facts.add_row("left out", Text(", ".join(verdict.left_out), style="yellow"))
    return facts


def _checks(verdict: Verdict) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("invariant")
    table.add_column("")
    table.add_column("found", ratio=1)
    for check in verdict.checks:
        holds = Text("holds", style="green") if check.holds else Text("broken", style="bold red")
        table.add_row(check.name, holds, Text(check.found))
    return table


def _runs(before: Run, after: Run) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "undisturbed", "disturbed", ""):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, first: str, second: str, note: str = "") -> None:
        table.add_row(name, first, second, note)

    row("rounds", _rounds(before), _rounds(after), f"{after.begun_again} begun again" if after.begun_again else "")
    row("rounds without somebody", _number(before.incomplete), _number(after.incomplete))
    for name, one, two in (
        ("median round", before.latency_p50_s, after.latency_p50_s),
        ("95% of rounds within", before.latency_p95_s, after.latency_p95_s),
        ("longest round", before.latency_max_s, after.latency_max_s),
    ):
        row(name, _seconds(one), _seconds(two), f"{two / one:.1f} times" if one and two else "")
    row("whole run", _seconds(before.seconds), _seconds(after.seconds))
    row("accuracy", _percent(before.accuracy), _percent(after.accuracy))
    return table


def _timeline(verdict: Verdict) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("planned", "began", "over", "what", "notes"):
        table.add_column(name, overflow="fold")
    for item in verdict.timeline:
        what = f"{item['do']} on {', '.join(item['on'])}" + (f" ({item['detail']})" if item["detail"] else "")
        style = "" if item["began_s"] is not None else "yellow"
        began, ended = _moment(item, "began"), _moment(item, "ended")
        table.add_row(item["at"], began, ended, Text(what), Text("; ".join(item["notes"])), style=style)
    return table


def _moment(item: Mapping[str, Any], name: str) -> str:
    seconds = item[f"{name}_s"]
    if seconds is None:
        return "never" if name == "began" else "at the end" if item["began_s"] is not None else ""
    return "start" if seconds < 0 else f"{seconds:.1f} s, round {item[f'{name}_round']}"


def _rounds(run: Run) -> str:
    return f"{_number(run.rounds)} of {run.planned}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_words(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"

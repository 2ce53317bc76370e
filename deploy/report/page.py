"""The page: one HTML file with its style, its script, its figures and its data."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deploy.report.curves import public_figures
from deploy.report.described import differences
from deploy.report.drawing import Drawing
from deploy.report.model import RunData, Waterfall
from deploy.report.palette import segment_colour, variables
from deploy.report.times import comparing_figures, operator_figures
from deploy.report.words import (
    client_rows,
    comparison_rows,
    fact_rows,
    fault_rows,
    percentile_rows,
    tiles,
    value_words,
)

__all__ = ["Figures", "figures_of", "render"]

_TEMPLATES = Path(__file__).parent / "templates"
_LEARNING = ("accuracy", "loss")
_TOGETHER = ("accuracy", "loss", "epsilon")
"""Of several runs drawn over each other, and not once more for each."""
_CLIENTS = ("answers", "arrivals")


@dataclass(frozen=True)
class Figures:
    """All figures of a report: those of several runs over each other, and each run's own."""

    together: Sequence[Drawing]
    each: Sequence[Sequence[Drawing]]

    @property
    def all(self) -> list[Drawing]:
        return [*self.together, *(drawing for drawings in self.each for drawing in drawings)]


def figures_of(runs: Sequence[RunData]) -> Figures:
    """What there is to draw; names are unique."""
    if len(runs) == 1:
        return Figures((), ([*public_figures(runs), *operator_figures(runs[0])],))
    each = [
        [
            replace(drawing, name=f"run{place}-{drawing.name}")
            for drawing in [*public_figures([run]), *operator_figures(run)]
            if drawing.name not in _TOGETHER
        ]
        for place, run in enumerate(runs, 1)
    ]
    return Figures([*public_figures(runs), *comparing_figures(runs)], each)


def render(runs: Sequence[RunData], figures: Figures, *, public: bool) -> str:
    """The whole page.

    Parameters
    ----------
    public
        Say so; the data has to be that of :func:`deploy.report.collect.collect` with ``public`` too.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    style = environment.from_string(style).render(light=variables(dark=False), dark=variables(dark=True))
    drawn = any(run.operations and run.operations.waterfall for run in runs)
    script = (_TEMPLATES / "waterfall.js").read_text(encoding="utf-8") if drawn else ""
    title = runs[0].label if len(runs) == 1 else " · ".join(run.label for run in runs)
    return environment.get_template("report.html").render(
        title=title if len(title) <= 120 else f"{len(runs)} runs",
        public=public,
        version=version("byzuldp"),
        style=style,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        run_ids=[run.run_id for run in runs],
        views=[
            _view(run, drawings, place, len(runs))
            for place, (run, drawings) in enumerate(zip(runs, figures.each, strict=True), 1)
        ],
        comparison=_comparison(runs, figures) if len(runs) > 1 else None,
    )


def _view(run: RunData, drawings: Sequence[Drawing], place: int, of: int) -> Mapping[str, Any]:
    prefix = f"run{place}-" if of > 1 else ""
    named = {drawing.name.removeprefix(prefix): drawing for drawing in drawings}
    facts = run.operations
    operator = {name: drawing for name, drawing in named.items() if drawing.operator}
    return {
        "run": run,
        "alone": of == 1,
        "prefix": prefix,
        "tiles": tiles(run),
        "facts": fact_rows(run),
        "configuration": [(key, value_words(value)) for key, value in run.configuration.items()],
        "because": run.privacy.because.removeprefix("not private: "),
        "learning": [drawing for name, drawing in named.items() if name in _LEARNING],
        "privacy": [drawing for name, drawing in named.items() if name not in _LEARNING and name not in operator],
        "time": [drawing for name, drawing in operator.items() if name not in _CLIENTS],
        "clients": [drawing for name, drawing in operator.items() if name in _CLIENTS],
        "percentiles": percentile_rows(facts) if facts else [],
        "faults": fault_rows(facts) if facts else [],
        "refusals": _refusals(run),
        "client_rows": client_rows(facts) if facts else [],
        "waterfall": _waterfall(facts.waterfall) if facts and facts.waterfall else None,
    }


def _refusals(run: RunData) -> list[tuple[str, int, int]]:
    facts = run.operations
    if facts is None:
        return []
    return [(kind, count, facts.strangers.get(kind, 0)) for kind, count in sorted(facts.refusals.items())]


def _waterfall(waterfall: Waterfall) -> Mapping[str, Any]:
    """What the page's script reads."""
    longest = max(range(len(waterfall.rounds)), key=lambda place: (bool(waterfall.rounds[place]["p"]), place))
    return {
        "segments": waterfall.segments,
        "spans": waterfall.spans,
        "colours": {name: segment_colour(name, place)[1] for place, name in enumerate(waterfall.segments)},
        "adversaries": waterfall.adversaries,
        "first": longest,
        "rounds": waterfall.rounds,
    }


def _comparison(runs: Sequence[RunData], figures: Figures) -> Mapping[str, Any]:
    rows = differences([run.configuration for run in runs])
    return {
        "head": ["", *(run.label for run in runs)],
        "rows": comparison_rows(runs),
        "differences": [[key, *map(value_words, values)] for key, values in rows.items()],
        "figures": figures.together,
    }

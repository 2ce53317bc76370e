"""Colours, told apart by everybody; and the style sheet's variables for them, light and dark.

Figures are drawn in the light colours; in the page each of them becomes its variable, so that one drawing serves both.
No two meanings share a colour, hence none of these may occur twice.
"""

from __future__ import annotations

import re

__all__ = [
    "DASHES",
    "GRID",
    "INK",
    "PAPER",
    "SEGMENTS",
    "SERIES",
    "SOFT",
    "as_variables",
    "segment_colour",
    "variables",
]

INK, SOFT, GRID, PAPER = "#1b2026", "#59626d", "#dfe3e8", "#fefefe"
SERIES = ("#0b62a4", "#c8500a", "#0a7d58", "#a8418a", "#8a6400", "#2f93d1", "#7a4a2b", "#5f6770")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "solid",
    (0, (5, 1.6)),
    (0, (1.2, 1.4)),
    (0, (7, 1.6, 1.2, 1.6)),
    (0, (3, 1.2, 1, 1.2, 1, 1.2)),
)
_DARK_SERIES = ("#5fb0f2", "#ff9c5c", "#41cfa0", "#e48bc6", "#dfbf4a", "#9ad6ff", "#cf9a76", "#aab2bb")

SEGMENTS = (
    ("open", "#9db4c6", "#526678"),
    ("first", "#5b8db8", "#3d6f9c"),
    ("collect", "#1f5f99", "#5fa5e3"),
    ("grace", "#e9b872", "#8f6420"),
    ("close", "#c08a3e", "#d9a657"),
    ("noise", "#d1603d", "#e98a6b"),
    ("transfer", "#8e4a80", "#b06aa0"),
    ("aggregate", "#2e8b6f", "#4bbf9a"),
    ("step", "#7fc4a6", "#2f6e57"),
    ("commit", "#6b5b95", "#a797d6"),
    ("hold", "#c9c2dd", "#5b5473"),
    ("publish", "#a3a832", "#ccd164"),
)
_OTHERS = (("#8b8f94", "#93989e"), ("#b5a29a", "#7b6a63"), ("#70858a", "#9fb4b9"))

_BASE = (
    ("ink", INK, "#e7eaee"),
    ("soft", SOFT, "#a7b0bb"),
    ("grid", GRID, "#343b44"),
    ("paper", PAPER, "#171b20"),
)


def _all() -> list[tuple[str, str, str]]:
    series = [(f"s{k}", light, dark) for k, (light, dark) in enumerate(zip(SERIES, _DARK_SERIES, strict=True))]
    segments = [(f"g-{name}", light, dark) for name, light, dark in SEGMENTS]
    others = [(f"g{k}", light, dark) for k, (light, dark) in enumerate(_OTHERS)]
    return [*_BASE, *series, *segments, *others]


def segment_colour(name: str, place: int = 0) -> tuple[str, str]:
    """(colour, variable) of a segment; one we do not know gets a colour by its place."""
    for known, light, _ in SEGMENTS:
        if known == name:
            return light, f"--g-{name}"
    return _OTHERS[place % len(_OTHERS)][0], f"--g{place % len(_OTHERS)}"


def variables(*, dark: bool) -> str:
    """Declarations of a style sheet."""
    return " ".join(f"--{name}: {second if dark else first};" for name, first, second in _all())


def as_variables(svg: str) -> str:
    """The colours of a drawing as variables of the page's style sheet."""
    names = {light: f"var(--{name})" for name, light, _ in _all()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: names.get(found[0], found[0]), svg)

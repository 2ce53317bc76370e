"""Writing reports: the one place that touches files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import StoreUnwritable
from deploy.report.collect import collect, labels_of
from deploy.report.page import Figures, figures_of, render

__all__ = ["FILE", "MOST_RUNS", "write_report", "write_reports"]

FILE = "report.html"

MOST_RUNS = 20
"""In one report: beyond, curves cannot be told apart."""


def write_report(run_dir: Path, out: Path | None = None, *, public: bool = False) -> Path:
    """The report of one run; returns its path.

    Parameters
    ----------
    out
        Default ``RUN/report.html``, or ``RUN/public/report.html`` in public.
    public
        Leave out what only the operator may see.

    Raises
    ------
    StoreProblem
        The folder holds no run, it is damaged, or the report cannot be written.
    """
    path = out if out is not None else run_dir / ("public" if public else "") / FILE
    return write_reports([run_dir], path, public=public)


def write_reports(
    run_dirs: Sequence[Path], out: Path, *, public: bool = False, figures_dir: Path | None = None
) -> Path:
    """One report of several runs beside each other.

    Parameters
    ----------
    figures_dir
        Where every figure is put as PNG and CSV too; made if it is missing.

    Raises
    ------
    StoreProblem
        As :func:`write_report`.
    """
    runs = [
        collect(folder, label=label, public=public) for folder, label in zip(run_dirs, labels_of(run_dirs), strict=True)
    ]
    if not out.parent.is_dir():  # before the drawing
        raise StoreUnwritable(f"{out}: cannot be written: there is no folder {out.parent}; make it, or choose another")
    figures = figures_of(runs)
    mode = 0o644 if public else 0o600
    _write(out, render(runs, figures, public=public).encode(), mode)
    if figures_dir is not None:
        _write_figures(figures, figures_dir, mode)
    return out


def _write_figures(figures: Figures, folder: Path, mode: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise StoreUnwritable(f"{folder}: cannot be made ({problem.strerror}); choose another --figures") from None
    for drawing in figures.all:
        _write(folder / f"{drawing.name}.png", drawing.png(), mode)
        _write(folder / f"{drawing.name}.csv", drawing.csv().encode(), mode)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        new.replace(path)
    except OSError as problem:
        raise StoreUnwritable(
            f"{path}: cannot be written ({problem.strerror}); choose another place with --out"
        ) from None

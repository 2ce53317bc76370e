"""``byzuldp report``: what one or several runs did, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are shown beside each other.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write; default RUN/report.html, with --public RUN/public/report.html.",
            show_default=False,
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Leave out everything that tells about single clients, and all times.")
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", metavar="DIR", help="Put every figure there too, as PNG and CSV.", show_default=False
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML file about one or several runs: results, privacy, time, clients."""
    from deploy.report.writing import FILE, MOST_RUNS, write_reports

    if out is None and len(runs) > 1:
        raise typer.BadParameter("several runs need a file to be written to", param_hint="--out")
    if len(runs) > MOST_RUNS:
        raise typer.BadParameter(f"{len(runs)} runs: at most {MOST_RUNS} can be told apart", param_hint="RUN")
    path = out if out is not None else runs[0] / ("public" if public else "") / FILE
    write_reports(runs, path, public=public, figures_dir=figures)
    typer.echo(path)

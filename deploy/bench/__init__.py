"""``byzuldp bench``: how long a round takes, and whether that has changed."""

from __future__ import annotations

import typer

from deploy.bench.client import client
from deploy.bench.compare import compare
from deploy.bench.latency import latency

__all__ = ["app"]

app = typer.Typer(
    name="bench",
    help="Measure how long a round takes, and compare two measurements.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (latency, compare, client):
    app.command()(command)

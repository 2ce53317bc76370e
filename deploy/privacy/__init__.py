"""``byzuldp privacy``: plan a budget, verify what a run spent, audit the mechanism."""

from __future__ import annotations

import typer

from deploy.privacy.audit import audit
from deploy.privacy.plan import plan
from deploy.privacy.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="privacy",
    help="Plan a privacy budget, verify what a run has spent, audit the mechanism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (plan, verify, audit):
    app.command()(command)

"""``byzuldp privacy verify``: does a run's ledger hold?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ps.verification import Verification

__all__ = ["verify"]


def verify(
    run: Annotated[Path, typer.Argument(help="The run folder.", show_default=False)],
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="HASH", help="Head of the ledger that a client has seen.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was recomputed as JSON.")] = False,
) -> None:
    """Recompute everything a run's ledger claims: the chain, the noise, the sensitivities, ε by two accountants."""
    import json

    from common.errors import PrivacyError
    from ps.verification import verify_run

    verification = verify_run(run, remembered=head)
    if as_json:
        typer.echo(json.dumps(verification.as_json(), indent=2))
    else:
        _print(verification)
    if not verification.holds:
        wrong = "; ".join(check.found for check in verification.checks if not check.holds)
        raise PrivacyError(f"{run}: the ledger does not hold: {wrong}")


def _print(found: Verification) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"run {found.run_id}: {found.status}, {found.rounds} of {found.planned} rounds", box=None)
    table.add_column("")
    table.add_column("recomputed")
    table.add_column("")
    for check in found.checks:
        table.add_row(check.name, check.found, "[green]holds[/]" if check.holds else "[red]does not hold[/]")
    if found.epsilon is not None and found.delta is not None:
        name = "guaranteed" if found.private else "asked for, not guaranteed"
        table.add_row(name, f"ε = {found.epsilon:g} at δ = {found.delta:g} ({found.calibration})", "")
        spent = {"exact": found.epsilon_exact, "renyi": found.epsilon_renyi}
        words = ", ".join(f"{value:.6g} {kind}" for kind, value in spent.items() if value is not None)
        table.add_row("spent so far", f"ε = {words}" if words else "-", "")
        if found.previous:
            runs = ", ".join(found.previous)
            table.add_row("of which earlier runs", f"ε = {found.epsilon_previous:.6g}: {runs}", "")
    table.add_row("head", f"{found.head[:32]}\n{found.head[32:]}", "")
    if found.remembered_round is not None:
        table.add_row("--head", f"is the head of round {found.remembered_round}", "[green]holds[/]")
    console = Console()
    console.print(table)
    console.print(found.private_because, highlight=False)
    for premise in found.premises if found.private else ():
        console.print(f"  {premise}", highlight=False)

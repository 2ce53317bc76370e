"""``byzuldp privacy audit``: attack the real mechanism, and say what ε is at least."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["audit"]


def audit(
    epsilon: Annotated[float, typer.Option("--epsilon", help="The ε that every trial claims.")] = 4.0,
    delta: Annotated[float, typer.Option("--delta", help="The δ that every trial claims.")] = 1e-5,
    clients: Annotated[int, typer.Option("--clients", help="n: identities on the roster.")] = 20,
    byzantine: Annotated[int, typer.Option("--byzantine", help="f: how many of them the rule tolerates.")] = 4,
    server_momentum: Annotated[float, typer.Option("--server-momentum", help="β, in [0, 1).")] = 0.9,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Probability that the verdict is fail though the claim holds.")
    ] = 0.01,
    full: Annotated[
        bool, typer.Option("--full", help="Five million trials for the direct bound, and 300 clients besides.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Measure the mechanism: a lower bound on ε from what real parameter servers publish.

    Real servers on this machine are sent canaries, in two worlds that differ in one client's momentum; how well the
    worlds can be told apart bounds ε from below. A bound above the claim refutes it (exit code 15). So does noise that
    is not independent N(0, σ²), as far as all releases of the audit show it.
    """
    import json

    from common.errors import ConfigError, Interrupted, PrivacyError
    from deploy.audit import report, suite
    from deploy.audit.setting import Claim, Setting

    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha!r}: expected a number inside (0, 1), such as 0.01")
    if not (byzantine >= 0 and 2 * byzantine < clients):
        raise ConfigError(f"--clients {clients} --byzantine {byzantine}: expected 0 or more Byzantine, fewer than half")
    claim = Claim(epsilon, delta)
    settings = suite.settings_for(clients, byzantine, server_momentum, full=full)
    for setting in settings:
        setting.experiment(claim)  # refuses what cannot be run, before anything is

    def told(setting: Setting) -> None:
        typer.echo(f"{setting.name}: would show {setting.reveals}", err=True)

    try:
        audited = suite.audit(settings, claim, alpha, told=told)
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C: no verdict, for the number of trials is part of one") from None
    found = report.as_json(audited, claim, alpha)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(report.as_table(audited.findings, claim))
        console.print(report.checks_table(audited.checks))
        typer.echo(f"{found['verdict']}: {found['message']}")
        typer.echo(f"covers {report.COVERS}")
        typer.echo(f"does not cover {report.DOES_NOT_COVER}")
    if found["verdict"] == "fail":
        raise PrivacyError(found["message"])

"""``byzuldp bench client``: clients that compute nothing, for a measurement that waits for them (``--listen``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["client"]


def client(
    experiment: Annotated[str, typer.Argument(help="The bench.toml of the measurement.", show_default=False)],
    address: Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Where the parameter server is.")],
    ids: Annotated[str, typer.Option("--ids", help="Identities this process holds, for instance 0-9.")],
    tokens: Annotated[
        Path, typer.Option("--tokens", metavar="FILE", help="JSON file with the join token of each id.")
    ] = Path("join_tokens.json"),
    compute_s: Annotated[float, typer.Option("--compute-s", min=0.0, help="Wait for so long before answering.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is sent.")] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of the experiment; may be repeated."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address beyond this machine without encryption.")
    ] = False,
) -> None:
    """Take part in a measurement as clients that compute nothing."""
    from common.config import load_experiment
    from common.errors import exit_code_of
    from common.rpc.addresses import parse_address, refuse_insecure
    from deploy.bench.asked import Load
    from deploy.bench.load import host
    from deploy.ids import parse_ids
    from deploy.logs import log_to_stderr
    from deploy.tokens import tokens_of

    log_to_stderr()
    configuration = load_experiment(experiment, [*(set_ or ()), *(["network.insecure=true"] if insecure else ())])
    network = configuration.network
    refuse_insecure(
        parse_address(address, setting="the PS's address"), insecure=network.insecure, tls=network.tls.enabled
    )
    held = tokens_of(tokens, parse_ids(ids, configuration.federation.clients))
    outcome = host(configuration, address=address, tokens=held, load=Load(compute_s, seed))
    typer.echo(f"the run has ended: {outcome.status}: {outcome.message}", err=True)
    raise typer.Exit(exit_code_of(outcome.status))

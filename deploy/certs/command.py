"""The command ``byzuldp certs``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.certs.folder import CertificateFolder

__all__ = ["certs"]


def certs(
    folder: Annotated[Path, typer.Argument(help="Where they are, or are to be.")] = Path("certs"),
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="NAME",
            help="A host name or address of the parameter server; may be repeated. Default: this machine only.",
            show_default=False,
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", help="Identities that get a certificate each, for instance 0-29.", show_default=False),
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.01, help="How long a certificate is valid.")] = 365.0,
    ca_days: Annotated[float, typer.Option("--ca-days", min=0.01, help="How long a new authority is.")] = 3650.0,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Replace certificates that are there: those named, or all when none is named."),
    ] = False,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="Sign with a new authority from now on; older ones are still accepted.")
    ] = False,
    forget_old_cas: Annotated[
        bool, typer.Option("--forget-old-cas", help="Accept certificates of the newest authority only.")
    ] = False,
    revoke: Annotated[
        str | None,
        typer.Option("--revoke", metavar="IDS", help="Revoke all certificates of these identities."),
    ] = None,
) -> None:
    """Make certificates for a parameter server and its clients, renew them, revoke them.

    What is there already stays, unless it is to be renewed. A parameter server at work sees every change by itself.
    """
    from common.errors import ConfigError
    from deploy.certs.folder import MOST_IDENTITIES, CertificateFolder
    from deploy.ids import parse_ids

    holds = CertificateFolder(folder)
    named = [] if ids is None else parse_ids(ids, MOST_IDENTITIES)
    going = [] if revoke is None else parse_ids(revoke, MOST_IDENTITIES, option="--revoke")
    if new_ca and forget_old_cas:
        raise ConfigError(
            "--new-ca and --forget-old-cas together would shut out every certificate in use: renew them all with the "
            "new authority first"
        )
    if going:
        serials = holds.revoke(going)
        typer.echo(f"revoked {_many(len(serials), 'certificate')} of {_many(len(going), 'client')} in {holds.revoked}")
        if ids is None and server is None and not renew:
            return
    if holds.begin(ca_days):
        typer.echo(f"made an authority: {holds.authorities}; keep its key, {folder / 'ca.key'}, to yourself")
    elif new_ca:
        holds.add_authority(ca_days)
        typer.echo(f"made a new authority; {holds.authorities} goes to everybody before anything is renewed with it")
        if ids is None and server is None and not renew:
            return
    if forget_old_cas:
        typer.echo(f"{_many(holds.forget_old_authorities(), 'old authority', 'old authorities')} left out")
    everything = renew and ids is None and server is None
    of_server, _ = holds.server
    if server is not None or everything or not of_server.exists():
        made = holds.make_server(server or (), days, renew=renew)
        if made is not None:
            typer.echo(f"made the server's, for {', '.join(made.names)}, valid until {made.ends:%Y-%m-%d}")
    wanted = holds.client_ids if everything else named
    got = holds.make_clients(wanted, days, renew=renew)
    kept = len(wanted) - len(got)
    if wanted:
        typer.echo(f"made {_many(len(got), 'client certificate')}" + (f"; {kept} were there already" if kept else ""))
    typer.echo("\n".join(_commands(holds)))


def _commands(holds: CertificateFolder) -> Iterable[str]:
    """How the two sides are started with what is here."""
    certificate, key = holds.server
    lists = ["--tls-roster", str(holds.roster)] if holds.roster.exists() else []
    server = ["--tls-cert", str(certificate), "--tls-key", str(key), *lists, "--tls-revoked", str(holds.revoked)]
    authorities = ["--tls-ca", str(holds.authorities)]
    yield f"parameter server: byzuldp ps EXPERIMENT {shlex.join([*authorities, *server])}"
    if holds.client_ids:
        certificate, key = holds.client("{id}")
        client = [*authorities, "--tls-cert", str(certificate), "--tls-key", str(key)]
        yield f"clients:          byzuldp client EXPERIMENT --address HOST:PORT --ids IDS {shlex.join(client)}"


def _many(count: int, one: str, several: str | None = None) -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"

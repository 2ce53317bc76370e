"""The command ``byzuldp doctor``: what keeps things from working, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    tls: Annotated[
        str, typer.Option("--tls", metavar="HOST:PORT", help="Shake hands with the parameter server there.")
    ],
    tls_ca: Annotated[Path, typer.Option("--tls-ca", metavar="FILE", help="The authorities that are trusted.")],
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="The certificate to show.", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key.", show_default=False)
    ] = None,
    tls_name: Annotated[
        str | None,
        typer.Option("--tls-name", help="The name expected of the server; default the address's.", show_default=False),
    ] = None,
    client_id: Annotated[
        int | None,
        typer.Option("--id", min=0, help="Who is to join; default whom the certificate names.", show_default=False),
    ] = None,
) -> None:
    """Find out why a TLS connection fails: a certificate that is missing, foreign, expired, revoked, or for another
    use, name or identity."""
    from common.errors import TlsRefused
    from common.rpc.addresses import parse_address
    from deploy.tls import Shown, examine

    problem = ""
    for finding in examine(parse_address(tls, setting="--tls"), Shown(tls_ca, tls_cert, tls_key, tls_name, client_id)):
        typer.echo(f"{finding.cause.upper() or 'ok':<16} {finding.text}")
        problem = problem or (f"{finding.cause}: {finding.text}" if finding.cause else "")
    if problem:
        raise TlsRefused(problem)

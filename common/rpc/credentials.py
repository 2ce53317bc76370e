"""TLS for both ends of the wire: from files to gRPC's credentials.

It is mutual: neither side takes part without a certificate of an authority that the other trusts.

The server's files are looked at again in every handshake, so a renewed certificate or another bundle of authorities
serves the next connection, and those that are open stay. A client's are looked at whenever it connects anew.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.certificates import Certificate, read_authorities, read_pair
from common.config import Network, Tls
from common.errors import ConfigError
from common.rereading import Reread
from common.rpc.options import channel_options

__all__ = [
    "ClientCredentials",
    "channel_as",
    "client_credentials",
    "client_files",
    "open_channel",
    "refuse_unusable",
    "refuse_unusable_server",
    "server_credentials",
]

log = logging.getLogger("byzuldp.tls")

SETTING = "network.tls"
SOON_DAYS = 14.0


@dataclass(frozen=True)
class ClientCredentials:
    """What one identity shows, and whom it trusts. PEM texts; the key is a secret."""

    authorities: bytes
    chain: bytes
    key: bytes
    certificate: Certificate

    def __repr__(self) -> str:
        return f"ClientCredentials({self.certificate})"


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of one port of the PS, which follow its files.

    A second port needs its own: gRPC asks for the first configuration once for each of these objects.

    Raises
    ------
    ConfigError
        A file cannot be read, or does not do what it is named for.
    """
    files = Reread(_files(tls), lambda: _offered(*_server_files(tls)))
    given = files.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, from its own threads, in every handshake; None keeps what it has."""
        nonlocal given
        try:
            present = files.current()
        except Exception:  # the handshake goes on with what there was
            log.exception("the TLS files could not be looked at")
            return None
        if present is given:
            return None
        given = present
        return present

    # Typed as if it had to return a configuration; documented, and needed, to return None for "as before".
    return grpc.dynamic_ssl_server_credentials(given, newer, require_client_authentication=True)  # type: ignore[arg-type]


def refuse_unusable_server(tls: Tls) -> None:
    """Before anything is begun: can the PS serve with these files? Without TLS, it can.

    Raises
    ------
    ConfigError
        It cannot.
    """
    if tls.enabled:
        _server_files(tls)


def _server_files(tls: Tls) -> tuple[bytes, list[Certificate], bytes, bytes, Certificate]:
    authorities, certificate, key = _files(tls)
    return *read_authorities(authorities, f"{SETTING}.ca"), *read_pair(certificate, key, "server", SETTING)


def _offered(
    bundle: bytes, issuers: list[Certificate], chain: bytes, secret: bytes, facts: Certificate
) -> grpc.ServerCertificateConfiguration:
    _warn_if_soon_over(facts)
    log.info(
        "TLS: %s, valid until %s; accepting certificates of %s",
        facts,
        f"{facts.ends:%Y-%m-%d}",
        ", ".join(issuer.subject for issuer in issuers),
    )
    return grpc.ssl_server_certificate_configuration([(secret, chain)], root_certificates=bundle)


def client_credentials(tls: Tls, client_id: int) -> ClientCredentials:
    """What the identity shows.

    Raises
    ------
    ConfigError
        A file cannot be read, the certificate is not this identity's, or cannot be used as a client's.
    """
    authorities, certificate, key = _files(tls, client_id)
    bundle, _ = read_authorities(authorities, f"{SETTING}.ca")
    chain, secret, facts = read_pair(certificate, key, "client", SETTING)
    if facts.client_id != client_id:
        found = "names no client" if facts.client_id is None else f"is that of client {facts.client_id}"
        raise ConfigError(f"{SETTING}.certificate = {str(certificate)!r} {found}; expected client {client_id}'s")
    _warn_if_soon_over(facts)
    return ClientCredentials(bundle, chain, secret, facts)


def open_channel(address: str, network: Network, credentials: ClientCredentials | None) -> grpc.aio.Channel:
    """A channel to the PS; it connects when it is first used. Without credentials nothing is protected."""
    options: list[tuple[str, int | str]] = [
        *channel_options(
            network.chunk_bytes,
            keepalive_s=network.keepalive_s,
            keepalive_timeout_s=network.keepalive_timeout_s,
        )
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if network.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", network.tls.server_name))
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(credentials.authorities, credentials.key, credentials.chain),
        options=options,
    )


def channel_as(address: str, client_id: int, *, network: Network) -> grpc.aio.Channel:
    """A channel over which one identity speaks: with its certificate, or unprotected where there is no TLS.

    Raises
    ------
    ConfigError
        See :func:`client_credentials`.
    """
    return open_channel(address, network, client_credentials(network.tls, client_id) if network.tls.enabled else None)


def refuse_unusable(tls: Tls, ids: Collection[int]) -> None:
    """Before anything is begun: has every identity a certificate of its own, that can be used?

    Raises
    ------
    ConfigError
        One has not, or there is one file for several of them.
    """
    if not tls.enabled:
        return
    for name in ("certificate", "key"):
        if len(ids) > 1 and "{id}" not in (getattr(tls, name) or ""):
            raise ConfigError(
                f"{SETTING}.{name} = {getattr(tls, name)!r} is one file for several identities, and each has its own: "
                "write {id} for the client's number, for instance certs/clients/{id}.pem"
            )
    for client_id in ids:
        client_credentials(tls, client_id)


def client_files(tls: Tls, client_id: int) -> tuple[Path, Path, Path]:
    """The files an identity's credentials are in: authorities, certificate, key.

    Raises
    ------
    ConfigError
        TLS is not set up.
    """
    return _files(tls, client_id)


def _files(tls: Tls, client_id: int | None = None) -> tuple[Path, Path, Path]:
    if tls.ca is None or tls.certificate is None or tls.key is None:
        raise ConfigError(f"{SETTING} is not set: expected ca, certificate and key")
    if client_id is None:
        return tls.ca, Path(tls.certificate), Path(tls.key)
    certificate, key = (name.replace("{id}", str(client_id)) for name in (tls.certificate, tls.key))
    return tls.ca, Path(certificate), Path(key)


def _warn_if_soon_over(facts: Certificate) -> None:
    if (days := facts.days_left()) < SOON_DAYS:
        log.warning("%s is valid for %.1f days more; make the next one with `byzuldp certs --renew`", facts, days)

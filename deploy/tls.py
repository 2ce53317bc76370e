"""What is wrong with a TLS connection: a handshake step by step, with the standard library, naming the cause.

gRPC says little about a failed handshake: its client names a fault of the server's certificate in its own words, and
its server drops a client that it does not accept without a word, to the client or to our code. So the client's own
certificate is examined here as the server would, and what cannot be seen from here is said to be so. At last the
parameter server itself is asked whether it would let the identity in, by a Join that cannot succeed (and is counted
there as a refusal, ``configuration``).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.certificates import Certificate, client_uri, parse_certificates, read_authorities, read_file
from common.errors import ConfigError
from common.rpc.addresses import Address

__all__ = ["Finding", "Shown", "examine"]

TIMEOUT_S = 5.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""HTTP/2's opening and empty settings: a server that has accepted us answers with its own."""

_CAUSES = {9: "not yet valid", 10: "expired", 26: "wrong use", 62: "wrong name", 64: "wrong name"}
_CAUSES |= dict.fromkeys((2, 18, 19, 20, 21), "foreign")
"""OpenSSL's verification results, in our words."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``cause`` is empty when it is as it should be."""

    cause: str
    text: str


@dataclass(frozen=True)
class Shown:
    """What is shown to the parameter server, and what is expected of it."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    client_id: int | None = None
    """Who is to join; default whom the certificate names."""


def examine(address: Address, shown: Shown) -> Iterator[Finding]:
    """Look at the files, connect, shake hands, ask to join; ends at the first thing that keeps it from going on.

    Raises
    ------
    ConfigError
        A file cannot be read.
    """
    _, authorities = read_authorities(shown.ca, "--tls-ca")
    for authority in authorities:
        cause = "expired" if authority.days_left() < 0 else ""
        yield Finding(cause, f"authority {authority.subject}, valid until {authority.ends:%Y-%m-%d}")
    own = _own_certificate(shown)
    mine = _of_own(own, shown)
    yield mine
    try:
        server, accepted = _handshake(address, shown)
    except _Failed as failed:
        yield failed.finding
        return
    yield Finding("", f"{address} shows {server}, valid until {server.ends:%Y-%m-%d}, for {', '.join(server.names)}")
    if not accepted:
        yield _dropped(address, own, mine.cause, authorities)
        return
    yield Finding("", f"{address} accepts the connection")
    if own is not None and not mine.cause:
        yield _ask(address, own, shown)


class _Failed(Exception):
    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.finding = Finding(cause, text)


# ---------------------------------------------------------------- our own certificate


def _own_certificate(shown: Shown) -> Certificate | None:
    if shown.certificate is None or shown.key is None:
        return None
    try:
        return parse_certificates(read_file(shown.certificate, "--tls-cert"))[0]
    except ValueError:
        raise ConfigError(f"--tls-cert {shown.certificate}: holds no certificate in PEM form") from None


def _of_own(own: Certificate | None, shown: Shown) -> Finding:
    """What a parameter server would hold against it, as far as one can tell without asking."""
    if own is None or shown.key is None:
        return Finding("missing", "no certificate to show: --tls-cert and --tls-key name it and its key")
    if not own.has_key(read_file(shown.key, "--tls-key")):
        return Finding("wrong key", f"{shown.key} is not the private key of {own} in {shown.certificate}")
    if fault := own.fault("client"):
        return Finding(fault.cause, f"{own}: {fault.text}")
    if own.client_id is None:
        return Finding("wrong identity", f"{own} names no client: expected one URI, such as {client_uri(17)}")
    return Finding("", f"{own}, valid until {own.ends:%Y-%m-%d}")


def _dropped(address: Address, own: Certificate | None, cause: str, authorities: list[Certificate]) -> Finding:
    """The server hung up after it saw our certificate; it never says why."""
    said = f"{address} hung up when it saw "
    if own is None:
        return Finding("missing", said + "that there is no certificate")
    if cause:
        return Finding(cause, said + f"{own}, for the reason above")
    if not own.issued_by(authorities):
        return Finding("foreign", said + f"{own}: none of the authorities in --tls-ca has made it")
    return Finding(
        "not accepted",
        said + f"{own}, which looks good from here: perhaps its own file of authorities (network.tls.ca) lacks "
        f"{own.issuer}, or its clock is wrong",
    )


# ---------------------------------------------------------------- the handshake


def _handshake(address: Address, shown: Shown) -> tuple[Certificate, bool]:
    """The server's certificate, and whether it talks to us after seeing ours.

    Raises
    ------
    _Failed
        Its certificate is not what was expected, or there is no TLS.
    """
    expected = shown.server_name or address.host
    context = ssl.create_default_context(cafile=str(shown.ca))
    try:
        with _connected(address, context, shown, expected) as connection:
            certificate = _peer_of(connection)
            try:
                connection.sendall(HELLO)
                accepted = bool(connection.recv(9))
            except OSError:  # some servers give a reason, as an alert; ours does not
                accepted = False
            return certificate, accepted
    except ssl.SSLCertVerificationError as problem:
        cause = _CAUSES.get(problem.verify_code, "not accepted")
        found = _shown_by(address, shown)
        names = f"; expected {expected}, found {', '.join(found.names) or 'no names'}" if cause == "wrong name" else ""
        fault = found.fault("server")
        why = f"; {fault.text}" if fault is not None and fault.cause == cause else ""
        raise _Failed(cause, f"{address} shows {found}: {problem.verify_message.rstrip('.')}{names}{why}") from None


def _shown_by(address: Address, shown: Shown) -> Certificate:
    """The server's certificate, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # to name what was not accepted
    with _connected(address, context, shown, shown.server_name or address.host) as connection:
        return _peer_of(connection)


def _connected(address: Address, context: ssl.SSLContext, shown: Shown, name: str) -> ssl.SSLSocket:
    """Connect and shake hands.

    TLS 1.3 only, as gRPC does it: there the client's handshake ends before the server has looked at its certificate,
    so that the two sides' verdicts come one after the other.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: whatever is in the file is trusted
    context.set_alpn_protocols(["h2"])
    if shown.certificate is not None and shown.key is not None:
        with suppress(ssl.SSLError):  # not its key, which has been said
            context.load_cert_chain(shown.certificate, shown.key)
    try:
        plain = socket.create_connection((address.host, address.port), TIMEOUT_S)
    except OSError as problem:
        raise _Failed("unreachable", f"{address}: {problem.strerror or problem}") from None
    try:
        return context.wrap_socket(plain, server_hostname=name)
    except ssl.SSLCertVerificationError:
        plain.close()
        raise
    except OSError as problem:
        plain.close()
        reason = getattr(problem, "reason", None) or str(problem) or type(problem).__name__
        raise _Failed("no TLS", f"{address} does not shake hands: {reason}; does it serve with network.tls?") from None


def _peer_of(connection: ssl.SSLSocket) -> Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise _Failed("no TLS", "the server shows no certificate")
    return parse_certificates(ssl.DER_cert_to_PEM_cert(der).encode())[0]


# ---------------------------------------------------------------- the parameter server's own checks


def _ask(address: Address, own: Certificate, shown: Shown) -> Finding:
    """Would it let this identity join? Asked without a configuration, so it never does."""
    import grpc

    from common.rpc import PROTOCOL_VERSION
    from common.rpc.refusals import kind_name
    from common.rpc.v1 import parameter_server_pb2 as pb
    from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub

    causes = {
        pb.RefusalKind.WRONG_CERTIFICATE: "wrong identity",
        pb.RefusalKind.REVOKED: "revoked",
        pb.RefusalKind.UNKNOWN_CLIENT: "not on the roster",
    }
    accepted = {pb.RefusalKind.CONFIGURATION, pb.RefusalKind.RUN_IS_OVER}
    client_id = own.client_id if shown.client_id is None else shown.client_id
    assert shown.certificate is not None and shown.key is not None and client_id is not None  # noqa: S101, PT018
    credentials = grpc.ssl_channel_credentials(
        shown.ca.read_bytes(), shown.key.read_bytes(), shown.certificate.read_bytes()
    )
    options = [] if shown.server_name is None else [("grpc.ssl_target_name_override", shown.server_name)]
    request = pb.JoinRequest(protocol_version=PROTOCOL_VERSION, client_id=client_id)
    with grpc.secure_channel(str(address), credentials, options=options) as channel:
        try:
            refusal = ParameterServerStub(channel).Join(request, timeout=TIMEOUT_S).refusal
        except grpc.RpcError as problem:
            details = problem.details() if isinstance(problem, grpc.Call) else problem
            return Finding("unreachable", f"{address} does not answer a Join: {details}")
    if refusal.kind in accepted:
        return Finding("", f"the parameter server lets client {client_id} in")
    cause = causes.get(refusal.kind, kind_name(refusal.kind))
    return Finding(cause, f"the parameter server refuses client {client_id}: {refusal.message}")

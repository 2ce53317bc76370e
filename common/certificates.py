"""Certificates, as far as a federation is concerned: whose they are, for which use, until when, and from whom.

A client's certificate names its one identity by a URI, ``byzuldp://client/17``. The parameter server's certificate
names the hosts it may be reached at. Everything else about them (chains, signatures, dates) is checked by the TLS
library in each handshake; here the same facts are read so that a message can name them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from common.errors import ConfigError

__all__ = [
    "Certificate",
    "Fault",
    "Use",
    "client_uri",
    "parse_certificates",
    "read_authorities",
    "read_file",
    "read_pair",
]

Use = Literal["server", "client"]

_PURPOSES = {ExtendedKeyUsageOID.SERVER_AUTH: "server", ExtendedKeyUsageOID.CLIENT_AUTH: "client"}
_CLIENT = re.compile(r"byzuldp://client/(0|[1-9][0-9]{0,9})")
E = TypeVar("E", bound=x509.ExtensionType)

_TIME = "%Y-%m-%d %H:%M:%S UTC"
_CURVES = ("secp256r1", "secp384r1")
_KEYS = "an elliptic curve key on P-256 (or P-384, or RSA of at least 2048 bits)"


def client_uri(client_id: int) -> str:
    """The name of an identity in a certificate."""
    return f"byzuldp://client/{client_id}"


@dataclass(frozen=True)
class Fault:
    """Why a certificate cannot be used: a cause in two words, and what was found and expected."""

    cause: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.text}"


@dataclass(frozen=True)
class Certificate:
    """The facts of one certificate.

    Attributes
    ----------
    client_id
        The identity it names; None when it names none, or several.
    names
        The DNS names and addresses it is valid for.
    fingerprint
        SHA-256 of the certificate (64 hex digits).
    uses
        What it may be used for; both when it does not say.
    problem
        What is wrong with its key, for gRPC; empty if nothing is.
    """

    subject: str
    issuer: str
    client_id: int | None
    names: tuple[str, ...]
    serial: int
    fingerprint: str
    begins: datetime
    ends: datetime
    uses: frozenset[str]
    problem: str
    x509: x509.Certificate

    def __str__(self) -> str:
        who = f"client {self.client_id}" if self.client_id is not None else ", ".join(self.names) or self.subject
        return f"the certificate of {who} (serial {self.serial:x}, from {self.issuer})"

    def fault(self, use: Use, now: datetime | None = None) -> Fault | None:
        """Why it cannot be used for this; None when it can. ``now`` is aware; default the system's clock."""
        now = datetime.now(UTC) if now is None else now
        if now > self.ends:
            return Fault("expired", f"it was valid until {self.ends:{_TIME}}; it is now {now:{_TIME}}")
        if now < self.begins:
            return Fault("not yet valid", f"it is valid from {self.begins:{_TIME}}; it is now {now:{_TIME}}")
        if use not in self.uses:
            made_for = "a " + " and a ".join(sorted(self.uses)) if self.uses else "something else"
            return Fault("wrong use", f"expected one made for a {use}, it was made for {made_for}")
        return Fault("wrong key type", self.problem) if self.problem else None

    def days_left(self, now: datetime | None = None) -> float:
        return (self.ends - (datetime.now(UTC) if now is None else now)).total_seconds() / 86_400

    def has_key(self, pem: bytes) -> bool:
        """Whether this text is its private key."""
        try:
            return serialization.load_pem_private_key(pem, password=None).public_key() == self.x509.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return False

    def issued_by(self, authorities: list[Certificate]) -> bool:
        """Whether one of these signed it."""
        return any(_signed(self, authority) for authority in authorities)


def parse_certificates(pem: bytes) -> list[Certificate]:
    """The certificates of a PEM text.

    Raises
    ------
    ValueError
        There is none, or one cannot be read.
    """
    return [_facts(found) for found in x509.load_pem_x509_certificates(pem)]


def read_authorities(path: Path, setting: str) -> tuple[bytes, list[Certificate]]:
    """A bundle of authorities: the PEM text, and what is in it.

    Raises
    ------
    ConfigError
        It cannot be read, holds no certificate, or one that is no authority's.
    """
    pem = read_file(path, setting)
    found = _certificates(pem, path, setting)
    for certificate in found:
        if not _is_authority(certificate.x509):
            raise ConfigError(
                f"{setting} = {str(path)!r}: {certificate} is no authority's; expected those of certificate "
                "authorities (ca.pem of `byzuldp certs`)"
            )
    return pem, found


def read_pair(certificate: Path, key: Path, use: Use, setting: str) -> tuple[bytes, bytes, Certificate]:
    """A certificate (with its chain, if there is one) and its private key: both PEM texts, and the facts of the first.

    Raises
    ------
    ConfigError
        One cannot be read, they do not belong together, or they cannot be used for this.
    """
    chain, secret = read_file(certificate, f"{setting}.certificate"), read_file(key, f"{setting}.key")
    facts = _certificates(chain, certificate, f"{setting}.certificate")[0]
    if fault := facts.fault(use):
        raise ConfigError(f"{setting}.certificate = {str(certificate)!r}: {facts}: {fault}")
    if not facts.has_key(secret):
        raise ConfigError(
            f"{setting}.key = {str(key)!r}: expected the private key of {facts} in {certificate}, in PEM form and "
            "without a password"
        )
    return chain, secret, facts


def read_file(path: Path, setting: str) -> bytes:
    """A file's content.

    Raises
    ------
    ConfigError
        It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{setting} = {str(path)!r}: cannot be read: {problem.strerror or problem}") from None


def _certificates(pem: bytes, path: Path, setting: str) -> list[Certificate]:
    try:
        return parse_certificates(pem)
    except ValueError as problem:
        raise ConfigError(
            f"{setting} = {str(path)!r}: holds no certificate in PEM form ({_first_line(problem)})"
        ) from None


def _facts(certificate: x509.Certificate) -> Certificate:
    names = _extension(certificate, x509.SubjectAlternativeName)
    found: tuple[str, ...] = ()
    client_ids: list[int] = []
    if names is not None:
        found = (
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        )
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        client_ids = [int(match[1]) for uri in uris if (match := _CLIENT.fullmatch(uri))]
    purposes = _extension(certificate, x509.ExtendedKeyUsage)
    uses = {"server", "client"} if purposes is None else {_PURPOSES[use] for use in purposes if use in _PURPOSES}
    return Certificate(
        subject=_shown(certificate.subject.rfc4514_string()),
        issuer=_shown(certificate.issuer.rfc4514_string()),
        client_id=client_ids[0] if len(client_ids) == 1 else None,
        names=tuple(map(_shown, found)),
        serial=certificate.serial_number,
        fingerprint=sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest(),
        begins=certificate.not_valid_before_utc,
        ends=certificate.not_valid_after_utc,
        uses=frozenset(uses),
        problem=_unusable(certificate),
        x509=certificate,
    )


def _unusable(certificate: x509.Certificate) -> str:
    """What BoringSSL, as gRPC sets it up, does not take part in a handshake with."""
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as problem:
        return f"its key cannot be read ({_first_line(problem)}); expected {_KEYS}"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return "" if key.curve.name in _CURVES else f"its key is on {key.curve.name}; expected {_KEYS}"
    if isinstance(key, rsa.RSAPublicKey):
        return "" if key.key_size >= 2048 else f"its RSA key has {key.key_size} bits; expected {_KEYS}"
    kind = type(key).__name__.removeprefix("_").removesuffix("PublicKey")
    return f"its key is {kind}, with which gRPC's handshake fails; expected {_KEYS}"


def _extension(certificate: x509.Certificate, kind: type[E]) -> E | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _is_authority(certificate: x509.Certificate) -> bool:
    constraints = _extension(certificate, x509.BasicConstraints)
    return constraints is not None and constraints.ca


def _signed(certificate: Certificate, authority: Certificate) -> bool:
    try:
        certificate.x509.verify_directly_issued_by(authority.x509)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _shown(text: str) -> str:
    """Fit for a terminal, whatever a stranger's certificate says."""
    return "".join(c if c.isprintable() else "�" for c in text[:200])


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:120]

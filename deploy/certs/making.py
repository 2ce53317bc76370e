"""Making certificates: an authority, and what it signs. Keys are EC P-256: Ed25519 ones fail gRPC's handshake."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.certificates import Certificate, Use, client_uri, parse_certificates
from common.errors import ConfigError

__all__ = ["Authority", "Pair", "client_names", "new_authority", "server_names"]

SKEW = timedelta(minutes=5)  # of the clocks of two machines
_PURPOSES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM texts."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Pair({self.facts})"

    @property
    def facts(self) -> Certificate:
        return parse_certificates(self.certificate)[0]


@dataclass(frozen=True, repr=False)
class Authority:
    """A certificate authority with its key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes

    @classmethod
    def from_pem(cls, certificate: bytes, key: bytes) -> Authority:
        """The authority of two PEM texts.

        Raises
        ------
        ValueError
            They are not PEM, do not belong together, or the key cannot sign certificates.
        """
        found = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is not an elliptic curve key")
        if private.public_key() != found.public_key():
            raise ValueError("the key is not that of the certificate")
        return cls(found, private)

    def issue(
        self, name: str, names: Sequence[x509.GeneralName], use: Use, days: float, *, now: datetime | None = None
    ) -> Pair:
        """A new key, and a certificate of it.

        Parameters
        ----------
        name
            For people (the common name); nothing is decided by it.
        names
            Whom it stands for.
        days
            From now (default the system's clock) to its end; never beyond the authority's own.
        """
        now = datetime.now(UTC) if now is None else now
        key = ec.generate_private_key(ec.SECP256R1())
        issuer_id = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            _builder(name, self.certificate.subject, key, now)
            .not_valid_after(min(now + timedelta(days=days), self.certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_PURPOSES[use]]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return _pair(certificate, key)


def new_authority(days: float, *, now: datetime | None = None) -> Pair:
    """An authority of its own making; it signs certificates for servers and clients, and no further authorities."""
    now = datetime.now(UTC) if now is None else now
    name = f"ByzULDP authority {secrets.token_hex(4)}"  # tells one from the next
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(name, _name(name), key, now)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def server_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """What a server's certificate stands for: DNS names and addresses.

    Raises
    ------
    ConfigError
        One is neither.
    """
    return [_host(host) for host in hosts]


def client_names(client_id: int) -> list[x509.GeneralName]:
    """What a client's certificate stands for: one identity."""
    return [x509.UniformResourceIdentifier(client_uri(client_id))]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise ConfigError(f"--server {host!r}: expected a host name or an address, for instance ps.example.org")
    return x509.DNSName(host.lower())


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )

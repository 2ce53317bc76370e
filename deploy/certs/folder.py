"""A folder of certificates: what is in it, how it is renewed, and what has been revoked.

    ca.pem         the authorities that are trusted, the newest first; everybody gets it
    ca.key         the newest one's key, which can make anybody's certificate: it stays here
    server.pem     the parameter server's certificate, and server.key
    clients/17.pem client 17's, and clients/17.key
    roster.toml    who may join, for the parameter server
    revoked.txt    serial numbers of certificates that count no more, for the parameter server
    issued.txt     what was ever made, one certificate a line

Files are replaced in one step, so a parameter server that reads them may be at work meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from common.certificates import Certificate, parse_certificates
from common.durable import write_durably
from common.errors import ConfigError, StoreUnwritable
from deploy.certs.lists import REVOKED_HEAD, issued_line, read_issued, revoked_line, roster_text
from deploy.certs.making import Authority, Pair, client_names, new_authority, server_names
from ps.identity import Listed, read_revoked, read_roster

__all__ = ["LOOPBACK", "MOST_IDENTITIES", "CertificateFolder"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_IDENTITIES = 100_000
SECRET, OPEN, FOLDER = 0o600, 0o644, 0o700


@dataclass(frozen=True)
class CertificateFolder:
    """Makes and keeps certificates in ``path``.

    Every method may raise ConfigError for a file that is not what it should be, and StoreUnwritable for one that
    cannot be written.
    """

    path: Path

    @property
    def authorities(self) -> Path:
        return self.path / "ca.pem"

    @property
    def server(self) -> tuple[Path, Path]:
        return self.path / "server.pem", self.path / "server.key"

    @property
    def roster(self) -> Path:
        return self.path / "roster.toml"

    @property
    def revoked(self) -> Path:
        return self.path / "revoked.txt"

    def client(self, client_id: int | str) -> tuple[Path, Path]:
        """Certificate and key of an identity; ``"{id}"`` for the pattern of all."""
        return self.path / "clients" / f"{client_id}.pem", self.path / "clients" / f"{client_id}.key"

    @property
    def client_ids(self) -> list[int]:
        """The identities that have a certificate here."""
        found = (path.stem for path in (self.path / "clients").glob("*.pem"))
        return sorted(int(stem) for stem in found if stem.isdecimal())

    # ---------------------------------------------------------------- authorities

    def begin(self, days: float) -> bool:
        """Make the folder and its first authority; False when it has one already."""
        if new := not self.authorities.exists():
            self._add_authority(days, b"")
        if not self.revoked.exists():
            self._write(self.revoked, REVOKED_HEAD.encode(), OPEN)
        return new

    def add_authority(self, days: float) -> None:
        """A new authority signs from now on; certificates of the older ones are accepted as before."""
        self._add_authority(days, self._read(self.authorities))

    def _add_authority(self, days: float, older: bytes) -> None:
        made = new_authority(days)
        self._write(self.path / "ca.key", made.key, SECRET)
        self._write(self.authorities, made.certificate + older, OPEN)

    def forget_old_authorities(self) -> int:
        """Accept the newest authority's certificates only; returns how many authorities that leaves out."""
        found = self._certificates(self.authorities)
        self._write(self.authorities, found[0].x509.public_bytes(Encoding.PEM), OPEN)
        return len(found) - 1

    def _authority(self) -> Authority:
        """The one that signs."""
        key = self.path / "ca.key"
        try:
            found = Authority.from_pem(self._read(self.authorities), self._read(key))
        except ValueError as problem:
            raise ConfigError(
                f"{key} and the first certificate of {self.authorities}: {problem}; restore them, or make a new "
                "authority with --new-ca"
            ) from None
        if datetime.now(UTC) > (ends := found.certificate.not_valid_after_utc):
            raise ConfigError(
                f"the authority in {self.authorities} was valid until {ends:%Y-%m-%d}; make another with --new-ca"
            )
        return found

    # ---------------------------------------------------------------- certificates

    def make_server(self, hosts: Sequence[str], days: float, *, renew: bool) -> Certificate | None:
        """The parameter server's certificate, for these names; none given: those it had, or the loopback ones.

        Returns
        -------
        Certificate or None
            None when there was one for these names, and it was not to be renewed.
        """
        certificate, key = self.server
        names = list(hosts)
        if certificate.exists():
            present = list(self._certificates(certificate)[0].names)
            names = names or present
            if not renew and {str(name.value) for name in server_names(names)} != set(present):
                raise ConfigError(
                    f"{certificate} is for {', '.join(present)}; {', '.join(names)} was asked for: add --renew to "
                    "replace it"
                )
            if not renew:
                return None
        made = self._authority().issue("ByzULDP parameter server", server_names(names or LOOPBACK), "server", days)
        self._keep(made, certificate, key)
        return made.facts

    def make_clients(self, ids: Iterable[int], days: float, *, renew: bool) -> list[int]:
        """Certificates for these identities, and their entries in the roster file; returns who got one.

        An entry lists the new certificate, and the one it replaces, which may be in use for a while yet. An entry that
        lists none accepts any, and is left so.
        """
        authority, made = self._authority(), dict[int, Pair]()
        roster = dict(read_roster(self.roster, num_clients=MOST_IDENTITIES)) if self.roster.exists() else {}
        for client_id in ids:
            certificate, _ = self.client(client_id)
            replaced = self._certificates(certificate)[0].fingerprint if certificate.exists() else None
            if replaced is not None and not renew:
                continue
            pair = authority.issue(f"ByzULDP client {client_id}", client_names(client_id), "client", days)
            entry = roster.get(client_id)
            if entry is None:
                roster[client_id] = Listed(client_id, fingerprints=frozenset([pair.facts.fingerprint]))
            elif entry.fingerprints:
                listed = frozenset([pair.facts.fingerprint]) | (entry.fingerprints & {replaced})
                roster[client_id] = Listed(client_id, entry.name, listed)
            made[client_id] = pair
        if made:  # listed before they exist: the other way round a client could be refused for a moment
            self._write(self.roster, roster_text(roster).encode(), OPEN)
        for client_id, pair in made.items():
            self._keep(pair, *self.client(client_id))
        return list(made)

    def revoke(self, ids: Sequence[int]) -> list[int]:
        """Revoke every certificate ever made for these identities; returns the serial numbers that are new."""
        issued = read_issued(self._read(self.path / "issued.txt").decode(), ids)
        known = read_revoked(self.revoked)
        text, added = self._read(self.revoked).decode(), list[int]()
        for client_id in ids:
            if not issued[client_id]:
                raise ConfigError(f"client {client_id} has no certificate from {self.path}: nothing to revoke")
            for serial in sorted(issued[client_id] - known):
                text += revoked_line(serial, client_id, datetime.now(UTC))
                added.append(serial)
        self._write(self.revoked, text.encode(), OPEN)
        return added

    # ---------------------------------------------------------------- files

    def _keep(self, made: Pair, certificate: Path, key: Path) -> None:
        with self._explained(self.path / "issued.txt"), open(self.path / "issued.txt", "a", encoding="utf-8") as file:
            file.write(issued_line(made.facts))
        self._write(key, made.key, SECRET)
        self._write(certificate, made.certificate, OPEN)

    def _certificates(self, path: Path) -> list[Certificate]:
        try:
            return parse_certificates(self._read(path))
        except ValueError as problem:
            raise ConfigError(f"{path}: holds no certificate ({problem}); restore it, or remove it") from None

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as problem:
            raise ConfigError(
                f"{path}: cannot be read: {problem.strerror}; is {self.path} a folder that `byzuldp certs` made?"
            ) from None

    def _write(self, path: Path, content: bytes, mode: int) -> None:
        with self._explained(path):
            self.path.mkdir(parents=True, exist_ok=True, mode=FOLDER)
            path.parent.mkdir(exist_ok=True, mode=FOLDER)
            if path.exists() or (mode == SECRET and path.parent == self.path):
                write_durably(path, content, mode=mode)
            else:  # one that is lost is made again; synchronising thousands takes longer than making them
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with open(descriptor, "wb") as file:
                    file.write(content)
            path.chmod(mode)  # whatever the umask: certificates are for others to read, keys are not

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise StoreUnwritable(f"{path}: cannot be written: {problem.strerror}") from None

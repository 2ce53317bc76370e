"""Who is at the other end of a connection, and for which identity it may speak.

With TLS a certificate stands for exactly one identity. It was signed, in date and meant for a client, or there would be
no connection: that is the handshake's part, of which gRPC tells us nothing when it fails. Here are the checks that come
after it: whose certificate it is, whether it has been revoked, and whether a roster file lists it. Their files may
change while a run goes on. Without TLS there are join tokens only, and nothing here refuses.
"""

from __future__ import annotations

import logging
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpc.aio import ServicerContext

from common.errors import ConfigError
from common.rereading import Reread
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb

if TYPE_CHECKING:
    from common.certificates import Certificate
    from common.config import Tls

__all__ = ["ANYBODY", "Gate", "Listed", "Peer", "read_revoked", "read_roster"]

log = logging.getLogger("byzuldp.ps.identity")

T = TypeVar("T")

LOOK_AGAIN_S = 0.2
KEPT = 4096  # certificates whose facts are remembered: parsing one takes longer than everything else here
LOGGED_AGAIN_S = 10.0


@dataclass(frozen=True)
class Peer:
    """The other end of a connection: where it is, and what it proved to be (nothing, without TLS)."""

    address: str = ""
    certificate: Certificate | None = None

    @property
    def proven_id(self) -> int | None:
        """Whose certificate it has shown; None without one."""
        return None if self.certificate is None else self.certificate.client_id

    def __str__(self) -> str:
        at = self.address or "an unknown address"
        return at if self.certificate is None else f"{at} with {self.certificate}"


ANYBODY = Peer()
"""A peer without a certificate."""


@dataclass(frozen=True)
class Listed:
    """One line of the roster file."""

    client_id: int
    name: str = ""
    fingerprints: frozenset[str] = frozenset()
    """The certificates that count as this identity's; empty: any that names it."""


class Gate:
    """Lets a connection speak for an identity, or says why not.

    Parameters
    ----------
    tls
        Whether there are certificates, and the files of who may join and of what has been revoked.
    num_clients
        n: identities on the public roster.
    clock
        Monotonic seconds.

    Raises
    ------
    ConfigError
        A file cannot be read, or lists what it cannot.
    """

    def __init__(self, tls: Tls, num_clients: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.certified = tls.enabled
        self._roster = _followed(tls.roster, partial(read_roster, num_clients=num_clients))
        self._revoked = _followed(tls.revoked, read_revoked)
        self._clock, self._logged_at = clock, dict[tuple[int, int, int], float]()

    def peer(self, context: ServicerContext[Any, Any]) -> Peer:
        """Who calls."""
        if not self.certified:
            return Peer(context.peer())
        for pem in context.auth_context().get("x509_pem_cert", ()):
            return Peer(context.peer(), _certificate(pem))
        return Peer(context.peer())

    def admit(self, peer: Peer, client_id: int) -> None:
        """May this connection speak for that identity, now?

        Raises
        ------
        Refused
            Its certificate is not that identity's, has been revoked, or is not the one that the roster file lists; or
            the identity is not listed there.
        """
        if not self.certified:
            return
        try:
            self._admit(peer.certificate, client_id)
        except Refused as refused:
            self._log(peer, client_id, refused)
            raise

    def _admit(self, certificate: Certificate | None, client_id: int) -> None:
        if certificate is None or certificate.client_id is None:
            shown = "no certificate" if certificate is None else f"{certificate}, which names no client"
            raise Refused(pb.WRONG_CERTIFICATE, f"expected the certificate of client {client_id}, found {shown}")
        if self._revoked is not None and certificate.serial in self._revoked.current():
            raise Refused(
                pb.REVOKED, f"{certificate} has been revoked; ask the parameter server's operator for another one"
            )
        if certificate.client_id != client_id:
            raise Refused(pb.WRONG_CERTIFICATE, f"expected the certificate of client {client_id}, found {certificate}")
        if self._roster is None:
            return
        listed = self._roster.current().get(client_id)
        if listed is None:
            raise Refused(pb.UNKNOWN_CLIENT, f"client {client_id} is not in the parameter server's roster file")
        if listed.fingerprints and certificate.fingerprint not in listed.fingerprints:
            raise Refused(
                pb.WRONG_CERTIFICATE,
                f"{certificate} is not one that the parameter server's roster file lists for client {client_id}: its "
                f"fingerprint is {certificate.fingerprint}",
            )

    def name_of(self, client_id: int) -> str:
        """``client 17``, with its name in the roster file if it has one."""
        listed = self._roster.current().get(client_id) if self._roster is not None else None
        return f"client {client_id}" + (f" ({listed.name})" if listed is not None and listed.name else "")

    def _log(self, peer: Peer, client_id: int, refused: Refused) -> None:
        """Each certificate's refusal once in a while: a peer must not fill logs."""
        key = (0 if peer.certificate is None else peer.certificate.serial, client_id, int(refused.kind))
        now = self._clock()
        if len(self._logged_at) > KEPT:
            self._logged_at.clear()
        if now - self._logged_at.get(key, -LOGGED_AGAIN_S) >= LOGGED_AGAIN_S:
            self._logged_at[key] = now
            log.warning("refused %s at %s: %s", self.name_of(client_id), peer.address, refused.message)


def read_roster(path: Path, *, num_clients: int) -> Mapping[int, Listed]:
    """Who may join::

        [[client]]
        id = 17
        name = "Hôpital Nord"            # optional
        fingerprint = "3f0c…"            # optional: SHA-256 of the certificate, or a list of them

    Raises
    ------
    ConfigError
        It cannot be read, or an entry is not like that, or an id is listed twice or is none of 0 to n − 1.
    """
    from common.certificates import read_file  # here alone: without TLS nothing needs cryptography

    setting = "network.tls.roster"
    try:
        tree = tomllib.loads(read_file(path, setting).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{setting} = {str(path)!r}: not valid TOML: {problem}") from None
    entries = tree.get("client", [])
    if set(tree) - {"client"} or not isinstance(entries, list):
        raise ConfigError(f"{setting} = {str(path)!r}: expected [[client]] entries only, found {', '.join(tree)}")
    listed: dict[int, Listed] = {}
    for number, entry in enumerate(entries, 1):
        try:
            found = _listed(entry, num_clients)
            if found.client_id in listed:
                raise ValueError(f"id = {found.client_id} is listed twice")
        except ValueError as problem:
            raise ConfigError(f"{setting} = {str(path)!r}, entry {number}: {problem}") from None
        listed[found.client_id] = found
    return listed


def _listed(entry: object, num_clients: int) -> Listed:
    if not isinstance(entry, dict) or set(entry) - {"id", "name", "fingerprint"}:
        raise ValueError(f"expected id, name and fingerprint, found {entry!r}")
    client_id, name, given = entry.get("id"), entry.get("name", ""), entry.get("fingerprint", [])
    if not isinstance(client_id, int) or isinstance(client_id, bool) or not 0 <= client_id < num_clients:
        raise ValueError(f"id = {client_id!r}: expected a number from 0 to {num_clients - 1}")
    if not isinstance(name, str):
        raise ValueError(f"name = {name!r}: expected a string")
    fingerprints = [given] if isinstance(given, str) else given
    if not isinstance(fingerprints, list) or not all(map(_is_fingerprint, fingerprints)):
        raise ValueError(f"fingerprint = {given!r}: expected 64 hex digits, or a list of such")
    return Listed(client_id, name, frozenset(_plain(value) for value in fingerprints))


def read_revoked(path: Path) -> frozenset[int]:
    """Serial numbers in hex, one a line; colons are left out, and ``#`` begins a comment.

    Raises
    ------
    ConfigError
        It cannot be read, or a line is something else.
    """
    from common.certificates import read_file

    setting, found = "network.tls.revoked", set[int]()
    text = read_file(path, setting).decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if serial := _plain(line.partition("#")[0]):
            try:
                found.add(int(serial, 16))
            except ValueError:
                raise ConfigError(
                    f"{setting} = {str(path)!r}, line {number}: {line!r} is no serial number in hex digits"
                ) from None
    return frozenset(found)


def _followed(path: Path | None, read: Callable[[Path], T]) -> Reread[T] | None:
    return None if path is None else Reread([path], partial(read, path), every_s=LOOK_AGAIN_S)


@lru_cache(maxsize=KEPT)
def _certificate(pem: bytes) -> Certificate | None:
    """The first certificate of a text; None for one that cannot be read."""
    from common.certificates import parse_certificates

    try:
        return parse_certificates(pem)[0]
    except ValueError:
        return None


def _plain(text: str) -> str:
    return text.replace(":", "").strip().lower()


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and len(_plain(value)) == 64 and _is_hex(_plain(value))


def _is_hex(text: Iterable[str]) -> bool:
    return all(digit in "0123456789abcdef" for digit in text)

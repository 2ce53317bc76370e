"""The lists beside the certificates: who may join, what has been revoked, what was ever made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from common.certificates import Certificate
from deploy.toml import string
from ps.identity import Listed

__all__ = ["REVOKED_HEAD", "issued_line", "read_issued", "revoked_line", "roster_text"]

REVOKED_HEAD = (
    "# Serial numbers of certificates that count no more, one a line. The parameter server reads it again when it "
    "changes.\n"
)
_ROSTER_HEAD = """\
# Who may join: each identity's id, its name for people, and the SHA-256 of the certificates that count as its own.
# The parameter server reads it again when it changes. `byzuldp certs` keeps ids and names; comments it does not keep.
"""


def roster_text(listed: Mapping[int, Listed]) -> str:
    """The roster file, in the order of the ids; see :func:`ps.identity.read_roster`."""
    return _ROSTER_HEAD + "".join(_entry(listed[client_id]) for client_id in sorted(listed))


def _entry(listed: Listed) -> str:
    lines = ["", "[[client]]", f"id = {listed.client_id}"]
    if listed.name:
        lines.append(f"name = {string(listed.name)}")
    if listed.fingerprints:
        lines.append(f"fingerprint = [{', '.join(map(string, sorted(listed.fingerprints)))}]")
    return "\n".join(lines) + "\n"


def issued_line(certificate: Certificate) -> str:
    """One line of ``issued.txt``: serial number, whose, until when."""
    who = "server" if certificate.client_id is None else str(certificate.client_id)
    return f"{certificate.serial:x} {who} {certificate.ends:%Y-%m-%dT%H:%M:%SZ}\n"


def read_issued(text: str, client_ids: Iterable[int]) -> dict[int, set[int]]:
    """The serial numbers ever made for these identities."""
    found: dict[int, set[int]] = {client_id: set() for client_id in client_ids}
    for line in text.splitlines():
        serial, _, rest = line.partition(" ")
        who = rest.partition(" ")[0]
        if who.isdecimal() and int(who) in found:
            found[int(who)].add(int(serial, 16))
    return found


def revoked_line(serial: int, client_id: int, now: datetime) -> str:
    """One line of ``revoked.txt``; see :func:`ps.identity.read_revoked`."""
    return f"{serial:x}  # client {client_id}, {now:%Y-%m-%d %H:%M} UTC\n"

"""Who may read what: tokens, and which names of this machine count as its own.

The public part says what ``public/summary.json`` may say; on loopback it needs no token. The operator's part, and the
figures for Prometheus, need the operator's token always.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.rpc.addresses import Address
from ps.durable import explaining

__all__ = ["OPERATOR_FILE", "PAGE_FILE", "Access", "Part", "Tokens", "tokens_in"]

Part = Literal["public", "operator"]

OPERATOR_FILE, PAGE_FILE = "status_token", "status_page_token"
_BYTES, _SHORTEST = 24, 32
_LONGEST_GIVEN = 256


@dataclass(frozen=True, repr=False)
class Tokens:
    """The two secrets of a run's status page: the operator's opens everything, the page's the public part alone."""

    operator: str
    page: str


def tokens_in(folder: Path) -> Tokens:
    """The tokens of a run, from its ``operator`` folder; made, each in a file of mode 0600, where there are none.

    Raises
    ------
    StoreUnwritable
        They can neither be read nor written.
    """
    return Tokens(_token(folder / OPERATOR_FILE), _token(folder / PAGE_FILE))


def _token(path: Path) -> str:
    with explaining(path, "keep the status page's token"):
        if path.exists() and not stat.S_IMODE(path.stat().st_mode) & 0o077:  # what others could read is no secret
            found = path.read_text("ascii", errors="replace").strip()
            if len(found) >= _SHORTEST and found.isascii():
                return found
        token, new = secrets.token_urlsafe(_BYTES), path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
        new.replace(path)  # whole, or not at all
    return token


@dataclass(frozen=True)
class Access:
    """The rules of one page.

    Parameters
    ----------
    tokens
        The run's.
    address
        Where the page listens.
    """

    tokens: Tokens
    address: Address

    def needs_token(self, part: Part) -> bool:
        return part == "operator" or not self.address.is_loopback

    def refuse(self, part: Part, given: str | None) -> tuple[int, str] | None:
        """The HTTP status and the sentence that go to whoever may not read a part; None for who may."""
        if not self.needs_token(part):
            return None
        whose = "operator's" if part == "operator" else "status page's"
        if not given:
            where = OPERATOR_FILE if part == "operator" else PAGE_FILE
            return 401, (
                f"This needs the {whose} token, from the file operator/{where} of the run folder: add ?token=... to "
                "the address, or send it as Authorization: Bearer ..."
            )
        allowed = (self.tokens.operator,) if part == "operator" else (self.tokens.operator, self.tokens.page)
        offered = given[:_LONGEST_GIVEN].encode("utf-8", "surrogateescape")
        # Not any(): the time must not tell which of them it was.
        if sum([hmac.compare_digest(offered, token.encode()) for token in allowed]):
            return None
        return 403, f"This is not the {whose} token of this run."

    def refuse_host(self, host: str | None) -> str | None:
        """On loopback, only names of loopback are served: a foreign name that leads here is DNS rebinding."""
        if not self.address.is_loopback:
            return None  # there, every page needs a token, which a foreign page does not have
        if host is not None and _is_loopback(host):
            return None
        return "This status page is asked for by the name of another machine; use 127.0.0.1 or localhost."


def _is_loopback(host: str) -> bool:
    """Of a Host header, with a port or without: behind a tunnel the port is another."""
    name, _, port = host.rpartition(":")
    if not (name and port.isdecimal() and (":" not in name or name.endswith("]"))):
        name = host
    if not name or len(name) > 64:
        return False
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return Address(bare.lower(), 0).is_loopback

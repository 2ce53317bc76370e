"""Lists of identities as they are written on a command line."""

from __future__ import annotations

from common.errors import ConfigError

__all__ = ["parse_ids"]


def parse_ids(text: str, clients: int, *, option: str = "--ids") -> list[int]:
    """``0-29,31`` as a sorted list.

    Raises
    ------
    ConfigError
        Not that form, an id twice, or one that is not on the roster of ``clients``.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{option} {text!r}: expected numbers and ranges, for instance 0-29,31")
        begin, end = int(first), int(last) if dash else int(first)
        if not begin <= end < clients:
            raise ConfigError(f"{option} {text!r}: {part.strip()} is not within the roster, 0 to {clients - 1}")
        found += range(begin, end + 1)
    if len(set(found)) != len(found):
        raise ConfigError(f"{option} {text!r}: an id is named twice")
    return sorted(found)

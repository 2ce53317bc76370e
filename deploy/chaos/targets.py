"""Whom a fault is about: names of processes, groups of them, and links between them and the parameter server.

Processes are ``ps``, ``client-0``, ``client-1``, … and ``adversary``. Groups are ``clients``, ``half`` (the first half
of the client processes, rounded down), ``all`` (every peer of the parameter server), and patterns such as
``client-*`` or ``client-1?``. A link is named by its peer, or as ``client-3 <-> ps``; one direction of it as
``client-3 -> ps`` or ``ps -> client-3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from common.errors import ConfigError, nearest
from deploy.chaos.backend import PS

__all__ = ["LinkEnd", "links", "processes"]

Direction: TypeAlias = Literal["up", "down"]
LinkEnd: TypeAlias = tuple[str, Direction]
"""A peer, and one direction of its link."""

_ARROWS = ("<->", "->", "<-")


def processes(on: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The processes that ``on`` names, each once, in the order of ``names``.

    Parameters
    ----------
    names
        All processes of the run, ``ps`` first.

    Raises
    ------
    ConfigError
        One of them names nobody, or a link.
    """
    found: set[str] = set()
    for text in on:
        if any(arrow in text for arrow in _ARROWS):
            raise ConfigError(f"on = {text!r}: this fault is of processes; name one, for instance {names[-1]!r}")
        found.update(_named(text, names))
    return tuple(name for name in names if name in found)


def links(on: Sequence[str], names: Sequence[str]) -> tuple[LinkEnd, ...]:
    """The directions of links that ``on`` names, each once.

    Raises
    ------
    ConfigError
        One of them names nobody, or a link that does not exist: there is none between two peers.
    """
    found: set[LinkEnd] = set()
    for text in on:
        found.update(_link(text, names))
    return tuple((name, way) for name in names for way in _WAYS if (name, way) in found)


_WAYS: tuple[Direction, Direction] = ("up", "down")


def _link(text: str, names: Sequence[str]) -> set[LinkEnd]:
    arrow = next((arrow for arrow in _ARROWS if arrow in text), None)
    if arrow is None:
        return {(name, way) for name in _named(text, names) for way in _WAYS if name != PS} or _all(names)
    left, _, right = (part.strip() for part in text.partition(arrow))
    if (left == PS) == (right == PS):
        raise ConfigError(f"on = {text!r}: a link has the parameter server at one end, for instance 'client-3 -> ps'")
    peers = _named(right if left == PS else left, names)
    if PS in peers:
        raise ConfigError(f"on = {text!r}: a link has the parameter server at one end only")
    up = arrow == "<->" or (arrow == "->") == (right == PS)
    down = arrow == "<->" or not up
    return {(name, way) for name in peers for way, wanted in zip(_WAYS, (up, down), strict=True) if wanted}


def _all(names: Sequence[str]) -> set[LinkEnd]:
    return {(name, way) for name in names for way in _WAYS if name != PS}


def _named(text: str, names: Sequence[str]) -> list[str]:
    clients = [name for name in names if name.startswith("client-")]
    match text:
        case "clients":
            found = clients
        case "half":
            found = clients[: len(clients) // 2]
        case "all":
            found = [name for name in names if name != PS]
        case _:
            found = [name for name in names if fnmatchcase(name, text)]
    if not found:
        known = [*names, "clients", "half", "all"]
        close = nearest(text, known)
        if not close.startswith("did"):
            peers = [name for name in names if name != PS]
            span = f"{peers[0]} … {peers[-1]}" if len(peers) > 3 else ", ".join(peers)
            close = f"known: ps, {span}, clients, half, all, and patterns such as 'client-*'"
        raise ConfigError(f"on = {text!r} names no process of this run; {close}")
    return found

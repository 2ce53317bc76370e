"""Misbehaviours: ways to abuse the protocol, named in ``[misbehaviour]`` and combined with any attack on the values.

A new one is one file here and one line in ``MISBEHAVIOURS``; a user's own is ``module:name`` in the experiment, a
subclass of :class:`Misbehaviour`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adversary.misbehaviour.connection_flood import ConnectionFlood
from adversary.misbehaviour.crash import Crash
from adversary.misbehaviour.endless import Endless
from adversary.misbehaviour.equivocation import Equivocation
from adversary.misbehaviour.future_round import FutureRound
from adversary.misbehaviour.half_open_streams import HalfOpenStreams
from adversary.misbehaviour.huge_metadata import HugeMetadata
from adversary.misbehaviour.impersonation import Impersonation
from adversary.misbehaviour.join_storm import JoinStorm
from adversary.misbehaviour.misbehaviour import Ground, Misbehaviour
from adversary.misbehaviour.never_reads import NeverReads
from adversary.misbehaviour.oversize import Oversize
from adversary.misbehaviour.ping_flood import PingFlood
from adversary.misbehaviour.rapid_reset import RapidReset
from adversary.misbehaviour.replay import Replay
from adversary.misbehaviour.silence import Silence
from adversary.misbehaviour.slow_loris import SlowLoris
from adversary.misbehaviour.strange_bytes import Garbage, Http1, TlsConfusion
from adversary.misbehaviour.timing import EleventhHour, Late
from adversary.misbehaviour.wrong_contents import WrongCount, WrongDigest, WrongDtype, WrongSchema
from adversary.misbehaviour.wrong_order import OverlappingChunks, ShuffledChunks
from common.errors import AttackError, nearest
from common.parameters import check_parameters, own_parameters, taken_of
from common.plugins import is_plugin, load_plugin

__all__ = ["MISBEHAVIOURS", "Ground", "Kind", "Misbehaviour", "deal", "make_misbehaviours"]

MISBEHAVIOURS: dict[str, type[Misbehaviour]] = {
    kind.name: kind
    for kind in (
        Silence,
        Crash,
        SlowLoris,
        EleventhHour,
        Late,
        Equivocation,
        Replay,
        FutureRound,
        WrongCount,
        WrongDigest,
        WrongDtype,
        WrongSchema,
        ShuffledChunks,
        OverlappingChunks,
        Oversize,
        Endless,
        ConnectionFlood,
        HalfOpenStreams,
        JoinStorm,
        Impersonation,
        Garbage,
        Http1,
        TlsConfusion,
        HugeMetadata,
        PingFlood,
        RapidReset,
        NeverReads,
    )
}


@dataclass(frozen=True)
class Kind:
    """A misbehaviour with its parameters, not yet anywhere."""

    takes_part: bool
    build: Callable[[Ground], Misbehaviour]


def deal(ids: Sequence[int], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Which identities misbehave in which way: in turn, sorted; a name without an identity is left out."""
    ordered = sorted(ids)
    return {name: tuple(ordered[k :: len(names)]) for k, name in enumerate(names) if ordered[k :: len(names)]}


def make_misbehaviours(
    names: Sequence[str], parameters: Mapping[str, Any], folders: Sequence[Path] = ()
) -> dict[str, Kind]:
    """How to build each of them, given its ground.

    Parameters
    ----------
    names
        Keys of ``MISBEHAVIOURS``, or ``module:name`` of a user's own.
    parameters
        Of all of them together: each is given those it takes.
    folders
        Where else to look for a user's module.

    Raises
    ------
    ConfigError
        There is no such module, or nothing of that name in it.
    AttackError
        A name or a parameter is unknown.
    """
    kinds = {name: _kind(name, folders) for name in names}
    for name, value in parameters.items():
        if not any(taken_of(kind, {name: value}) for kind in kinds.values()):
            known = sorted({key for kind in kinds.values() for key in own_parameters(kind)})
            hint = nearest(name, known) if known else "it has none"
            raise AttackError(f"misbehaviour {', '.join(names)} has no parameter {name!r}: {hint}")
    return {name: _built(name, kind, parameters) for name, kind in kinds.items()}


def _kind(name: str, folders: Sequence[Path]) -> type[Misbehaviour]:
    if is_plugin(name):
        found = load_plugin(name, folders)
        if not (isinstance(found, type) and issubclass(found, Misbehaviour)):
            raise AttackError(f"{name}: expected a subclass of adversary.misbehaviour.Misbehaviour")
        return found
    if name not in MISBEHAVIOURS:
        raise AttackError(f"no misbehaviour {name!r}: {nearest(name, list(MISBEHAVIOURS))} or your own as module:name")
    return MISBEHAVIOURS[name]


def _built(name: str, kind: type[Misbehaviour], parameters: Mapping[str, Any]) -> Kind:
    own = taken_of(kind, parameters)
    check_parameters(name, kind, own, provided={"ground"}, error=AttackError)
    return Kind(kind.takes_part, lambda ground: kind(ground, **own))

"""What a parameter server answers, before any of it is used: a number that cannot be is no number, and words are words.

An honest server never sends what is refused here. One that does would make a client wait without pause or without end,
hold as many chunks as a model has bytes, or write what it likes to a terminal.
"""

from __future__ import annotations

import json
from typing import Any

from client.memory import Outcome
from common.errors import RunFailed, leaves
from common.rpc.texts import shown
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["LAST_ROUND", "end_of", "public_of", "refusal_of", "what_is_wrong_with"]

LAST_ROUND = 1 << 53
"""Beyond this a round is none: it could not be counted, nor stored."""
INCARNATION_BYTES = 16
LONGEST_RUN_ID = 64
LEAST_CHUNK_BYTES = 1 << 10
SHORTEST_S, LONGEST_S = 1e-3, 1e6
MESSAGE_CHARACTERS = 500
KNOWN_STATUSES = frozenset(("completed", *(leaf.status for leaf in leaves())))


def what_is_wrong_with(reply: pb.JoinReply) -> str:
    """Why this answer to a joining is none; empty for one that may be used."""
    if not reply.HasField("joined"):
        return "" if reply.HasField("refusal") else "an answer that neither joins nor refuses"
    joined = reply.joined
    if not (0 < len(joined.run_id) <= LONGEST_RUN_ID and joined.run_id.isprintable()):
        return f"run_id = {shown(joined.run_id)!r}"
    if len(joined.incarnation) != INCARNATION_BYTES:
        return f"an incarnation of {len(joined.incarnation)} bytes, expected {INCARNATION_BYTES}"
    if joined.chunk_bytes and joined.chunk_bytes < LEAST_CHUNK_BYTES:
        return f"chunk_bytes = {joined.chunk_bytes}, expected at least {LEAST_CHUNK_BYTES}"
    for name, value in (("heartbeat_s", joined.heartbeat_s), ("liveness_s", joined.liveness_s)):
        if value != 0.0 and not SHORTEST_S <= value <= LONGEST_S:
            return f"{name} = {value:g}, expected {SHORTEST_S:g} to {LONGEST_S:g}"
    for name, number in (("next_round", joined.next_round), ("rounds", joined.rounds)):
        if number > LAST_ROUND:
            return f"{name} = {number}, expected at most {LAST_ROUND}"
    return ""


def public_of(reply: pb.JoinReply) -> dict[str, Any] | None:
    """The server's public configuration; None if it is none."""
    try:
        public = json.loads(reply.public_configuration)
    except (ValueError, RecursionError):
        return None
    return public if isinstance(public, dict) else None


def refusal_of(refusal: pb.Refusal) -> str:
    """A refusal's words."""
    return shown(refusal.message, MESSAGE_CHARACTERS)


def end_of(finished: pb.RunFinished) -> Outcome:
    """How the run ended; with a status that this version does not know, it failed."""
    releases = finished.releases if finished.HasField("releases") else None
    status, message = finished.status, shown(finished.message, MESSAGE_CHARACTERS)
    if status not in KNOWN_STATUSES:
        return Outcome(RunFailed.status, f"it ended with the unknown status {shown(status)!r}: {message}", releases)
    return Outcome(status, message, releases)

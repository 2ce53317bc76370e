"""Receiving one momentum: header, payload, trailer; every byte checked before use.

A momentum is refused on its header before any of its payload is accepted, and counts only after its last message.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from common.rpc.digests import Digest
from common.rpc.frames import Frame, Malformed
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.coordinator import Coordinator
from ps.identity import Peer
from ps.inbox import Outcome, RowError, Writer
from ps.rounds import Phase
from ps.streams import Stream, intact

__all__ = ["MomentumFrame", "Reception"]

MomentumFrame = Frame[pb.MomentumHeader] | Malformed

MOST_COMPUTE_S = 1e6
"""A client's account of its computing is believed up to here, for what it is worth."""

_REFUSALS = {"order": pb.MALFORMED, "too_large": pb.TOO_LARGE, "incomplete": pb.MALFORMED, "checksum": pb.CHECKSUM}


class Reception:
    """One PushMomentum call."""

    def __init__(
        self, coordinator: Coordinator, frames: AsyncIterator[MomentumFrame], peer: Peer, stream: Stream
    ) -> None:
        self._ps, self._inbox, self._frames, self._peer = coordinator, coordinator.inbox, frames, peer
        self._stream = stream
        self.client_id: int | None = None  # as the header claims
        self._received_at = 0.0

    async def receive(self) -> pb.Accepted:
        """Take the whole momentum.

        Raises
        ------
        Refused
            It is not wanted, or not what it says it is.
        """
        frame = await self._stream.first(self._frames)
        header = frame.header
        if header is None:
            raise Refused(pb.MALFORMED, "the first message of a momentum has a header")
        self.client_id = header.caller.client_id
        self._admit(header)
        earlier = self._inbox.digest_of(header.caller.client_id)
        if earlier is not None:
            self._ps.repeats(header.caller.client_id)
            return await self._compare(frame, earlier, header.caller)
        began_at = time.monotonic()
        writer = self._begin(header)
        try:
            while True:
                self._write(writer, frame)
                if frame.trailer is not None:
                    accepted = self._complete(writer, frame.trailer, header)
                    self._timed(header, began_at)
                    return accepted
                frame = await self._next()
        except RowError as problem:
            raise self._as_refusal(problem, header) from None
        finally:
            self._inbox.abandon(writer)

    def _admit(self, header: pb.MomentumHeader) -> None:
        self._ps.members.check(header.caller, self._peer)
        self._stream.claim(header.caller.client_id)
        expected, rounds = self._inbox.num_parameters, self._ps.rounds
        if header.element_count > expected:
            raise Refused(pb.TOO_LARGE, f"{header.element_count} elements announced, the model has {expected}")
        if header.element_count != expected or header.schema_hash != self._ps.members.schema_hash:
            raise Refused(
                pb.WRONG_SCHEMA,
                f"{header.element_count} elements of schema {header.schema_hash.hex()[:16] or 'none'}, expected "
                f"{expected} of {self._ps.members.schema_hash.hex()[:16]}",
            )
        current = rounds.round_id
        if header.round_id < current:
            raise Refused(
                pb.STALE_ROUND, f"round {header.round_id} is over; the next one is {current}", next_round=current
            )
        if header.round_id > current or rounds.phase is Phase.JOINING:
            raise Refused(
                pb.FUTURE_ROUND,
                f"round {header.round_id} has not been opened",
                next_round=current,
                excused=header.round_id == current,
            )

    def _begin(self, header: pb.MomentumHeader) -> Writer:
        try:
            return self._inbox.begin(header.caller.client_id)
        except RowError as problem:
            if problem.reason == "busy":
                raise Refused(pb.ROW_BUSY, f"client {header.caller.client_id}: {problem}") from None
            raise _late(header.round_id) from None

    def _write(self, writer: Writer, frame: Frame[pb.MomentumHeader]) -> None:
        self._ps.count_bytes(up=len(frame.payload))
        if len(frame.payload):
            self._inbox.write(writer, frame.offset, frame.payload)

    def _complete(self, writer: Writer, trailer: pb.Trailer, header: pb.MomentumHeader) -> pb.Accepted:
        found = self._inbox.digest(writer)
        self._received_at = time.monotonic()
        outcome = self._inbox.complete(writer, trailer.element_count, trailer.digest, found)
        non_finite = outcome is Outcome.NON_FINITE
        if non_finite:
            self._ps.count("non_finite", writer.client_id)
        self._ps.arrived(writer.client_id, header.round_id, header.caller.incarnation)
        return pb.Accepted(non_finite=non_finite)

    def _timed(self, header: pb.MomentumHeader, began_at: float) -> None:
        """For the round's record: the transfer, what was done to it, and what the client says of its computing."""
        who, round_id, now = header.caller.client_id, header.round_id, time.monotonic()
        upload_s = self._received_at - began_at
        self._ps.took("upload", who, round_id, began_at, upload_s, self._inbox.row_bytes)
        self._ps.took("conditioning", who, round_id, self._received_at, now - self._received_at)
        if 0.0 < header.compute_s < MOST_COMPUTE_S:
            self._ps.took("training", who, round_id, began_at - header.compute_s, header.compute_s)

    async def _compare(self, frame: Frame[Any], earlier: bytes, caller: pb.Caller) -> pb.Accepted:
        """A second momentum for the same round is hashed, never written: the same is acknowledged, another refused.

        A client that crashed and came back without its state sends another one in good faith.
        """
        digest, received = Digest(), 0
        while True:
            received += len(frame.payload)
            if received > self._inbox.row_bytes:
                raise Refused(pb.TOO_LARGE, f"more than the model's {self._inbox.row_bytes} bytes")
            digest.update(frame.payload)
            if frame.trailer is not None:
                break
            frame = await self._next()
        if digest.digest() != earlier:
            raise Refused(
                pb.EQUIVOCATION,
                "another momentum for this round arrived before; that one counts",
                excused=not self._ps.is_the_one_that_answered(caller),
            )
        return pb.Accepted(duplicate=True)

    async def _next(self) -> Frame[pb.MomentumHeader]:
        """The next frame; a stream that ends here was broken off (gRPC shows a lost peer as a clean end).

        Each has to bring the momentum forward, or a peer could keep a stream busy without end.
        """
        frame = await anext(self._frames, None)
        if frame is None:
            raise Refused(pb.TRUNCATED, "the stream ended before the final message")
        frame = intact(frame)
        if frame.header is not None or not (len(frame.payload) or frame.trailer is not None):
            raise Refused(pb.MALFORMED, "after its first message a momentum has payload or its trailer, and no header")
        return frame

    def _as_refusal(self, problem: RowError, header: pb.MomentumHeader) -> Refused:
        if problem.reason in _REFUSALS:
            return Refused(_REFUSALS[problem.reason], str(problem))
        try:
            self._ps.members.check(header.caller, self._peer)  # fenced out by a newer incarnation, or by the run's end?
        except Refused as refused:
            return refused
        return _late(header.round_id)


def _late(round_id: int) -> Refused:
    return Refused(pb.LATE, f"round {round_id} closed before this momentum was complete", next_round=round_id + 1)

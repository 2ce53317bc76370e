"""gRPC in, gRPC out: translates calls into the coordinator's events. No maths, no decisions.

A handler ends in one of three ways: with a reply, with a typed refusal (counted), or because the peer is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from grpc.aio import ServicerContext

from common.rpc.frames import Malformed, encode_frame
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.broadcast import Broadcast
from ps.coordinator import Coordinator
from ps.identity import Peer
from ps.membership import Attendance
from ps.reception import MomentumFrame, Reception
from ps.streams import Stream, Streams, intact
from ps.strikes import BREACHES

__all__ = ["ParameterServerService"]

log = logging.getLogger("byzuldp.ps.service")

Context = ServicerContext[Any, Any]
M = TypeVar("M")

Requests = AsyncIterator[M | Malformed]


UNPROVEN = frozenset(
    (
        *(pb.PROTOCOL_VERSION, pb.WRONG_RUN, pb.UNKNOWN_CLIENT, pb.BAD_TOKEN, pb.WRONG_CERTIFICATE),
        *(pb.NOT_A_MEMBER, pb.SUPERSEDED),
    )
)
"""Refusals of somebody who has not shown to be the identity that was named."""


class ParameterServerService:
    """The RPCs of ``proto/common/rpc/v1/parameter_server.proto``."""

    def __init__(self, coordinator: Coordinator, public_configuration: str, streams: Streams) -> None:
        self._ps, self._members, self._streams = coordinator, coordinator.members, streams
        self._peer = self._members.gate.peer
        self._public_configuration = public_configuration
        self._network = coordinator.experiment.network
        self._beat_s = self._network.liveness_s / 3
        self._transfer_s = self._network.deadline_of_round(
            coordinator.inbox.row_bytes, coordinator.experiment.federation.clients
        )

    async def Join(self, requests: Requests[pb.JoinRequest], context: Context) -> pb.JoinReply:  # noqa: N802
        reply = pb.JoinReply(public_configuration=self._public_configuration)
        request: pb.JoinRequest | None = None
        async with self._streams.opened(context) as stream:
            try:
                request = await stream.first(requests)
                reply.joined.CopyFrom(
                    pb.Joined(
                        incarnation=self._ps.join(request, self._peer(context)),
                        run_id=self._ps.store.run_id,
                        next_round=self._ps.rounds.round_id,
                        heartbeat_s=self._network.heartbeat_s,
                        liveness_s=self._network.liveness_s,
                        chunk_bytes=self._network.chunk_bytes,
                        noise_multiplier=self._ps.maker.mechanism.noise_multiplier,
                        rounds=self._ps.experiment.training.rounds,
                    )
                )
                with suppress(Refused):  # as welcome as before; it counts as a stranger's for the moment it takes
                    stream.claim(request.client_id)
            except Refused as refused:
                self._refused(refused, None if request is None else request.client_id, stream, self._peer(context))
                reply.refusal.CopyFrom(refused.as_message())
                if refused.kind == pb.RUN_IS_OVER and self._members.over is not None:
                    reply.run_finished.CopyFrom(self._members.over)
        return reply

    async def Attend(self, requests: Requests[pb.AttendRequest], context: Context) -> None:  # noqa: N802
        attendance: Attendance | None = None
        peer = self._peer(context)
        async with self._streams.opened(context) as stream:
            try:
                first = await stream.first(requests)
                if first.WhichOneof("message") != "attending":
                    raise Refused(pb.MALFORMED, "the first message of Attend names the identities attending")
                attendance = self._members.attend(first.attending.callers, peer)
                stream.claim(first.attending.callers[0].client_id)
                await self._tell(attendance, requests, context, stream)
            except Refused as refused:
                self._refused(refused, peer.proven_id, stream, peer)
                await context.write(pb.AttendEvent(refusal=refused.as_message()))
            except TimeoutError:
                log.info("a stream of Attend was silent for too long, or had been told its last event")
            finally:
                if attendance is not None:
                    self._members.detach(attendance)

    async def _tell(
        self, attendance: Attendance, requests: Requests[pb.AttendRequest], context: Context, stream: Stream
    ) -> None:
        """Listen to the process and tell it events, until it ends, falls silent, or has been told the last one.

        After the run's end the client hangs up first, or that event might be lost with the stream; if it does not,
        there is a TimeoutError in the end. After a refusal there is one at once. A process that reads nothing keeps
        nobody from noticing that it is gone.
        """
        await _begin(context)
        async with asyncio.timeout(None) as patience:
            telling = asyncio.create_task(self._write_events(attendance, context, patience))
            try:
                await self._listen(attendance, requests)
            except Refused as refused:
                # Told by whoever writes the events: one of them may be on its way, and gRPC takes one write at a time.
                attendance.tell(pb.AttendEvent(refusal=refused.as_message()))
                self._refused(refused, attendance.peer.proven_id, stream, attendance.peer)
                await asyncio.wait({telling}, timeout=self._network.leave_deadline_s)
            finally:
                telling.cancel()

    async def _write_events(self, attendance: Attendance, context: Context, patience: asyncio.Timeout) -> None:
        """Events as they come; a process that gets no other answer either is told now and then that we are there.

        (Keepalive would be answered by whatever proxy stands between.)
        """
        timeouts, beat_s = self._streams.timeouts, self._beat_s
        event: pb.AttendEvent | None = None
        while event is None or event.WhichOneof("event") not in ("run_finished", "refusal"):
            try:
                with timeouts.within(beat_s, more=lambda: beat_s - self._members.answered_s_ago(attendance)):
                    event = await attendance.events.get()
            except TimeoutError:
                event = pb.AttendEvent(heartbeat=pb.Heartbeat())
            try:
                await context.write(event)
            except grpc.aio.InternalError:  # the peer is gone
                return
        lingers_s = self._network.leave_deadline_s if event.HasField("run_finished") else 0.0
        patience.reschedule(asyncio.get_running_loop().time() + lingers_s)

    async def _listen(self, attendance: Attendance, requests: Requests[pb.AttendRequest]) -> None:
        """Heartbeats and errors, until the stream ends or its identities fall silent, which may send momenta instead.

        Refused when it breaks the protocol.
        """
        timeouts, liveness_s = self._streams.timeouts, self._network.liveness_s
        while True:
            try:
                with timeouts.within(liveness_s, more=lambda: liveness_s - self._members.heard_s_ago(attendance)):
                    request = await anext(requests, None)
            except TimeoutError:
                return
            if request is None:
                return
            whole = intact(request)
            self._members.heartbeat(attendance)
            if whole.HasField("error"):
                self._ps.client_error(attendance, whole.error)

    async def PullModel(self, requests: Requests[pb.PullModelRequest], context: Context) -> None:  # noqa: N802
        request: pb.PullModelRequest | None = None
        async with self._streams.opened(context) as stream:
            try:
                request = await stream.first(requests)
                self._members.check(request.caller, self._peer(context), even_when_over=True)
                stream.claim(request.caller.client_id)
                answer = await self._ps.model(request.round_id, request.wait_s)
                if isinstance(answer, Broadcast):
                    await self._send(answer, request.caller.client_id, context, begun=False)
                    if request.follow:
                        answer = await self._follow(request, answer.round_id, context)
            except Refused as refused:
                self._refused(refused, _caller(request), stream, self._peer(context))
                await context.write(encode_frame(header=pb.ModelHeader(refusal=refused.as_message())))
                return
            if isinstance(answer, pb.NotYet):
                await context.write(encode_frame(header=pb.ModelHeader(not_yet=answer)))
            elif isinstance(answer, pb.RunFinished):
                await context.write(encode_frame(header=pb.ModelHeader(run_finished=answer)))

    async def _follow(self, request: pb.PullModelRequest, sent: int, context: Context) -> pb.NotYet | pb.RunFinished:
        """Send every model after that of round ``sent``, until the run has ended: calls are what a round costs most.

        Like any pull it is not held for longer than the caller wishes: then it ends with NotYet.

        Raises
        ------
        Refused
            The caller may not take part any more.
        """
        while True:
            answer = await self._ps.model(sent + 1, request.wait_s)
            self._members.check(request.caller, self._peer(context), even_when_over=True)
            if not isinstance(answer, Broadcast):
                return answer
            await self._send(answer, request.caller.client_id, context, begun=True)
            sent = answer.round_id

    async def _send(self, model: Broadcast, client_id: int, context: Context, *, begun: bool) -> None:
        """Send a model; who is too slow for it is told so, once it reads again.

        The first frame of a call has no deadline: gRPC sends the initial metadata with it, and a call that is ended in
        the middle of that never ends (see :func:`_begin`). It is one frame, which counts as any other that is stuck.
        """
        sent = num_bytes = 0
        began_at = time.monotonic()
        left_s = self._transfer_s
        with suppress(TimeoutError):
            while left_s > 0 and (frame := model.frame(sent)) is not None:
                if begun or sent:
                    with self._streams.timeouts.within(left_s):
                        await context.write(frame)
                else:
                    await context.write(frame)
                sent += 1
                num_bytes += len(frame)
                self._ps.count_bytes(down=len(frame))
                left_s = began_at + self._transfer_s - time.monotonic()
        self._ps.took("download", client_id, model.round_id, began_at, time.monotonic() - began_at, num_bytes)
        if sent < model.count:
            await context.abort(
                grpc.StatusCode.ABORTED,
                f"{sent} of {model.count} messages of round {model.round_id} were taken in time; pull again",
            )
        self._members.answered(client_id)

    async def PushMomentum(  # noqa: N802
        self, frames: AsyncIterator[MomentumFrame], context: Context
    ) -> pb.PushReply:
        async with self._streams.opened(context) as stream:
            reception = Reception(self._ps, frames, self._peer(context), stream)
            try:
                with self._streams.timeouts.within(self._transfer_s):
                    accepted = await reception.receive()
                self._members.answered(reception.client_id)
                return pb.PushReply(accepted=accepted)
            except Refused as refused:
                reason = refused
            except TimeoutError:
                reason = Refused(pb.TRUNCATED, f"the momentum was not complete after {self._transfer_s:.0f} s")
            except asyncio.CancelledError:  # the peer is gone
                self._ps.count(pb.TRUNCATED, reception.client_id)
                raise
            self._refused(reason, reception.client_id, stream, self._peer(context))
            return pb.PushReply(refusal=reason.as_message())

    async def Leave(self, requests: Requests[pb.LeaveRequest], context: Context) -> pb.LeaveReply:  # noqa: N802
        request: pb.LeaveRequest | None = None
        async with self._streams.opened(context) as stream:
            try:
                request = await stream.first(requests)
                self._members.leave(request.caller, self._peer(context))
            except Refused as refused:
                self._refused(refused, _caller(request), stream, self._peer(context))
                return pb.LeaveReply(refusal=refused.as_message())
        return pb.LeaveReply()

    def _refused(self, refused: Refused, client_id: int | None, stream: Stream, peer: Peer) -> None:
        """Count a refusal under the identity it came from, and hold it against whoever the stream has proved to be.

        An identity that is only claimed is nobody's: an impostor's deeds must not stand against an honest name.
        """
        proven = refused.kind not in UNPROVEN or peer.proven_id == client_id
        self._ps.count(refused.kind, client_id if proven else peer.proven_id)
        if stream.client_id is not None and refused.kind in BREACHES and not refused.excused:
            self._ps.breach(stream.client_id, refused.kind)


def _caller(request: pb.PullModelRequest | pb.LeaveRequest | None) -> int | None:
    """Whom a request names."""
    return None if request is None else request.caller.client_id


async def _begin(context: Context) -> None:
    """Begin the answer of a stream that may be ended while a message of it is stuck.

    gRPC would send the initial metadata with the first message, and once more with the status that ends the stream,
    because it does not know that they are on their way: that is an error, and the stream would never end.
    """
    await context.send_initial_metadata(())

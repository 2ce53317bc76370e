"""gRPC in, gRPC out: translates calls into the coordinator's events. No maths, no decisions.

A handler ends in one of three ways: with a reply, with a typed refusal (counted), or because the peer is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from common.rpc.frames import Malformed, encode_frame
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.coordinator import Coordinator
from ps.membership import Attendance
from ps.reception import MomentumFrame, Reception

__all__ = ["ParameterServerService"]

log = logging.getLogger("byzuldp.ps.service")

M = TypeVar("M")

PULLS_HELD = 4
Context = ServicerContext[Any, Any]
Attending = AsyncIterator[pb.AttendRequest | Malformed]


class ParameterServerService:
    """The RPCs of ``proto/common/rpc/v1/parameter_server.proto``."""

    def __init__(self, coordinator: Coordinator, public_configuration: str) -> None:
        self._ps, self._members = coordinator, coordinator.members
        self._public_configuration = public_configuration
        self._network = coordinator.experiment.network
        self._pulls: Counter[int] = Counter()
        self._transfer_s = self._network.deadline_of_round(
            coordinator.inbox.row_bytes, coordinator.experiment.federation.clients
        )

    async def Join(self, request: pb.JoinRequest | Malformed, _context: Context) -> pb.JoinReply:  # noqa: N802
        reply = pb.JoinReply(public_configuration=self._public_configuration)
        try:
            whole = _intact(request)
            reply.joined.CopyFrom(
                pb.Joined(
                    incarnation=self._ps.join(whole),
                    run_id=self._ps.store.run_id,
                    next_round=self._ps.rounds.round_id,
                    heartbeat_s=self._network.heartbeat_s,
                    chunk_bytes=self._network.chunk_bytes,
                    noise_multiplier=self._ps.maker.mechanism.noise_multiplier,
                    rounds=self._ps.experiment.training.rounds,
                )
            )
        except Refused as refused:
            self._count(refused, getattr(request, "client_id", None))
            reply.refusal.CopyFrom(refused.as_message())
            if refused.kind == pb.RUN_IS_OVER and self._members.over is not None:
                reply.run_finished.CopyFrom(self._members.over)
        return reply

    async def Attend(self, requests: Attending, context: Context) -> None:  # noqa: N802
        attendance: Attendance | None = None
        try:
            async with asyncio.timeout(self._network.first_message_s):
                first = _intact(await anext(requests, Malformed("the stream ended before it began")))
            if first.WhichOneof("message") != "attending":
                raise Refused(pb.MALFORMED, "the first message of Attend names the identities attending")
            attendance = self._members.attend(first.attending.callers)
            await self._tell(attendance, requests, context)
        except Refused as refused:
            self._count(refused, None)
            await context.write(pb.AttendEvent(refusal=refused.as_message()))
        except TimeoutError:
            log.info("a stream of Attend was silent for too long")
        finally:
            if attendance is not None:
                self._members.detach(attendance)

    async def _tell(self, attendance: Attendance, requests: Attending, context: Context) -> None:
        """Write events while the process is heard from; the run's end is the last."""
        listening = asyncio.create_task(self._listen(attendance, requests))
        telling: asyncio.Task[pb.AttendEvent] | None = None
        try:
            while True:
                telling = asyncio.create_task(attendance.events.get())
                await asyncio.wait({telling, listening}, return_when=asyncio.FIRST_COMPLETED)
                if not telling.done():
                    return listening.result()
                await context.write(telling.result())
                if telling.result().HasField("run_finished"):
                    break
            async with asyncio.timeout(self._network.leave_deadline_s):
                await listening  # the client hangs up first, or the last event might be lost with the stream
        finally:
            listening.cancel()
            if telling is not None:
                telling.cancel()

    async def _listen(self, attendance: Attendance, requests: Attending) -> None:
        """Heartbeats and errors, until the stream ends or falls silent; refused when it breaks the protocol."""
        while True:
            try:
                async with asyncio.timeout(self._network.liveness_s):
                    request = await anext(requests, None)
            except TimeoutError:
                return
            if request is None:
                return
            whole = _intact(request)
            self._members.heartbeat(attendance)
            if whole.HasField("error"):
                self._ps.client_error(attendance, whole.error)

    async def PullModel(self, request: pb.PullModelRequest | Malformed, context: Context) -> None:  # noqa: N802
        try:
            whole = _intact(request)
            self._members.check(whole.caller, even_when_over=True)
            with self._one_pull(whole.caller.client_id):
                answer = await self._ps.model(whole.round_id, whole.wait_s)
        except Refused as refused:
            self._count(refused, _caller_id(request))
            await context.write(encode_frame(header=pb.ModelHeader(refusal=refused.as_message())))
            return
        if isinstance(answer, pb.NotYet):
            await context.write(encode_frame(header=pb.ModelHeader(not_yet=answer)))
        elif isinstance(answer, pb.RunFinished):
            await context.write(encode_frame(header=pb.ModelHeader(run_finished=answer)))
        else:
            async with asyncio.timeout(self._transfer_s):
                for frame in answer:
                    await context.write(frame)
                    self._ps.count_bytes(down=len(frame))

    @contextmanager
    def _one_pull(self, client_id: int) -> Iterator[None]:
        """An identity may hold a pull, and begin another when it gave up the first; not hundreds."""
        if self._pulls[client_id] >= PULLS_HELD:
            raise Refused(pb.TOO_MANY_CALLS, f"client {client_id} holds {PULLS_HELD} pulls already")
        self._pulls[client_id] += 1
        try:
            yield
        finally:
            self._pulls[client_id] -= 1

    async def PushMomentum(  # noqa: N802
        self, frames: AsyncIterator[MomentumFrame], _context: Context
    ) -> pb.PushReply:
        reception = Reception(self._ps, frames)
        try:
            async with asyncio.timeout(self._transfer_s):
                return pb.PushReply(accepted=await reception.receive())
        except Refused as refused:
            reason = refused
        except TimeoutError:
            reason = Refused(pb.TRUNCATED, f"the momentum was not complete after {self._transfer_s:.0f} s")
        except asyncio.CancelledError:  # the peer is gone
            self._ps.count(pb.TRUNCATED, reception.client_id)
            raise
        self._count(reason, reception.client_id)
        return pb.PushReply(refusal=reason.as_message())

    async def Leave(self, request: pb.LeaveRequest | Malformed, _context: Context) -> pb.LeaveReply:  # noqa: N802
        try:
            self._members.leave(_intact(request).caller)
        except Refused as refused:
            self._count(refused, _caller_id(request))
            return pb.LeaveReply(refusal=refused.as_message())
        return pb.LeaveReply()

    def _count(self, refused: Refused, client_id: int | None) -> None:
        self._ps.count(refused.kind, client_id)


def _intact(request: M | Malformed) -> M:
    if isinstance(request, Malformed):
        raise Refused(pb.MALFORMED, request.reason)
    return request


def _caller_id(request: object) -> int | None:
    return getattr(getattr(request, "caller", None), "client_id", None)

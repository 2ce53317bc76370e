"""The client's side of the protocol: join, attend, and round after round pull the model and push momenta.

One exchange serves all identities a process holds: one pull per round (the model is the same for all), but a join, a
momentum and a push for each, and an Attend stream for each channel (with TLS every identity has its own, see
:mod:`client.channels`). What is pushed comes from a ``produce`` function, so the honest client and the adversary speak
the same protocol through the same code. An identity that is taken over or refused leaves the others alone: one stolen
credential must not silence a whole process.

The parameter server may vanish and come back: every call has a deadline, a failure is answered by jittered backoff and
a new join, and after ``network.server_gone_s`` without success the client gives up with a status. What was seen of a
run is told to a memory, which may outlive the process: see :mod:`client.memory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from client.channels import Channels, Line
from client.memory import NEVER, Forgetful, Memory, Outcome, RunTerms, Seen
from client.memory import Vector as Momentum
from client.push import Deliver, Push, deliver
from common.config import Experiment
from common.errors import (
    ConfigError,
    JoinRefused,
    NetworkProblem,
    PrivacyError,
    ServerRolledBack,
    ServerUnreachable,
    StoreProblem,
    Superseded,
)
from common.rpc import PROTOCOL_VERSION
from common.rpc.frames import Malformed
from common.rpc.methods import ParameterServerStub
from common.rpc.refusals import REJOIN, kind_name
from common.rpc.tensors import Incomplete, receive_tensor
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Exchange", "Momentum", "Outcome", "PublishedModel"]

log = logging.getLogger("byzuldp.client")

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 3.0
LEAVE_S = 1.0  # for a client that will not, or may not, wait any longer
IN_ORDER_S = 1.0  # for the Attend stream to tell in order what a pull told already

REFUSED = frozenset((pb.RefusalKind.UNKNOWN_CLIENT, pb.RefusalKind.WRONG_CERTIFICATE, pb.RefusalKind.REVOKED))
"""Refusals that concern one identity, for good."""


@dataclass(frozen=True)
class PublishedModel:
    """θ_t as the parameter server published it."""

    round_id: int
    theta: Momentum
    ledger_head: bytes


class _Rejoin(Exception):
    """The parameter server does not know this incarnation (any more): join again."""


class _Over(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


Produce = Callable[[PublishedModel], AsyncIterator[tuple[int, Momentum]]]


class Exchange:
    """The protocol loop of one process.

    Parameters
    ----------
    experiment
        This process's own copy; a public value that differs from the server's is refused by its key.
    address
        ``host:port`` of the parameter server.
    tokens
        Join token of each identity held; with TLS it may be empty.
    schema_hash
        Of the model this process would train.
    produce
        Given θ_t, yields each identity's momentum as soon as it is there.
    memory
        What is remembered of earlier lives; default nothing.
    deliver
        How a momentum is sent.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        address: str,
        tokens: Mapping[int, str],
        schema_hash: bytes,
        num_parameters: int,
        produce: Produce,
        memory: Memory | None = None,
        deliver: Deliver = deliver,
    ) -> None:
        self._experiment, self._network = experiment, experiment.network
        self._address, self._tokens = address, dict(tokens)
        self._schema_hash, self._num_parameters, self._produce = schema_hash, num_parameters, produce
        self._deliver = deliver
        self._callers: dict[int, pb.Caller] = {}
        self._channels = Channels(address, experiment.network)
        self._stubs: dict[int, ParameterServerStub] = {}
        self._errors: dict[int, asyncio.Queue[pb.ClientError]] = {}
        self._silent_since: dict[int, float] = {}  # identities that get no answer while others do
        self._heartbeat_s, self._chunk_bytes = self._network.heartbeat_s, self._network.chunk_bytes
        self._silence_s: float | None = None  # after which the server is taken for gone
        self._memory: Memory = Forgetful() if memory is None else memory
        self._seen = NEVER
        self._run_id = ""

    @property
    def callers(self) -> Mapping[int, pb.Caller]:
        """The identities that are members now, with their incarnations."""
        return self._callers

    async def run(self) -> Outcome:
        """Take part until the run ends.

        Raises
        ------
        ServerUnreachable
            No answer for ``network.server_gone_s``.
        JoinRefused, ConfigError, Superseded, ServerRolledBack
            As their names say.
        PrivacyError, StoreProblem
            The memory will not have it; this client has left.
        """
        try:
            return await self._run()
        finally:
            await self._channels.close()

    async def _run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        self._alive_at, backoff, reason = loop.time(), FIRST_BACKOFF_S, ""
        self._coming_back = False
        while True:
            alive_before = self._alive_at
            try:
                return await self._take_part()
            except _Rejoin as why:
                reason = str(why)
                log.info("joining again: %s", reason)
            except grpc.aio.AioRpcError as problem:
                if not reason or problem.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # which says the least
                    reason = f"{problem.code().name}: {problem.details()}"
                log.info("the parameter server does not answer: %s: %s", problem.code().name, problem.details())
            except (PrivacyError, ServerRolledBack, StoreProblem, asyncio.CancelledError):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._leave_all()
                raise
            if self._alive_at > alive_before:  # it was there until now, however long ago it last said something
                backoff, self._alive_at = FIRST_BACKOFF_S, loop.time()
            if loop.time() - self._alive_at > self._network.server_gone_s:
                raise self._unreachable(reason)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff, self._coming_back = min(2 * backoff, LAST_BACKOFF_S), True

    def _unreachable(self, reason: str) -> ServerUnreachable:
        hint = f"; `byzuldp doctor --tls {self._address}` names the cause" if self._network.tls.enabled else ""
        return ServerUnreachable(
            f"no answer from the parameter server at {self._address} for {self._network.server_gone_s:.0f} s "
            f"(network.server_gone_s): {reason}{hint}"
        )

    async def _take_part(self) -> Outcome:
        """From joining to the run's end, or to the loss of the connection."""
        tasks: list[asyncio.Task[None]] = []
        try:
            lines = await self._channels.lines(list(self._tokens), self._drop)
            next_round = await self._join_all(lines)
            attending = {asyncio.create_task(self._attend(line)) for line in lines}
            training = asyncio.create_task(self._train(next_round))
            tasks += *attending, training
            await self._watch(attending, training)
            raise _Rejoin("nobody attends")
        except _Over as over:
            await self._leave_all()
            return over.outcome
        finally:
            await _cancel(*tasks)

    async def _watch(self, attending: set[asyncio.Task[None]], training: asyncio.Task[None]) -> None:
        """Raise what the first of them learns: that the run is over, or that the server is gone."""
        while attending:
            await asyncio.wait({*attending, training}, return_when=asyncio.FIRST_COMPLETED)
            if training.done() and isinstance(training.exception(), _Over):
                ended, _ = await asyncio.wait(attending, timeout=IN_ORDER_S, return_when=asyncio.FIRST_COMPLETED)
                in_order = [task for task in ended if isinstance(task.exception(), _Over)]
                (in_order[0] if in_order else training).result()
            for task in [task for task in attending if task.done()]:
                attending.remove(task)  # its identities have been dropped
                task.result()
            if training.done():
                training.result()

    def _drop(self, client_id: int, problem: NetworkProblem | ConfigError) -> None:
        """An identity takes part no more; the process goes on with the others.

        Raises
        ------
        NetworkProblem, ConfigError
            The problem, when there are no others.
        """
        if self._tokens.pop(client_id, None) is None:
            return
        self._callers.pop(client_id, None)
        if not self._tokens:
            raise problem
        log.error("client %d stops here: %s; %d others go on", client_id, problem, len(self._tokens))

    # ---------------------------------------------------------------- membership

    async def _join_all(self, lines: Iterable[Line]) -> int:
        """Make every identity a member, and agree on the run with the memory; returns the round to start at."""
        next_round, answered = 0, False
        terms: RunTerms | None = None
        for line in lines:
            errors: asyncio.Queue[pb.ClientError] = asyncio.Queue(maxsize=64)
            for client_id in line.ids:
                self._stubs[client_id], self._errors[client_id] = line.stub, errors
                try:
                    reply = await self._join(client_id, wait=self._coming_back and not answered)
                except grpc.aio.AioRpcError as problem:
                    if not answered:
                        raise
                    self._no_answer(client_id, problem)
                    continue
                answered, self._coming_back, self._alive_at = True, False, asyncio.get_running_loop().time()
                self._silent_since.pop(client_id, None)
                if isinstance(reply, Malformed):
                    raise JoinRefused(f"{self._address} does not speak this protocol: {reply.reason}")
                if reply.HasField("refusal"):
                    self._refused_to_join(client_id, reply)
                    continue
                joined = reply.joined
                self._run_id, self._heartbeat_s = joined.run_id, joined.heartbeat_s or self._heartbeat_s
                self._silence_s = joined.liveness_s if joined.liveness_s > 0 else None
                self._chunk_bytes = min(self._network.chunk_bytes, joined.chunk_bytes or self._network.chunk_bytes)
                self._callers[client_id] = pb.Caller(
                    run_id=joined.run_id, client_id=client_id, incarnation=joined.incarnation
                )
                next_round = max(next_round, joined.next_round)
                if terms not in (None, told := self._terms(joined)):
                    raise JoinRefused(
                        f"the parameter server told client {client_id} of {told}, and others of {terms}: one run has "
                        "one cost"
                    )
                terms = told
        if terms is not None:
            self._seen = max(self._seen, await self._memory.joined(terms), key=lambda seen: seen.round_id)
        if next_round < self._seen.round_id:
            raise self._rolled_back(next_round)
        return next_round

    async def _join(self, client_id: int, *, wait: bool) -> pb.JoinReply | Malformed:
        """Ask to join; ``wait`` for a connection that is down, so that a server which comes back is met at once."""
        before = self._callers.get(client_id)
        reply: pb.JoinReply | Malformed = await self._stubs[client_id].Join(
            pb.JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                client_id=client_id,
                token=self._tokens[client_id],
                run_id=self._run_id,
                schema_hash=self._schema_hash,
                fingerprint=self._experiment.fingerprint(),
                previous=b"" if before is None else before.incarnation,
            ),
            timeout=LAST_BACKOFF_S if wait else self._network.rpc_deadline_s,
            wait_for_ready=wait,
        )
        return reply

    def _no_answer(self, client_id: int, problem: grpc.aio.AioRpcError) -> None:
        """Others are answered, this identity is not: its certificate may not be accepted (any more)."""
        now = asyncio.get_running_loop().time()
        if now - self._silent_since.setdefault(client_id, now) <= self._network.server_gone_s:
            raise problem
        self._drop(client_id, self._unreachable(f"{problem.code().name}: {problem.details()}"))

    def _terms(self, joined: pb.Joined) -> RunTerms:
        """Never better than they are: noise that is no positive number is none, and no planned round is left out."""
        z = joined.noise_multiplier
        rounds = max(joined.rounds, self._experiment.training.rounds)
        return RunTerms(joined.run_id, z if 0.0 < z < math.inf else 0.0, rounds)

    def _refused_to_join(self, client_id: int, reply: pb.JoinReply) -> None:
        refusal = reply.refusal
        if refusal.kind == pb.RefusalKind.CONFIGURATION:
            differences = self._experiment.differences(json.loads(reply.public_configuration))
            raise ConfigError(
                "this client's experiment is not the parameter server's:\n" + "\n".join(f"  {d}" for d in differences)
            )
        if refusal.kind == pb.RefusalKind.RUN_IS_OVER:
            raise _Over(Outcome(reply.run_finished.status, reply.run_finished.message))
        problem = JoinRefused(f"client {client_id}: {kind_name(refusal.kind)}: {refusal.message}")
        if refusal.kind not in REFUSED:
            raise problem
        self._drop(client_id, problem)

    async def _attend(self, line: Line) -> None:
        """Heartbeats and errors up; evictions and the run's end down. Returns when nobody on the line is left."""
        callers = [self._callers[client_id] for client_id in line.ids if client_id in self._callers]
        if not callers:
            return
        opened: int | None = None  # the last round that this stream told of
        call = line.stub.Attend(timeout=None)  # lives as long as the run: heartbeats and keepalive bound its silence
        beats = asyncio.create_task(self._beat(call, callers, self._errors[callers[0].client_id]))
        try:
            while (event := await self._heard(call)) is not grpc.aio.EOF:
                self._alive_at = asyncio.get_running_loop().time()
                if isinstance(event, Malformed):
                    raise _Rejoin(f"an event that is none: {event.reason}")
                match event.WhichOneof("event"):
                    case "evicted":
                        self._evicted(event.evicted.client_id)
                    case "round_opened":
                        opened = event.round_opened.round_id
                    case "run_finished":
                        # Events come in order: the round told of last was open until the end, or released at the end.
                        releases: int | None = None if opened is None else opened + 1
                        raise _Over(Outcome(event.run_finished.status, event.run_finished.message, releases))
                    case "refusal":
                        self._refused(event.refusal, callers[0].client_id if len(callers) == 1 else None)
                if not any(caller.client_id in self._callers for caller in callers):
                    return
            raise _Rejoin("the Attend stream ended")
        finally:
            beats.cancel()
            call.cancel()

    async def _heard(self, call: grpc.aio.StreamStreamCall[pb.AttendRequest, pb.AttendEvent]) -> Any:
        """The next event. A server that is there says something now and then, if only that it is there."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await call.read()
        except TimeoutError:
            raise _Rejoin(f"nothing was heard from the parameter server for {self._silence_s:g} s") from None

    async def _beat(
        self,
        call: grpc.aio.StreamStreamCall[pb.AttendRequest, pb.AttendEvent],
        callers: list[pb.Caller],
        errors: asyncio.Queue[pb.ClientError],
    ) -> None:
        message = pb.AttendRequest(attending=pb.Attending(callers=callers))
        # A stream that has ended cannot be written to; whoever reads it learns why.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await call.write(message)
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        message = pb.AttendRequest(error=await errors.get())
                except TimeoutError:
                    message = pb.AttendRequest(heartbeat=pb.Heartbeat())

    async def _leave_all(self) -> None:
        async def leave(client_id: int, caller: pb.Caller) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = pb.LeaveRequest(caller=caller)
                await self._stubs[client_id].Leave(request, timeout=self._network.leave_deadline_s)

        await asyncio.gather(*(leave(client_id, caller) for client_id, caller in self._callers.items()))

    def report_error(self, client_id: int, round_id: int, problem: BaseException) -> None:
        """Tell the parameter server of a fault in one logical client; the others go on."""
        message = pb.ClientError(
            client_id=client_id, round_id=round_id, kind=type(problem).__name__, message=str(problem)[:500]
        )
        with contextlib.suppress(asyncio.QueueFull):
            self._errors[client_id].put_nowait(message)

    def _evicted(self, client_id: int) -> None:
        problem = Superseded(
            f"client {client_id} has joined from elsewhere; stopping here. If that was not you, its credential is in "
            "other hands: tell the parameter server's operator"
        )
        self._drop(client_id, problem)

    def _refused(self, refusal: pb.Refusal, client_id: int | None) -> None:
        """What a refusal after joining means for an identity; None: for one of several."""
        if refusal.kind in REJOIN:
            raise _Rejoin(refusal.message)
        if refusal.kind == pb.RefusalKind.WRONG_RUN:
            raise JoinRefused(refusal.message)
        if refusal.kind == pb.RefusalKind.SUPERSEDED or refusal.kind in REFUSED:
            kind = Superseded if refusal.kind == pb.RefusalKind.SUPERSEDED else JoinRefused
            if client_id is None:
                raise kind(refusal.message)
            self._drop(client_id, kind(f"client {client_id}: {kind_name(refusal.kind)}: {refusal.message}"))
            return
        expected = refusal.kind == pb.RefusalKind.RUN_IS_OVER  # the Attend stream says how it ended
        log.log(
            logging.INFO if expected else logging.WARNING, "refused: %s: %s", kind_name(refusal.kind), refusal.message
        )

    # ---------------------------------------------------------------- rounds

    async def _train(self, next_round: int) -> None:
        while True:
            model = await self._pull(next_round)
            pushes: list[asyncio.Task[None]] = []
            try:
                async for client_id, momentum in self._produce(model):
                    pushes.append(asyncio.create_task(self._push(client_id, model.round_id, momentum)))
                await asyncio.gather(*pushes)
            finally:
                await _cancel(*pushes)
            next_round = model.round_id + 1

    async def _pull(self, wanted: int) -> PublishedModel:
        """The model of round ``wanted`` or a later one, as soon as it is open."""
        wait_s = self._network.rpc_deadline_s / 2
        while True:
            caller = next(iter(self._callers.values()), None)
            if caller is None:
                raise _Rejoin("nobody is a member")
            call = self._stubs[caller.client_id].PullModel(
                pb.PullModelRequest(caller=caller, round_id=wanted, wait_s=wait_s),
                timeout=wait_s + self._network.deadline_of_round(4 * self._num_parameters, 1),
            )
            frames = aiter(call)
            try:
                header, theta = await receive_tensor(frames, self._num_parameters, lambda h: h.model.element_count)
                await anext(frames, None)  # to the call's end, so that its status is known
            except Incomplete as problem:
                raise _Rejoin(str(problem)) from None
            except grpc.aio.AioRpcError as problem:
                if problem.code() is not grpc.StatusCode.ABORTED:
                    raise
                log.info("too slow for the model: %s", problem.details())
                continue
            finally:
                call.cancel()
            self._alive_at = asyncio.get_running_loop().time()
            match header.WhichOneof("outcome"):
                case "model" if theta is not None:
                    return self._accept(header.model, theta)
                case "run_finished":
                    raise _Over(Outcome(header.run_finished.status, header.run_finished.message))
                case "refusal":
                    self._refused(header.refusal, caller.client_id)
                    await asyncio.sleep(FIRST_BACKOFF_S)

    def _accept(self, model: pb.Model, theta: Momentum) -> PublishedModel:
        """A model goes forward, or it is the same one again; a server that goes back has lost its ledger.

        A round may be opened twice (the server restarted before it closed); then its model and ledger head must be
        the ones seen before.
        """
        seen = Seen(model.round_id, model.ledger_head)
        changed = seen.round_id == self._seen.round_id and seen != self._seen
        if seen.round_id < self._seen.round_id or changed:
            raise self._rolled_back(seen.round_id, " with another ledger" if changed else "")
        if seen != self._seen:
            self._seen = seen
            self._memory.saw(self._run_id, seen)
        return PublishedModel(model.round_id, theta, model.ledger_head)

    def _rolled_back(self, round_id: int, how: str = "") -> ServerRolledBack:
        return ServerRolledBack(
            f"the parameter server publishes round {round_id} after round {self._seen.round_id}{how}: its state was "
            "restored from a copy, and privacy spent since then is not in its ledger"
        )

    async def _push(self, client_id: int, round_id: int, momentum: Momentum) -> None:
        caller = self._callers.get(client_id)
        if caller is None:
            return  # dropped since
        reply = await self._deliver(
            Push(
                caller=caller,
                round_id=round_id,
                momentum=momentum,
                schema_hash=self._schema_hash,
                chunk_bytes=self._chunk_bytes,
                deadline_s=self._network.deadline_of_round(4 * self._num_parameters, 1),
                stub=self._stubs[client_id],
            )
        )
        if reply is None:
            return
        self._alive_at = asyncio.get_running_loop().time()
        if isinstance(reply, Malformed):
            raise _Rejoin(f"a reply that is none: {reply.reason}")
        if reply.HasField("refusal"):
            self._refused(reply.refusal, client_id)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is still running, and wait until it has stopped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

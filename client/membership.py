"""The identities of a process at a parameter server: joining, attending, leaving, and being refused.

An identity that is taken over or refused leaves the others alone: one stolen credential must not silence a whole
process. Each has a Join of its own, and shares an Attend stream with those that speak over the same channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from client.answers import end_of, public_of, refusal_of, what_is_wrong_with
from client.channels import Channels, Line
from client.memory import Outcome, RunTerms
from client.silence import unless_silent
from common.config import Experiment
from common.errors import ConfigError, JoinRefused, NetworkProblem, ServerUnreachable, Superseded
from common.rpc import PROTOCOL_VERSION
from common.rpc.frames import Malformed
from common.rpc.methods import ParameterServerStub
from common.rpc.refusals import REJOIN, kind_name
from common.rpc.texts import shown
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Joined", "Membership", "Over", "Rejoin"]

log = logging.getLogger("byzuldp.client")

PATIENT_S = 3.0
"""How long a Join waits for a connection that is down."""
LINE_CHARACTERS, MOST_LINES = 300, 100
"""Of what is shown of two configurations that differ."""
AGAIN_S = 10.0
"""After so long, identities that were turned away for a while try once more."""

REFUSED = frozenset((pb.RefusalKind.UNKNOWN_CLIENT, pb.RefusalKind.WRONG_CERTIFICATE, pb.RefusalKind.REVOKED))
"""Refusals that concern one identity, for good."""


class Rejoin(Exception):
    """The parameter server does not know this incarnation (any more): join again."""


class Over(Exception):
    """The run has ended."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


@dataclass(frozen=True)
class Joined:
    """What the parameter server said to those who joined.

    Attributes
    ----------
    next_round
        The round to start at.
    terms
        None when nobody was let in.
    lines
        The channels that are in use.
    """

    next_round: int
    terms: RunTerms | None
    lines: tuple[Line, ...]


class Membership:
    """The identities that a process holds.

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
    """

    def __init__(self, experiment: Experiment, *, address: str, tokens: Mapping[int, str], schema_hash: bytes) -> None:
        self._experiment, self._network = experiment, experiment.network
        self._address, self._tokens, self._schema_hash = address, dict(tokens), schema_hash
        self._channels = Channels(address, experiment.network)
        self._callers: dict[int, pb.Caller] = {}
        self._stubs: dict[int, ParameterServerStub] = {}
        self._errors: dict[int, asyncio.Queue[pb.ClientError]] = {}
        self._silent_since: dict[int, float] = {}  # identities that get no answer while others do
        self._turned_away: set[int] = set()  # for a while
        self._heard_at: dict[int, float] = {}  # when each identity was last answered
        self._pushed_at: dict[int, float] = {}  # when a momentum of it was last taken
        self._heartbeat_s = self._network.heartbeat_s
        self._silence_s: float | None = None  # after which the server is taken for gone
        self.chunk_bytes = self._network.chunk_bytes
        self.run_id = ""
        self.heard_at = -math.inf
        """When the parameter server last said something, by the event loop's clock."""
        self.admitted_at = -math.inf
        """When it last let an identity in."""

    @property
    def callers(self) -> Mapping[int, pb.Caller]:
        """The identities that are members now, with their incarnations."""
        return self._callers

    def stub(self, client_id: int) -> ParameterServerStub:
        """What an identity speaks through."""
        return self._stubs[client_id]

    def heard(self, *ids: int) -> None:
        """The parameter server has said something, to these identities."""
        self.heard_at = asyncio.get_running_loop().time()
        for client_id in ids:
            self._heard_at[client_id] = self.heard_at

    def pushed(self, client_id: int) -> None:
        """The parameter server has an identity's momentum, which is as good as a heartbeat."""
        self._pushed_at[client_id] = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Close all channels."""
        await self._channels.close()

    async def join(self, *, patient: bool) -> Joined:
        """Make every identity a member.

        Parameters
        ----------
        patient
            Wait for a connection that is down, so that a server which comes back is met at once.

        Raises
        ------
        JoinRefused, ConfigError
            For good: no identity is left.
        Rejoin, Over
            See there.
        grpc.aio.AioRpcError
            No identity was answered.
        """
        lines = await self._channels.lines(list(self._tokens), self.drop)
        next_round, answered = 0, False
        terms: RunTerms | None = None
        self._turned_away.clear()
        for line in lines:
            errors: asyncio.Queue[pb.ClientError] = asyncio.Queue(maxsize=64)
            for client_id in line.ids:
                self._stubs[client_id], self._errors[client_id] = line.stub, errors
                try:
                    reply = await self._join(client_id, patient=patient and not answered)
                except grpc.aio.AioRpcError as problem:
                    if not answered:
                        raise
                    self._no_answer(client_id, problem)
                    continue
                answered = True
                self.heard()
                self._silent_since.pop(client_id, None)
                if isinstance(reply, Malformed):
                    raise JoinRefused(f"{self._address} does not speak this protocol: {reply.reason}")
                if wrong := what_is_wrong_with(reply):
                    raise JoinRefused(f"{self._address} does not speak this protocol: {wrong}")
                if reply.HasField("refusal"):
                    self._refused_to_join(client_id, reply)
                    continue
                joined, self.admitted_at = reply.joined, self.heard_at
                self.run_id, self._heartbeat_s = joined.run_id, joined.heartbeat_s or self._heartbeat_s
                self._silence_s = joined.liveness_s if joined.liveness_s > 0 else None
                self.chunk_bytes = min(self._network.chunk_bytes, joined.chunk_bytes or self._network.chunk_bytes)
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
        if not self._callers and self._turned_away:
            raise Rejoin(f"turned away for a while: {', '.join(map(str, sorted(self._turned_away)))}")
        return Joined(next_round, terms, tuple(lines))

    async def again(self) -> None:
        """Returns never, or raises when somebody who was turned away for a while may try once more.

        Raises
        ------
        Rejoin
            It is time.
        """
        await asyncio.sleep(AGAIN_S if self._turned_away else math.inf)
        raise Rejoin(f"once more for {', '.join(map(str, sorted(self._turned_away)))}")

    async def _join(self, client_id: int, *, patient: bool) -> pb.JoinReply | Malformed:
        before = self._callers.get(client_id)
        reply: pb.JoinReply | Malformed = await self._stubs[client_id].Join(
            pb.JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                client_id=client_id,
                token=self._tokens[client_id],
                run_id=self.run_id,
                schema_hash=self._schema_hash,
                fingerprint=self._experiment.fingerprint(),
                previous=b"" if before is None else before.incarnation,
            ),
            timeout=PATIENT_S if patient else self._network.rpc_deadline_s,
            wait_for_ready=patient,
        )
        return reply

    def _no_answer(self, client_id: int, problem: grpc.aio.AioRpcError) -> None:
        """Others are answered, this identity is not: its certificate may not be accepted (any more)."""
        now = asyncio.get_running_loop().time()
        if now - self._silent_since.setdefault(client_id, now) <= self._network.server_gone_s:
            raise problem
        self.drop(client_id, self.unreachable(f"{problem.code().name}: {problem.details()}"))

    def _terms(self, joined: pb.Joined) -> RunTerms:
        """Never better than they are: noise that is no positive number is none, and no planned round is left out."""
        z = joined.noise_multiplier
        rounds = max(joined.rounds, self._experiment.training.rounds)
        return RunTerms(joined.run_id, z if 0.0 < z < math.inf else 0.0, rounds)

    def _refused_to_join(self, client_id: int, reply: pb.JoinReply) -> None:
        refusal = reply.refusal
        if refusal.kind == pb.RefusalKind.CONFIGURATION:
            public = public_of(reply)
            if public is None:
                raise ConfigError(
                    "this client's experiment is not the parameter server's, which does not say in what it differs"
                )
            lines = [f"  {shown(line, LINE_CHARACTERS)}" for line in self._experiment.differences(public)[:MOST_LINES]]
            raise ConfigError("\n".join(("this client's experiment is not the parameter server's:", *lines)))
        if refusal.kind == pb.RefusalKind.RUN_IS_OVER:
            raise Over(end_of(reply.run_finished))
        if refusal.kind in REJOIN:
            log.warning("client %d: %s: %s", client_id, kind_name(refusal.kind), refusal_of(refusal))
            self._callers.pop(client_id, None)
            self._turned_away.add(client_id)
            return
        problem = JoinRefused(f"client {client_id}: {kind_name(refusal.kind)}: {refusal_of(refusal)}")
        if refusal.kind not in REFUSED:
            raise problem
        self.drop(client_id, problem)

    async def attend(self, line: Line) -> None:
        """Heartbeats and errors up; evictions and the run's end down. Returns when nobody on the line is left.

        Raises
        ------
        Rejoin, Over
            See there.
        NetworkProblem
            The process's last identity may not take part any more.
        grpc.aio.AioRpcError
            The connection failed.
        """
        callers = [self._callers[client_id] for client_id in line.ids if client_id in self._callers]
        if not callers:
            return
        call = line.stub.Attend(timeout=None)  # lives as long as the run: heartbeats and keepalive bound its silence
        beats = asyncio.create_task(self._beat(call, callers, self._errors[callers[0].client_id]))
        self.heard(*line.ids)
        try:
            while (event := await self._next_event(call, line)) is not grpc.aio.EOF:
                self.heard(line.ids[0])
                if isinstance(event, Malformed):
                    raise Rejoin(f"an event that is none: {event.reason}")
                match event.WhichOneof("event"):
                    case "evicted":
                        self._evicted(event.evicted.client_id)
                    case "run_finished":
                        raise Over(end_of(event.run_finished))
                    case "refusal":
                        self.refused(event.refusal, callers[0].client_id if len(callers) == 1 else None)
                if not any(caller.client_id in self._callers for caller in callers):
                    return
            raise Rejoin("the Attend stream ended")
        finally:
            beats.cancel()
            call.cancel()

    async def _next_event(self, call: grpc.aio.StreamStreamCall[pb.AttendRequest, pb.AttendEvent], line: Line) -> Any:
        """The next event. A server that is there answers calls, or says now and then that it is there."""
        try:
            async with unless_silent(self._silence_s, lambda: max(self._heard_at[client_id] for client_id in line.ids)):
                return await call.read()
        except TimeoutError:
            raise Rejoin(f"nothing was heard from the parameter server for {self._silence_s:g} s") from None

    async def _beat(
        self,
        call: grpc.aio.StreamStreamCall[pb.AttendRequest, pb.AttendEvent],
        callers: list[pb.Caller],
        errors: asyncio.Queue[pb.ClientError],
    ) -> None:
        """Heartbeats and errors; nothing, as long as the momenta of all who speak here say that they are alive."""
        loop, message = asyncio.get_running_loop(), pb.AttendRequest(attending=pb.Attending(callers=callers))
        # A stream that has ended cannot be written to; whoever reads it learns why.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await call.write(message)
                shown_at = loop.time()
                message = pb.AttendRequest(heartbeat=pb.Heartbeat())
                while (due := shown_at + self._heartbeat_s) > loop.time():
                    try:
                        async with asyncio.timeout_at(due):
                            message = pb.AttendRequest(error=await errors.get())
                        break
                    except TimeoutError:
                        shown_at = max(shown_at, min(self._pushed_at.get(who.client_id, -math.inf) for who in callers))

    def report_error(self, client_id: int, round_id: int, problem: BaseException) -> None:
        """Tell the parameter server of a fault in one logical client; the others go on."""
        message = pb.ClientError(
            client_id=client_id, round_id=round_id, kind=type(problem).__name__, message=str(problem)[:500]
        )
        with contextlib.suppress(asyncio.QueueFull):
            self._errors[client_id].put_nowait(message)

    async def leave(self) -> None:
        """All members go, in good order."""

        async def one(client_id: int, caller: pb.Caller) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = pb.LeaveRequest(caller=caller)
                await self._stubs[client_id].Leave(request, timeout=self._network.leave_deadline_s)

        await asyncio.gather(*(one(client_id, caller) for client_id, caller in self._callers.items()))

    def _evicted(self, client_id: int) -> None:
        problem = Superseded(
            f"client {client_id} has joined from elsewhere; stopping here. If that was not you, its credential is in "
            "other hands: tell the parameter server's operator"
        )
        self.drop(client_id, problem)

    def refused(self, refusal: pb.Refusal, client_id: int | None) -> None:
        """What a refusal after joining means for an identity; None: for one of several.

        Raises
        ------
        Rejoin
            It has to join anew.
        NetworkProblem
            There is nobody left who may take part.
        """
        if refusal.kind in REJOIN:
            raise Rejoin(refusal_of(refusal))
        if refusal.kind == pb.RefusalKind.WRONG_RUN:
            raise JoinRefused(refusal_of(refusal))
        if refusal.kind == pb.RefusalKind.SUPERSEDED or refusal.kind in REFUSED:
            kind = Superseded if refusal.kind == pb.RefusalKind.SUPERSEDED else JoinRefused
            if client_id is None:
                raise kind(refusal_of(refusal))
            self.drop(client_id, kind(f"client {client_id}: {kind_name(refusal.kind)}: {refusal_of(refusal)}"))
            return
        expected = refusal.kind == pb.RefusalKind.RUN_IS_OVER  # the Attend stream says how it ended
        log.log(
            logging.INFO if expected else logging.WARNING,
            "refused: %s: %s",
            kind_name(refusal.kind),
            refusal_of(refusal),
        )

    def drop(self, client_id: int, problem: NetworkProblem | ConfigError) -> None:
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

    def unreachable(self, reason: str) -> ServerUnreachable:
        """The error of a client that has waited for long enough."""
        hint = f"; `byzuldp doctor --tls {self._address}` names the cause" if self._network.tls.enabled else ""
        return ServerUnreachable(
            f"no answer from the parameter server at {self._address} for {self._network.server_gone_s:.0f} s "
            f"(network.server_gone_s): {shown(reason, LINE_CHARACTERS)}{hint}"
        )

"""The client's side of the protocol: join, attend, and round after round pull the model and push momenta.

One exchange serves all identities a process holds: one call that brings the models (they are the same for all), but a
join, a momentum and a push for each, and an Attend stream for each channel (with TLS every identity has its own, see
:mod:`client.channels`). What is pushed comes from a ``produce`` function, so the honest client and the adversary speak
the same protocol through the same code. Who is a member, and what refusals mean, is :mod:`client.membership`'s.

The parameter server may vanish and come back: every call has a deadline, a failure is answered by jittered backoff and
a new join, and after ``network.server_gone_s`` without success the client gives up with a status. What was seen of a
run is told to a memory, which may outlive the process: see :mod:`client.memory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc

from client.answers import LAST_ROUND, end_of
from client.membership import Joined, Membership, Over, Rejoin
from client.memory import NEVER, Forgetful, Memory, Outcome, Seen
from client.memory import Vector as Momentum
from client.push import Deliver, Push, deliver
from common.config import Experiment
from common.errors import PrivacyError, ServerRolledBack, StoreProblem
from common.rpc.frames import Malformed
from common.rpc.tensors import Ended, Incomplete, receive_tensor
from common.rpc.texts import shown
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Exchange", "Momentum", "Outcome", "PublishedModel"]

log = logging.getLogger("byzuldp.client")

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 3.0
TOO_LATE = frozenset((pb.RefusalKind.STALE_ROUND, pb.RefusalKind.LATE))
LEAVE_S = 1.0  # for a client that will not, or may not, wait any longer


@dataclass(frozen=True)
class PublishedModel:
    """θ_t as the parameter server published it."""

    round_id: int
    theta: Momentum
    ledger_head: bytes


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
        self._network = experiment.network
        self._members = Membership(experiment, address=address, tokens=tokens, schema_hash=schema_hash)
        self._schema_hash, self._num_parameters = schema_hash, num_parameters
        self._produce, self._deliver = produce, deliver
        self._memory: Memory = Forgetful() if memory is None else memory
        self._seen = NEVER
        self._behind = False  # a momentum came too late

    @property
    def callers(self) -> Mapping[int, pb.Caller]:
        """The identities that are members now, with their incarnations."""
        return self._members.callers

    def report_error(self, client_id: int, round_id: int, problem: BaseException) -> None:
        """Tell the parameter server of a fault in one logical client; the others go on."""
        self._members.report_error(client_id, round_id, problem)

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
            await self._members.close()

    async def _run(self) -> Outcome:
        loop, members = asyncio.get_running_loop(), self._members
        alive_at, backoff, reason, coming_back = loop.time(), FIRST_BACKOFF_S, "", False
        while True:
            began_at = loop.time()
            try:
                return await self._take_part(patient=coming_back)
            except Rejoin as why:
                reason = str(why)
                log.info("joining again: %s", shown(reason))
            except grpc.aio.AioRpcError as problem:
                if not reason or problem.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # which says the least
                    reason = f"{problem.code().name}: {problem.details()}"
                log.info(
                    "the parameter server does not answer: %s: %s", problem.code().name, shown(str(problem.details()))
                )
            except (PrivacyError, ServerRolledBack, StoreProblem, asyncio.CancelledError):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await members.leave()
                raise
            if members.heard_at >= began_at:  # it was there until now, however long ago it last said something
                alive_at = loop.time()
            if members.admitted_at >= began_at:
                backoff = FIRST_BACKOFF_S
            if loop.time() - alive_at > self._network.server_gone_s:
                raise members.unreachable(reason)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff, coming_back = min(2 * backoff, LAST_BACKOFF_S), True

    async def _take_part(self, *, patient: bool) -> Outcome:
        """From joining to the run's end, or to the loss of the connection."""
        tasks: list[asyncio.Task[None]] = []
        members = self._members
        try:
            joined = await members.join(patient=patient)
            next_round = await self._agreed(joined)
            attending = {asyncio.create_task(members.attend(line)) for line in joined.lines}
            training = asyncio.create_task(self._train(next_round))
            again = asyncio.create_task(members.again())
            tasks += *attending, training, again
            await self._watch(attending, training, again)
            raise Rejoin("nobody attends")
        except Over as over:
            await members.leave()
            return self._believed(over.outcome)
        finally:
            await _cancel(*tasks)

    async def _agreed(self, joined: Joined) -> int:
        """Agree on the run with the memory; returns the round to start at."""
        if joined.terms is not None:
            self._seen = max(self._seen, await self._memory.joined(joined.terms), key=lambda seen: seen.round_id)
        if joined.next_round < self._seen.round_id:
            raise self._rolled_back(joined.next_round)
        return joined.next_round

    async def _watch(
        self, attending: set[asyncio.Task[None]], training: asyncio.Task[None], again: asyncio.Task[None]
    ) -> None:
        """Raise what the first of them learns: that the run is over, or that the server is gone."""
        while attending:
            await asyncio.wait({*attending, training, again}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in attending if task.done()]:
                attending.remove(task)  # its identities have been dropped
                task.result()
            for task in (training, again):
                if task.done():
                    task.result()

    def _believed(self, outcome: Outcome) -> Outcome:
        """Of releases there were no fewer than this process has seen, whatever it is told."""
        if outcome.releases is None:
            return outcome
        return replace(outcome, releases=max(outcome.releases, self._seen.round_id))

    # ---------------------------------------------------------------- rounds

    async def _train(self, next_round: int) -> None:
        while True:
            async with aclosing(self._models(next_round)) as models:
                async for model in models:
                    self._behind = False
                    await self._answer(model)
                    next_round = model.round_id + 1
                    if self._behind:
                        break  # models of more rounds that are over may be on their way: another call skips them

    async def _answer(self, model: PublishedModel) -> None:
        """Push what each identity makes of a model, as soon as it is there."""
        loop, pushes = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        try:
            began_at = loop.time()
            async for client_id, momentum in self._produce(model):
                compute_s = loop.time() - began_at
                pushes.append(asyncio.create_task(self._push(client_id, model.round_id, momentum, compute_s)))
                began_at = loop.time()
            await asyncio.gather(*pushes)
        finally:
            await _cancel(*pushes)

    async def _models(self, wanted: int) -> AsyncGenerator[PublishedModel, None]:
        """The models of round ``wanted`` and those after it, each as soon as its round is open.

        They come over one call for as long as it lasts; it is time for another when there are no more.
        """
        asked_at = asyncio.get_running_loop().time()
        caller = next(iter(self.callers.values()), None)
        if caller is None:
            raise Rejoin("nobody is a member")
        wait_s = self._network.rpc_deadline_s / 2
        transfer_s = self._network.deadline_of_round(4 * self._num_parameters, 1)
        call = self._members.stub(caller.client_id).PullModel(
            pb.PullModelRequest(caller=caller, round_id=wanted, wait_s=wait_s, follow=True),
            timeout=None,  # it may last as long as the run; each message of it has a deadline
        )
        frames = _Prompt(aiter(call), wait_s=wait_s + transfer_s, transfer_s=transfer_s)
        try:
            while self.callers.get(caller.client_id) is caller:
                frames.between_models()
                header, theta = await receive_tensor(frames, self._num_parameters, lambda h: h.model.element_count)
                self._members.heard(caller.client_id)
                match header.WhichOneof("outcome"):
                    case "model" if theta is not None:
                        model = self._accept(header.model, theta, wanted)
                        wanted = model.round_id + 1
                        yield model
                    case "run_finished":
                        raise Over(end_of(header.run_finished))
                    case "refusal":
                        self._members.refused(header.refusal, caller.client_id)
                        break
                    case "not_yet":
                        break
                    case _:
                        raise Rejoin("a model without elements, or an answer without an outcome")
        except Ended:
            log.info("the call that brings the models has ended")
        except (Incomplete, TimeoutError) as problem:
            raise Rejoin(str(problem) or "a model did not come to its end in time") from None
        except grpc.aio.AioRpcError as problem:
            if problem.code() is not grpc.StatusCode.ABORTED:
                raise
            log.info("too slow for the model: %s", shown(str(problem.details())))
        finally:
            call.cancel()
        # At once, if the server will not wait: then it is for us to do.
        await asyncio.sleep(max(0.0, FIRST_BACKOFF_S - (asyncio.get_running_loop().time() - asked_at)))

    def _accept(self, model: pb.Model, theta: Momentum, wanted: int) -> PublishedModel:
        """A model goes forward, or it is the same one again; a server that goes back has lost its ledger.

        A round may be opened twice (the server restarted before it closed); then its model and ledger head must be
        the ones seen before.
        """
        if model.round_id > LAST_ROUND:
            raise Rejoin(f"the model of round {model.round_id}, of which there can be {LAST_ROUND}")
        seen = Seen(model.round_id, model.ledger_head)
        changed = seen.round_id == self._seen.round_id and seen != self._seen
        if seen.round_id < self._seen.round_id or changed:
            raise self._rolled_back(seen.round_id, " with another ledger" if changed else "")
        if seen.round_id < wanted:
            raise Rejoin(f"the model of round {seen.round_id} again, where {wanted} was asked for")
        if seen != self._seen:
            self._seen = seen
            self._memory.saw(self._members.run_id, seen)
        return PublishedModel(model.round_id, theta, model.ledger_head)

    def _rolled_back(self, round_id: int, how: str = "") -> ServerRolledBack:
        return ServerRolledBack(
            f"the parameter server publishes round {round_id} after round {self._seen.round_id}{how}: its state was "
            "restored from a copy, and privacy spent since then is not in its ledger"
        )

    async def _push(self, client_id: int, round_id: int, momentum: Momentum, compute_s: float) -> None:
        caller = self.callers.get(client_id)
        if caller is None:
            return  # dropped since
        reply = await self._deliver(
            Push(
                caller=caller,
                round_id=round_id,
                momentum=momentum,
                schema_hash=self._schema_hash,
                chunk_bytes=self._members.chunk_bytes,
                deadline_s=self._network.deadline_of_round(4 * self._num_parameters, 1),
                stub=self._members.stub(client_id),
                compute_s=compute_s,
            )
        )
        if reply is None:
            return
        self._members.heard(client_id)
        if isinstance(reply, Malformed):
            raise Rejoin(f"a reply that is none: {reply.reason}")
        if reply.HasField("refusal"):
            self._behind |= reply.refusal.kind in TOO_LATE
            self._members.refused(reply.refusal, client_id)
        else:
            self._members.pushed(client_id)


class _Prompt:
    """Frames that come in time: a model within ``wait_s`` of the last one, its frames within ``transfer_s`` each."""

    def __init__(self, frames: AsyncIterator[Any], *, wait_s: float, transfer_s: float) -> None:
        self._frames, self._wait_s, self._transfer_s = frames, wait_s, transfer_s
        self.between_models()

    def between_models(self) -> None:
        self._within_s = self._wait_s

    def __aiter__(self) -> _Prompt:
        return self

    async def __anext__(self) -> Any:
        async with asyncio.timeout(self._within_s):
            frame = await anext(self._frames)
        self._within_s = self._transfer_s
        return frame


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is still running, and wait until it has stopped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

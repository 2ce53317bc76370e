"""A load driver: one process that hosts many identities, each a client of its own over a connection of its own.

What a client would compute is made beforehand, and torch is never imported; so the rounds cost what the exchange
costs. Everything else is the protocol: join, attend with heartbeats, pull, check, push, leave. Of the models that
reach a process the first is checked by its digest, and all others byte by byte against it.

The same process, over as many connections with the same options, is also the client of the bare echo
(:mod:`scale_servers`).

Run by :mod:`scale`: one JSON object a line on standard input, answers on standard output.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import grpc
import numpy as np

from common.randomness import stream
from common.rpc import PROTOCOL_VERSION
from common.rpc.digests import Digest, digest_of
from common.rpc.frames import Malformed, decode_frame, encode_frame, tensor_bytes
from common.rpc.methods import PARAMETER_SERVER, ParameterServerStub
from common.rpc.options import channel_options
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb

ECHO = "byzuldp.benchmarks.Echo"
CALL_S = 120.0  # no call of a healthy run takes so long

Message = dict[str, Any]
Frames = list[bytes]


class Lost(Exception):
    """An identity cannot go on; why."""


def momentum(seed: int, client_id: int, d: int) -> np.ndarray:
    """What an identity sends in every round: float32 (d,) of norm about 1."""
    return stream(seed, "load", client=client_id).standard_normal(d, dtype=np.float32) / np.float32(d**0.5)


class Momentum:
    """A momentum in chunks, whose digest is known: what precomputing saves a client that trains would spend."""

    def __init__(self, vector: np.ndarray, chunk_bytes: int) -> None:
        payload = tensor_bytes(vector)
        self.trailer = pb.Trailer(element_count=vector.size, digest=digest_of(payload))
        self.chunks = [bytes(payload[start : start + chunk_bytes]) for start in range(0, len(payload), chunk_bytes)]
        # As tensor_frames has it; only the header is another one each round.
        last = len(self.chunks) - 1
        self._later = [
            encode_frame(offset=index * chunk_bytes, payload=chunk, trailer=self.trailer if index == last else None)
            for index, chunk in enumerate(self.chunks)
            if index
        ]

    def frames(self, header: pb.MomentumHeader) -> Iterable[bytes]:
        """The messages of a round."""
        yield encode_frame(header=header, trailer=None if self._later else self.trailer, payload=self.chunks[0])
        yield from self._later


class Models:
    """The models that reach this process: the first copy of each is checked, and all others are compared with it.

    A frame is let go as soon as it has been looked at, but for those of the newest model.
    """

    def __init__(self, d: int) -> None:
        self._d = d
        self._newest = Copy(d)

    def copy(self, frame: bytes) -> Copy:
        """The copy that this first frame begins.

        Raises
        ------
        Lost
            It begins none.
        """
        if not self._newest.begins_with(frame):
            other = Copy(self._d)
            other.take(0, frame)
            if other.header.WhichOneof("outcome") != "model":
                return other
            if other.header.model.round_id < self._newest.header.model.round_id:
                raise Lost(f"the model of round {other.header.model.round_id} after a later one")
            self._newest = other
        return self._newest


class Copy:
    """A model as the first of those who get it sees it, or another answer."""

    def __init__(self, d: int) -> None:
        self._size, self._frames, self._digest, self._received = 4 * d, Frames(), Digest(), 0
        self.header = pb.ModelHeader()
        self.complete = False

    def begins_with(self, frame: bytes) -> bool:
        return bool(self._frames) and self._frames[0] == frame

    def take(self, index: int, frame: bytes) -> None:
        """The same frame as others had at this place, or the first one there.

        Raises
        ------
        Lost
            It is neither.
        """
        if index < len(self._frames):
            if frame != self._frames[index]:
                raise Lost(f"frame {index} of a model is not what others were sent")
            return
        found = decode_frame(frame, pb.ModelHeader)
        if isinstance(found, Malformed) or self.complete or (found.header is None) != (index > 0):
            raise Lost(f"frame {index} of an answer is none")
        if found.header is not None:
            self.header = found.header
        if len(found.payload) and found.offset != self._received:
            raise Lost(f"a chunk at byte {found.offset}, expected {self._received}")
        self._digest.update(found.payload)
        self._received += len(found.payload)
        self._frames.append(frame)
        if found.trailer is not None:
            if self._received != self._size or found.trailer.digest != self._digest.digest():
                raise Lost(f"a model of {self._received} bytes that is not what its trailer says")
            self.complete = True

    def ends_after(self, count: int) -> bool:
        """Whether this is all of it; an answer that is no model has one frame."""
        return not self.header.HasField("model") or (self.complete and count == len(self._frames))


class Client:
    """One identity in a federation.

    Parameters
    ----------
    terms
        What :mod:`scale` says of the run: ``address``, ``chunk_bytes``, ``fingerprint``, ``schema_hash``.
    """

    def __init__(self, client_id: int, token: str, own: Momentum, models: Models, terms: Message) -> None:
        self._id, self._token, self._own, self._models, self._terms = client_id, token, own, models, terms
        self._channel = grpc.aio.insecure_channel(terms["address"], options=channel_options(terms["chunk_bytes"]))
        self._stub = ParameterServerStub(self._channel)
        self._pull: Any = self._channel.unary_stream(  # frames as they are: most are only compared
            f"/{PARAMETER_SERVER}/PullModel", request_serializer=pb.PullModelRequest.SerializeToString
        )
        self._schema_hash = bytes.fromhex(terms["schema_hash"])
        self.rounds: list[int] = []  # that it answered
        self._pushed_at = -math.inf

    async def take_part(self) -> None:
        """From joining to the run's end.

        Raises
        ------
        Lost, grpc.aio.AioRpcError
            It did not get that far.
        """
        async with self._channel:
            caller, heartbeat_s = await self._join()
            attending = asyncio.create_task(self._attend(caller, heartbeat_s))
            training = asyncio.create_task(self._train(caller))
            try:
                await asyncio.wait({attending, training}, return_when=asyncio.FIRST_COMPLETED)
                if not attending.done():
                    training.result()
                await attending  # it hears of the end too, or says why it did not
                await self._stub.Leave(pb.LeaveRequest(caller=caller), timeout=CALL_S)
            finally:
                attending.cancel()
                training.cancel()
                await asyncio.gather(attending, training, return_exceptions=True)

    async def _join(self) -> tuple[pb.Caller, float]:
        reply = await self._stub.Join(
            pb.JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                client_id=self._id,
                token=self._token,
                schema_hash=self._schema_hash,
                fingerprint=self._terms["fingerprint"],
            ),
            timeout=CALL_S,
            wait_for_ready=True,
        )
        _refuse(reply)
        joined = reply.joined
        return pb.Caller(run_id=joined.run_id, client_id=self._id, incarnation=joined.incarnation), joined.heartbeat_s

    async def _attend(self, caller: pb.Caller, heartbeat_s: float) -> None:
        call = self._stub.Attend(timeout=None)
        await call.write(pb.AttendRequest(attending=pb.Attending(callers=[caller])))
        beating = asyncio.create_task(self._beat(call, heartbeat_s))
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                if isinstance(event, Malformed):
                    raise Lost(event.reason)
                match event.WhichOneof("event"):
                    case "run_finished":
                        return
                    case "evicted" | "refusal" as what:
                        raise Lost(f"Attend: {what}")
            raise Lost("the Attend stream ended before the run")
        finally:
            beating.cancel()
            call.cancel()

    async def _train(self, caller: pb.Caller) -> None:
        call = self._pull(pb.PullModelRequest(caller=caller, wait_s=CALL_S, follow=True), timeout=None)
        while True:
            header = await self._answer(call)
            match header.WhichOneof("outcome"):
                case "model":
                    await self._push(caller, header.model.round_id)
                case "run_finished":
                    return
                case "refusal":
                    _refuse(header)
                case _:
                    raise Lost("not yet, after so long")

    async def _answer(self, call: Any) -> pb.ModelHeader:
        """The header of the next model, once all that follows it is known to be right; or of another answer."""
        copy, count = None, 0
        while copy is None or not copy.ends_after(count):
            if (frame := await call.read()) is grpc.aio.EOF:
                raise Lost(f"an answer that ends after {count} frames")
            if copy is None:
                copy = self._models.copy(frame)
            copy.take(count, frame)
            count += 1
        return copy.header

    async def _push(self, caller: pb.Caller, round_id: int) -> None:
        header = pb.MomentumHeader(
            caller=caller,
            round_id=round_id,
            schema_hash=self._schema_hash,
            element_count=self._own.trailer.element_count,
        )
        call = self._stub.PushMomentum(timeout=CALL_S)
        for frame in self._own.frames(header):
            await call.write(frame)
        await call.done_writing()
        _refuse(await call)
        self.rounds.append(round_id)
        self._pushed_at = time.monotonic()

    async def _beat(self, call: Any, heartbeat_s: float) -> None:
        """As the product's client: a momentum is as good as a heartbeat."""
        await asyncio.sleep(heartbeat_s * random.random())  # a thousand clients do not beat as one
        while True:
            if (rest_s := self._pushed_at + heartbeat_s - time.monotonic()) > 0:
                await asyncio.sleep(rest_s)
                continue
            await call.write(pb.AttendRequest(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(heartbeat_s)


def _refuse(reply: Any) -> None:
    if isinstance(reply, Malformed):
        raise Lost(reply.reason)
    if reply.HasField("refusal"):
        raise Lost(f"refused: {kind_name(reply.refusal.kind)}: {reply.refusal.message}")


class Driver:
    """What one process does when it is told to."""

    def __init__(self, setup: Message) -> None:
        self._d, self._chunk_bytes = setup["d"], setup["chunk_bytes"]
        self._momenta = {
            client_id: Momentum(momentum(setup["seed"], client_id, self._d), self._chunk_bytes)
            for client_id in range(setup["first"], setup["last"])
        }

    async def federation(self, terms: Message) -> Message:
        """Take part in a run with all identities, until it ends."""
        models = Models(self._d)
        clients = [
            Client(client_id, terms["tokens"][str(client_id)], own, models, terms)
            for client_id, own in self._momenta.items()
        ]
        lost = await losses(client.take_part() for client in clients)
        return {"lost": lost, "rounds": [client.rounds for client in clients]}

    async def echo(self, terms: Message) -> Message:
        """The bare echo: all send d floats, then all receive as many, round after round.

        ``terms["shape"]`` is ``"calls"``, two calls a round as the protocol has, or ``"stream"``, one for all rounds.
        """
        exchange = self._calls if terms["shape"] == "calls" else self._stream
        lost = await losses(exchange(own, terms["address"], terms["rounds"]) for own in self._momenta.values())
        return {"lost": lost}

    async def _calls(self, own: Momentum, address: str, rounds: int) -> None:
        async with grpc.aio.insecure_channel(address, options=channel_options(self._chunk_bytes)) as channel:
            push: Any = channel.stream_unary(f"/{ECHO}/Push")
            pull: Any = channel.unary_stream(f"/{ECHO}/Pull")
            for round_id in range(rounds):
                call = push(timeout=CALL_S, wait_for_ready=True)
                for chunk in own.chunks:
                    await call.write(chunk)
                await call.done_writing()
                await call
                call = pull(str(round_id).encode(), timeout=CALL_S)
                await self._receive(call)
                if await call.read() is not grpc.aio.EOF:
                    raise Lost("the echo has more to say")

    async def _stream(self, own: Momentum, address: str, rounds: int) -> None:
        async with grpc.aio.insecure_channel(address, options=channel_options(self._chunk_bytes)) as channel:
            call: Any = channel.stream_stream(f"/{ECHO}/Exchange")(wait_for_ready=True)
            for _ in range(rounds):
                for chunk in own.chunks:
                    await call.write(chunk)
                await self._receive(call)
            await call.done_writing()
            if await call.read() is not grpc.aio.EOF:
                raise Lost("the echo has more to say")

    async def _receive(self, call: Any) -> None:
        received = 0
        while received < 4 * self._d:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise Lost("the echo ended early")
            received += len(message)


async def losses(work: Iterable[Coroutine[Any, Any, None]]) -> list[str]:
    """Run everything; what went wrong, in few words. The first that goes wrong ends the others, who would wait."""
    tasks = [asyncio.create_task(one) for one in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    problems = [task.exception() for task in done]
    return [f"{type(problem).__name__}: {problem}"[:500] for problem in problems if problem is not None]


def raise_file_limit() -> int:
    """As many open files as this process may have; returns the number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def main() -> None:
    raise_file_limit()
    driver: Driver | None = None
    deeds: dict[str, Callable[[Driver, Message], Awaitable[Message]]] = {
        "federation": Driver.federation,
        "echo": Driver.echo,
    }
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if driver is None:
            driver, answer = Driver(request), Message(ready=True)
        else:
            answer = await deeds[request["do"]](driver, request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

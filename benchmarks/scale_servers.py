"""The servers of the scale benchmark, each in a process of its own: the parameter server, and the bare echo.

Run by :mod:`scale`: one JSON object on standard input says what to be; one on standard output when it listens, and
one at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from scale_load import ECHO, Message, raise_file_limit

from common.rpc.options import server_options


def say(message: Message) -> None:
    print(json.dumps(message), flush=True)


def parameter_server(request: Message) -> None:
    """The product's, as `byzuldp ps` starts it."""
    from common.config import experiment_from
    from common.learning.task import build_task
    from ps.main import run_parameter_server

    experiment = experiment_from(request["experiment"])
    run_dir = Path(request["run_dir"])
    schema_hash = build_task(experiment).schema_hash
    cpu_s = list[float]()

    def report(event: Message) -> None:
        if event["event"] == "round":
            cpu_s.append(time.process_time())
        elif event["event"] == "listening":
            tokens = json.loads((run_dir / "operator" / "join_tokens.json").read_text())
            say({"address": event["address"], "schema_hash": schema_hash.hex(), "tokens": tokens})

    summary = run_parameter_server(experiment, run_dir, report=report)
    say({"cpu_s": cpu_s, **summary})


class Echo:
    """Takes ``size`` bytes from each of n clients, then sends as many to each: nothing is looked at.

    Sending begins when the last byte of the round has come, as it must for whoever computes something of all of them.
    """

    def __init__(self, num_clients: int, size: int, chunk_bytes: int, rounds: int) -> None:
        self._n, self._size, self._rounds = num_clients, size, rounds
        self._answer = [b"\0" * min(chunk_bytes, size - start) for start in range(0, size, chunk_bytes)]
        self._arrived = 0
        self._complete = [asyncio.Event() for _ in range(rounds)]
        self.complete_at: list[float] = []

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            ECHO,
            {
                "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
                "Push": grpc.stream_unary_rpc_method_handler(self._push),
                "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            },
        )

    async def done(self) -> None:
        """All rounds have been sent to it."""
        await self._complete[-1].wait()

    async def _exchange(self, _requests: object, context: Any) -> None:
        """All rounds of a client."""
        for complete in self._complete:
            if not await self._received(context):
                return
            self._one_more()
            await complete.wait()
            await self._send(context)

    async def _push(self, _requests: object, context: Any) -> bytes:
        if await self._received(context):
            self._one_more()
        return b""

    async def _pull(self, round_id: bytes, context: Any) -> None:
        await self._complete[int(round_id)].wait()
        await self._send(context)

    async def _received(self, context: Any) -> bool:
        received = 0
        while received < self._size:
            message = await context.read()
            if message is grpc.aio.EOF:
                return False
            received += len(message)
        return True

    async def _send(self, context: Any) -> None:
        for chunk in self._answer:
            await context.write(chunk)

    def _one_more(self) -> None:
        self._arrived += 1
        if self._arrived % self._n == 0:
            self._complete[len(self.complete_at)].set()
            self.complete_at.append(time.perf_counter())


async def echo(request: Message) -> None:
    """A bare grpc.aio server with the product's options; says when each round was complete."""
    clients, chunk_bytes = request["clients"], request["chunk_bytes"]
    service = Echo(clients, 4 * request["d"], chunk_bytes, request["rounds"])
    server = grpc.aio.server(options=server_options(chunk_bytes, pending=10 * clients))
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say({"address": f"127.0.0.1:{port}"})
    await service.done()
    await asyncio.to_thread(sys.stdin.readline)  # until the clients have received the last round
    await server.stop(grace=1.0)
    say({"complete_at": service.complete_at})


def main() -> None:
    raise_file_limit()
    request = json.loads(sys.stdin.readline())
    if request["be"] == "echo":
        asyncio.run(echo(request))
    else:
        parameter_server(request)


if __name__ == "__main__":
    main()

"""The unary echo of the latency benchmark: one call a round, the whole tensor as one message each way.

The streaming echoes and the parameter server are those of :mod:`scale_servers`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc

from common.rpc.options import server_options

UNARY = "byzuldp.benchmarks.UnaryEcho"


class UnaryEcho:
    """Takes ``size`` bytes from each of n clients, then sends as many to each: nothing is looked at."""

    def __init__(self, num_clients: int, size: int, rounds: int) -> None:
        self._n, self._answer = num_clients, b"\0" * size
        self._arrived = 0
        self._complete = [asyncio.Event() for _ in range(rounds)]
        self.complete_at: list[float] = []

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            UNARY, {"Exchange": grpc.unary_unary_rpc_method_handler(self._exchange)}
        )

    async def done(self) -> None:
        """All rounds have been sent to it."""
        await self._complete[-1].wait()

    async def _exchange(self, _request: bytes, _context: Any) -> bytes:
        complete = self._complete[self._arrived // self._n]
        self._arrived += 1
        if self._arrived % self._n == 0:
            complete.set()
            self.complete_at.append(time.perf_counter())
        await complete.wait()
        return self._answer


async def main() -> None:
    request = json.loads(sys.stdin.readline())
    clients, size = request["clients"], 4 * request["d"]
    service = UnaryEcho(clients, size, request["rounds"])
    server = grpc.aio.server(options=server_options(size, pending=10 * clients))
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await service.done()
    await asyncio.to_thread(sys.stdin.readline)  # until the clients have received the last round
    await server.stop(grace=1.0)
    print(json.dumps({"complete_at": service.complete_at}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

"""The client's end of the latency benchmark: that of the scale benchmark, and the unary echo beside it.

Run by :mod:`latency`: one JSON object a line on standard input, answers on standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc
from latency_servers import UNARY
from scale_load import CALL_S, Driver, Lost, Message, Momentum, losses, raise_file_limit

from common.rpc.options import channel_options


class LatencyDriver(Driver):
    """One process with one identity or several."""

    async def do(self, request: Message) -> Message:
        """What it is asked for: a federation, or an echo of some shape."""
        if request["do"] == "federation":
            return await self.federation(request)
        if request["shape"] != "unary":
            return await self.echo(request)
        lost = await losses(self._unary(own, request["address"], request["rounds"]) for own in self._momenta.values())
        return {"lost": lost}

    async def _unary(self, own: Momentum, address: str, rounds: int) -> None:
        whole = b"".join(own.chunks)
        async with grpc.aio.insecure_channel(address, options=channel_options(len(whole))) as channel:
            exchange: Any = channel.unary_unary(f"/{UNARY}/Exchange")
            for _ in range(rounds):
                answer = await exchange(whole, timeout=CALL_S, wait_for_ready=True)
                if len(answer) != len(whole):
                    raise Lost(f"the unary echo answers {len(answer)} bytes")


async def main() -> None:
    raise_file_limit()
    driver: LatencyDriver | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if driver is None:
            driver, answer = LatencyDriver(request), Message(ready=True)
        else:
            answer = await driver.do(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

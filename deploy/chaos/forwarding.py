"""A TCP proxy that misbehaves as it is told: one listening address for each link, all forwarding to one target.

It is a program of its own (the standard library alone, started by :mod:`deploy.chaos.proxy`), so that nothing else
disturbs its event loop. Commands come as JSON lines on standard input, each is answered by a line on standard output,
and the end of standard input is its end.

    {"op": "open", "target": ["127.0.0.1", 20001], "peers": ["client-0"]}    → {"ports": {"client-0": 20002}}
    {"op": "shape", "peer": "client-0", "up": {…}, "down": {…}}              → {}
    {"op": "reset", "peer": "client-0"}                                      → {"count": 1}

What a proxy can do to a byte stream is less than a network can do to packets, and a little different:

* What has been read from a socket was acknowledged to its sender, who believes that it has arrived.
* A connection is accepted by the system before the proxy hears of it. It then waits for the time of a handshake, both
  delays, and is reset when the target refuses; in a network it would have been refused at once.
* Nothing can be lost, doubled or overtaken without breaking TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
import select
import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 1 << 16
MOST_HELD_BYTES, LEAST_HELD_BYTES = 1 << 22, 1 << 16
SOCKET_BUFFER_BYTES = 1 << 18
PIECE_S = 0.02  # a limited rate is met in pieces of so many seconds
FIRST_PORT = 20_000


class Direction:
    """One direction of a link: its conditions, and what all its connections share."""

    def __init__(self) -> None:
        self.delay_s = self.jitter_s = 0.0
        self.rate: float | None = None
        self._free_at = 0.0  # when the narrow place has let through all that it was given
        self._passing = asyncio.Event()
        self._passing.set()

    def become(self, conditions: dict[str, Any]) -> None:
        self.delay_s, self.jitter_s = float(conditions["delay_s"]), float(conditions["jitter_s"])
        self.rate = conditions["rate_bytes_s"]
        self._free_at = 0.0
        (self._passing.clear if conditions["cut"] else self._passing.set)()

    @property
    def most_held(self) -> float:
        """Bytes that may be on their way: a second's worth."""
        return MOST_HELD_BYTES if self.rate is None else max(LEAST_HELD_BYTES, min(MOST_HELD_BYTES, self.rate))

    def draw_delay(self) -> float:
        return max(0.0, random.uniform(self.delay_s - self.jitter_s, self.delay_s + self.jitter_s))

    async def passing(self) -> None:
        """Until it is not cut."""
        await self._passing.wait()

    async def narrow_place(self, now: float, size: int) -> None:
        """Until so many bytes have gone through the narrow place."""
        if self.rate is not None:
            self._free_at = max(now, self._free_at) + size / self.rate
            await asyncio.sleep(self._free_at - now)

    def piece(self) -> int:
        return READ_BYTES if self.rate is None else max(1, min(READ_BYTES, int(self.rate * PIECE_S)))


END, RESET = b"", None  # how a stream ends, as an item of a pump's queue


class Pump:
    """Carries one direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        self._source, self._sink, self._direction = source, sink, direction
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._held, self._last_due = 0, 0.0
        self._changed = asyncio.Event()
        self.sink_failed = asyncio.Event()

    def put(self, item: bytes | None) -> None:
        """What has come in goes on its way; nothing overtakes."""
        self._last_due = max(self._last_due, asyncio.get_running_loop().time() + self._direction.draw_delay())
        self._queue.append((self._last_due, item))
        self._held += len(item or b"")
        self._changed.set()

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._direction.passing()
            while self._held > self._direction.most_held:
                self._changed.clear()
                await self._changed.wait()
            try:
                data = await loop.sock_recv(self._source, READ_BYTES)
            except OSError:
                self.put(RESET)
                return
            self.put(data)
            if data == END:
                return

    async def write(self) -> bool:
        """Deliver until the stream has ended; False if that was a reset."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            due, item = self._queue[0]
            await asyncio.sleep(due - loop.time())
            await self._direction.passing()
            if item is RESET:
                return False
            try:
                if item == END:
                    self._sink.shutdown(socket.SHUT_WR)
                    return True
                await self._deliver(item)
            except OSError:
                self.sink_failed.set()
                await asyncio.Event().wait()  # the other direction brings the reset to the sender
            self._queue.popleft()
            self._held -= len(item)
            self._changed.set()

    async def _deliver(self, data: bytes) -> None:
        loop, view = asyncio.get_running_loop(), memoryview(data)
        while view:
            piece = view[: self._direction.piece()]
            await self._direction.narrow_place(loop.time(), len(piece))
            await self._direction.passing()
            await loop.sock_sendall(self._sink, piece)
            view = view[len(piece) :]


@dataclass
class Link:
    """One peer's address, its conditions and its connections."""

    target: tuple[str, int]
    port: int = 0
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    _accepting: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Begin to accept; at the port it had before, if it had one."""
        if self._accepting is not None:
            return
        listener = bound(self.port)
        self.port = listener.getsockname()[1]
        listener.listen(128)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def refuse(self) -> None:
        """Accept no more: the system refuses whoever knocks."""
        if self._accepting is not None:
            await ended([self._accepting])
            self._accepting = None

    async def reset(self) -> int:
        """Reset what is connected."""
        count = len(self.connections)
        await ended(list(self.connections))
        return count

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    near, _ = await loop.sock_accept(listener)
                except OSError as problem:  # out of descriptors, or a peer that went away at once
                    if problem.errno in (errno.EBADF, errno.EINVAL):
                        return
                    await asyncio.sleep(0.05)
                    continue
                task = asyncio.create_task(self._serve(near))
                self.connections.add(task)
                task.add_done_callback(self.connections.discard)

    async def _serve(self, near: socket.socket) -> None:
        """One connection, from its handshake to its end; cancelled, it ends by a reset."""
        far: socket.socket | None = None
        in_order = False
        try:
            near.setblocking(False)
            await asyncio.sleep(self.up.draw_delay() + self.down.draw_delay())
            await self.up.passing()
            await self.down.passing()
            if not has_gone(near):
                far = await connected(self.target)
                in_order = await carry(Pump(near, far, self.up), Pump(far, near, self.down))
        except OSError:
            pass
        finally:
            for side in (near, far):
                if side is not None:
                    close(side, in_order=in_order)


async def carry(up: Pump, down: Pump) -> bool:
    """Both directions, until both have ended; False as soon as one is reset."""

    async def tell(failing: Pump, other: Pump) -> None:
        await failing.sink_failed.wait()
        other.put(RESET)

    writers = [asyncio.create_task(pump.write()) for pump in (up, down)]
    others = [asyncio.create_task(work) for work in (up.read(), down.read(), tell(up, down), tell(down, up))]
    try:
        for done in asyncio.as_completed(writers):
            if not await done:
                return False
        return True
    finally:
        await ended([*writers, *others])


async def connected(target: tuple[str, int]) -> socket.socket:
    far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        far.setblocking(False)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(far, target)
    except BaseException:
        far.close()
        raise
    return far


def bound(port: int) -> socket.socket:
    """A socket bound to a port of loopback; with 0 to one that no outgoing connection can take while it is closed."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if port:
            listener.bind(("127.0.0.1", port))
            return listener
        ports = range(FIRST_PORT, first_outgoing_port())
        for candidate in random.sample(ports, k=min(200, len(ports))):
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", candidate))
                return listener
        raise OSError(errno.EADDRINUSE, f"no free port between {ports.start} and {ports.stop - 1}")
    except BaseException:
        listener.close()
        raise


def first_outgoing_port() -> int:
    """Where the range begins that the system gives to outgoing connections."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
        if first > FIRST_PORT + 1000:
            return first
    return 32_768


def has_gone(peer: socket.socket) -> bool:
    """Whether a peer has hung up while nobody listened to it."""
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    return bool(poll.poll(0))


def close(side: socket.socket, *, in_order: bool) -> None:
    """Close; out of order by a reset."""
    with contextlib.suppress(OSError):
        if not in_order:
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def obey(command: dict[str, Any], links: dict[str, Link]) -> dict[str, Any]:
    """Carry out one command; returns the answer."""
    match command["op"]:
        case "open":
            target = (command["target"][0], command["target"][1])
            for peer in command["peers"]:
                links[peer] = Link(target)
                await links[peer].listen()
            return {"ports": {peer: link.port for peer, link in links.items()}}
        case "shape":
            link = links[command["peer"]]
            link.up.become(command["up"])
            link.down.become(command["down"])
            await (link.refuse() if command["up"]["refuse"] else link.listen())
            return {}
        case "reset":
            return {"count": await links[command["peer"]].reset()}
    return {"error": f"unknown command {command['op']!r}"}


async def main() -> None:
    loop, links = asyncio.get_running_loop(), dict[str, Link]()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await obey(json.loads(line), links)
        except OSError as problem:
            answer = {"error": str(problem)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(main())

"""A packet emulator in userspace, for kernels without ``sch_netem``: what a bad line does to the frames on it.

A line has a near and a far end, each a TAP device; frames read at one end are written at the other, when the line's
conditions say so. It is a program of its own (the standard library alone, started by :mod:`deploy.chaos.netns`), so
that nothing else disturbs its clock. Commands come as JSON lines on standard input, each is answered by a line on
standard output, and the end of standard input is its end; its devices vanish with it, whatever ended it.

    {"op": "line", "name": "client-0", "near": "n0", "far": "f0"}            → {}
    {"op": "shape", "name": "client-0", "up": {…}, "down": {…}}              → {}
    {"op": "counts", "name": "client-0"}                                     → {"up": {…}, "down": {…}}

``up`` is from the near end to the far end. The conditions are fields of :class:`deploy.chaos.backend.Conditions`; those
not named in :meth:`Way.become` are somebody else's business.

Frames are stamped when they are read: what the emulator itself is late by comes on top of the delay, some 0.1 ms on an
idle machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Counts", "Emulator", "Way"]

FRAME_BYTES = 2048  # more than an Ethernet frame: the MTU is 1500
READS_IN_A_ROW = 64
MOST_HELD_BYTES = 1 << 25  # of each direction; a full queue drops what comes
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x4004_54CA, 0x0002, 0x1000


@dataclass
class Counts:
    """What became of the frames of a direction; ``overflowed``: no room was left for them."""

    arrived: int = 0
    lost: int = 0
    duplicated: int = 0
    overtook: int = 0
    overflowed: int = 0


class Way:
    """One direction of a line: decides when a frame arrives, and how often."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self.delay_s = self.jitter_s = self.loss = self.duplication = self.reordering = 0.0
        self.counts = Counts()
        self.held_bytes = 0
        self._draw = draw
        self._last_due = 0.0

    def become(self, conditions: dict[str, Any]) -> None:
        """Change the conditions of the frames that come from now on."""
        for name in ("delay_s", "jitter_s", "loss", "duplication", "reordering"):
            setattr(self, name, float(conditions[name]))

    def departures(self, now: float, size: int) -> list[float]:
        """When a frame that came ``now`` leaves, on the same clock: twice when doubled, never when lost.

        Frames keep their order, unless reordering is asked for; then each goes by its own delay, and the chosen ones
        by none.
        """
        draw, counts = self._draw, self.counts
        counts.arrived += 1
        if self.loss and draw() < self.loss:
            counts.lost += 1
            return []
        if self.held_bytes + size > MOST_HELD_BYTES:
            counts.overflowed += 1
            return []
        if not self.duplication or draw() >= self.duplication:
            return [self._due(now)]
        counts.duplicated += 1
        return [self._due(now), self._due(now)]

    def _due(self, now: float) -> float:
        if self.reordering and self._draw() < self.reordering:
            self.counts.overtook += 1
            return now
        due = now + self._delay()
        if not self.reordering:
            due = max(due, self._last_due)
        self._last_due = max(due, self._last_due)
        return due

    def _delay(self) -> float:
        if not self.jitter_s:
            return self.delay_s
        return max(0.0, self.delay_s + self.jitter_s * (2 * self._draw() - 1))


class Emulator:
    """All lines, and the loop that serves them and the commands."""

    def __init__(self, commands: int, answers: int, open_end: Callable[[str], int]) -> None:
        self._commands, self._answers, self._open_end = commands, answers, open_end
        self._lines: dict[str, tuple[Way, Way]] = {}
        self._ends: dict[int, tuple[Way, int]] = {}  # what is read here goes this way to that end
        self._queue: list[tuple[float, int, int, bytes, Way]] = []
        self._sequence = 0  # among frames due at the same time the first come goes first
        self._half_line = b""
        self._poll = select.epoll()
        self._poll.register(commands, select.EPOLLIN)

    def run(self) -> None:
        """Until the end of the commands."""
        try:
            with self._poll:
                while self._once():
                    pass
        finally:
            for end in self._ends:
                os.close(end)

    def _once(self) -> bool:
        # select() waits with the precision of the clock, epoll only in whole milliseconds.
        queue = self._queue
        timeout = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        if select.select([self._poll], [], [], timeout)[0]:
            for descriptor, _ in self._poll.poll(0):
                if descriptor == self._commands:
                    if not self._obey():
                        return False
                else:
                    self._take(descriptor)
        self._deliver()
        return True

    def _take(self, source: int) -> None:
        way, sink = self._ends[source]
        for _ in range(READS_IN_A_ROW):
            try:
                frame = os.read(source, FRAME_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            for due in way.departures(now, len(frame)):
                self._sequence += 1
                way.held_bytes += len(frame)
                heapq.heappush(self._queue, (due, self._sequence, sink, frame, way))

    def _deliver(self) -> None:
        queue = self._queue
        while queue and queue[0][0] <= time.monotonic():
            _, _, sink, frame, way = heapq.heappop(queue)
            way.held_bytes -= len(frame)
            with contextlib.suppress(OSError):  # a device that is down, or has no room: the frame is lost
                os.write(sink, frame)

    def _obey(self) -> bool:
        data = os.read(self._commands, 1 << 16)
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        for line in lines:
            try:
                answer = self._carry_out(json.loads(line))
            except OSError as problem:
                answer = {"error": str(problem)}
            os.write(self._answers, json.dumps(answer).encode() + b"\n")
        return bool(data)

    def _carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command["name"]
        match command["op"]:
            case "line":
                near = self._open_end(command["near"])
                try:
                    far = self._open_end(command["far"])
                except OSError:
                    os.close(near)
                    raise
                self._lines[name] = up, down = Way(), Way()
                for source, way, sink in ((near, up, far), (far, down, near)):
                    self._ends[source] = (way, sink)
                    self._poll.register(source, select.EPOLLIN)
                return {}
            case "shape":
                for way, key in zip(self._lines[name], ("up", "down"), strict=True):
                    way.become(command[key])
                return {}
            case "counts":
                up, down = self._lines[name]
                return {"up": asdict(up.counts), "down": asdict(down.counts)}
        return {"error": f"unknown command {command['op']!r}"}


def open_tap(name: str) -> int:
    """A new TAP device in this process's network namespace; it exists as long as it is open."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def main() -> None:
    with contextlib.suppress(OSError):  # being late is all it can do wrong; not everybody may ask to go first
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here has cycles
    with contextlib.suppress(BrokenPipeError):
        Emulator(sys.stdin.fileno(), sys.stdout.fileno(), open_tap).run()


if __name__ == "__main__":
    main()

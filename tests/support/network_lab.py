"""Measuring the fault lab's networks: what happens to datagrams and connections between ``ps`` and a peer.

Needs the standard library and ``deploy.chaos`` alone, so that it also runs inside User-Mode Linux.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass

from deploy.chaos.backend import PS, Conditions
from deploy.chaos.bridge import BridgeBackend
from deploy.chaos.star import PORT

UDP_PORT = 20_002
QUIET_S = 0.6
"""When nothing has come for so long, nothing will: well above every delay that is asked for here."""

SO_RCVBUFFORCE = 33
SO_TIMESTAMPNS = 35


def udp_socket(lab: BridgeBackend, process: str) -> socket.socket:
    """A bound socket in the namespace of ``ps`` or a peer, with room, and the kernel's times of arrival."""
    with lab.star.inside(process):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    made.bind((lab.star.ip(process), UDP_PORT))
    made.settimeout(5.0)
    return made


def listener(lab: BridgeBackend) -> socket.socket:
    with lab.star.inside(PS):
        made = socket.create_server((lab.star.ip(PS), PORT), backlog=64)
    made.settimeout(10.0)
    return made


def dial(lab: BridgeBackend, peer: str, timeout_s: float = 10.0) -> socket.socket:
    """A connection from a peer to the parameter server's place."""
    with lab.star.inside(peer):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(timeout_s)
    try:
        made.connect((lab.star.ip(PS), PORT))
    except BaseException:
        made.close()
        raise
    return made


@contextlib.contextmanager
def connected(lab: BridgeBackend, peer: str):
    """Both ends of a connection of a peer: its own, the parameter server's."""
    with listener(lab) as door, dial(lab, peer) as near:
        far, _ = door.accept()
        with far:
            far.settimeout(10.0)
            yield near, far


@dataclass(frozen=True)
class Arrivals:
    """What came of numbered datagrams, in the order of their arrival."""

    numbers: list[int]
    delays_ms: list[float]
    times_s: list[float]

    @property
    def copies(self) -> Counter[int]:
        return Counter(self.numbers)

    @property
    def overtaken(self) -> int:
        """How many came after one that was sent later."""
        latest, count = -1, 0
        for number in self.numbers:
            count += number < latest
            latest = max(latest, number)
        return count


def send_datagrams(
    lab: BridgeBackend, peer: str, count: int, *, gap_s: float = 0.0, payload_bytes: int = 12, down: bool = False
) -> Arrivals:
    """Send numbered datagrams from a peer (``down``: to it), and wait until no more arrive.

    Times are from before the sending to the arrival that the kernel noted, so this process may be slow.
    """
    source, sink = (PS, peer) if down else (peer, PS)
    numbers, delays, times = [], [], []
    with udp_socket(lab, source) as sender, udp_socket(lab, sink) as receiver:
        target = receiver.getsockname()
        for number in range(count):
            sender.sendto(struct.pack("<Iq", number, time.time_ns()).ljust(payload_bytes), target)
            if gap_s:
                time.sleep(gap_s)
        receiver.settimeout(QUIET_S)
        while True:
            try:
                data, ancillary, _, _ = receiver.recvmsg(2048, 256)
            except TimeoutError:
                break
            number, sent_at = struct.unpack_from("<Iq", data)
            seconds, nanoseconds = struct.unpack("@ll", ancillary[0][2][:16])
            numbers.append(number)
            times.append(seconds + nanoseconds / 1e9)
            delays.append((seconds * 10**9 + nanoseconds - sent_at) / 1e6)
    return Arrivals(numbers, delays, times)


def rate_of_a_burst_bytes_s(lab: BridgeBackend, peer: str, count: int) -> float:
    """At which rate datagrams that are sent all at once come out of a narrow place; of the second half of them."""
    arrivals = send_datagrams(lab, peer, count, payload_bytes=1400)
    assert len(arrivals.numbers) == count
    half = count // 2
    return half * 1442 / (arrivals.times_s[-1] - arrivals.times_s[-1 - half])


def round_trip_ms(lab: BridgeBackend, peer: str, count: int = 41) -> float:
    """The median way there and the median way back: a round trip that no slow process of ours is part of."""
    ways = [send_datagrams(lab, peer, count, gap_s=0.003, down=down).delays_ms for down in (False, True)]
    assert [len(delays) for delays in ways] == [count, count]
    return sum(statistics.median(delays) for delays in ways)


def calm_round_trip_ms(lab: BridgeBackend, peer: str, enough_ms: float, tries: int = 5) -> float:
    """The shortest of some median round trips, until one is short enough: other load only adds to them."""
    best = math.inf
    for _ in range(tries):
        best = min(best, round_trip_ms(lab, peer))
        if best <= enough_ms:
            break
    return best


def handshake_ms(lab: BridgeBackend, peer: str, tries: int = 5) -> float:
    """How long a TCP connection takes to come about, at best."""
    times = []
    with listener(lab) as door:
        for _ in range(tries):
            begun = time.monotonic()
            with dial(lab, peer):
                times.append((time.monotonic() - begun) * 1e3)
            door.accept()[0].close()
    return min(times)


def throughput_bytes_s(lab: BridgeBackend, peer: str, seconds: float = 2.0, *, down: bool = False) -> float:
    """What one connection carries, its first third left out."""
    stop = threading.Event()
    with connected(lab, peer) as (near, far):
        source, sink = (far, near) if down else (near, far)

        def pour() -> None:
            with contextlib.suppress(OSError):
                while not stop.is_set():
                    source.sendall(bytes(1 << 14))

        thread = threading.Thread(target=pour)
        thread.start()
        begun, counted, counting_since, last = time.monotonic(), 0, 0.0, 0.0
        while (now := time.monotonic()) < begun + seconds or not counted:
            size = len(sink.recv(1 << 16))
            last = time.monotonic()
            if counting_since:
                counted += size
            elif now > begun + seconds / 3:
                counting_since = last
        stop.set()
        sink.close()
        thread.join()
    return counted / (last - counting_since)


def calm_throughput_bytes_s(lab: BridgeBackend, peer: str, enough: float, *, down: bool = False) -> float:
    """The highest of some throughputs, until one is high enough: other load only lowers them."""
    best = 0.0
    for _ in range(3):
        best = max(best, throughput_bytes_s(lab, peer, down=down))
        if best >= enough:
            break
    return best


def arrives(sender: socket.socket, receiver: socket.socket, what: bytes, within_s: float) -> bool:
    """Whether bytes that are sent on a connection arrive in time."""
    sender.sendall(what)
    receiver.settimeout(within_s)
    got = b""
    try:
        while len(got) < len(what):
            got += receiver.recv(len(what) - len(got))
    except TimeoutError:
        return False
    return got == what


def connection_attempt(lab: BridgeBackend, peer: str) -> socket.socket:
    """A connection that is being made."""
    with lab.star.inside(peer):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.connect_ex((lab.star.ip(PS), PORT))
    return made


def comes_about(attempt: socket.socket, within_s: float) -> bool:
    """Whether a connection that is being made is made in time."""
    return bool(select.select([], [attempt], [], within_s)[1]) and not attempt.getsockopt(
        socket.SOL_SOCKET, socket.SO_ERROR
    )


def half_open(lab: BridgeBackend) -> int:
    """Connections that the parameter server's place has answered and heard no more of."""
    return len(lab.star.run(PS, "ss", "-H", "-n", "-t", "state", "syn-recv").splitlines())


DELAY = Conditions(delay_s=0.025)

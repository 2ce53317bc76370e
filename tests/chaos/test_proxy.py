"""The proxy does to a connection what it was told to, as somebody at both of its ends sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from common.errors import RunFailed
from deploy.chaos.backend import CLEAR, PS, Conditions
from deploy.chaos.proxy import ProxyBackend

PATIENCE_S = 30.0
QUIET_S = 0.3  # nothing came for so long: it is being held
CUT = Conditions(cut=True)


class Ends:
    """A parameter server's listening socket, and the peers' addresses at the proxy."""

    def __init__(self, proxy: ProxyBackend) -> None:
        self.proxy = proxy
        host, _, port = proxy.placement(PS).address.rpartition(":")
        self.address = (host, int(port))
        self.listener = socket.create_server(self.address)
        self.listener.settimeout(PATIENCE_S)
        self._open: list[socket.socket] = []

    def dial(self, peer: str = "client-0") -> socket.socket:
        host, _, port = self.proxy.placement(peer).address.rpartition(":")
        return self._kept(socket.create_connection((host, int(port)), timeout=PATIENCE_S))

    def accept(self) -> socket.socket:
        return self._kept(self.listener.accept()[0])

    def pair(self, peer: str = "client-0") -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection."""
        near = self.dial(peer)
        return near, self.accept()

    def _kept(self, end: socket.socket) -> socket.socket:
        end.settimeout(PATIENCE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.append(end)
        return end

    def close(self) -> None:
        for end in (*self._open, self.listener):
            end.close()


@pytest.fixture
def proxy() -> Iterator[ProxyBackend]:
    backend = ProxyBackend()
    assert backend.probe() is None
    try:
        backend.open(["client-0", "client-1"])
        yield backend
    finally:
        backend.close()


@pytest.fixture
def ends(proxy: ProxyBackend) -> Iterator[Ends]:
    found = Ends(proxy)
    yield found
    found.close()


def round_trip(near: socket.socket, far: socket.socket) -> float:
    began_at = time.perf_counter()
    near.sendall(b"?")
    assert far.recv(1) == b"?"
    far.sendall(b"!")
    assert near.recv(1) == b"!"
    return time.perf_counter() - began_at


def silent(end: socket.socket) -> bool:
    """Whether nothing comes for a while: no data, no end, no error."""
    end.settimeout(QUIET_S)
    try:
        end.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE_S)
    return False


def hang_up(end: socket.socket, *, politely: bool) -> None:
    """Close; or by a reset."""
    if not politely:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def assert_reset(end: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        end.recv(1)


# -------------------------------------------------------------------- delay, jitter, rate


def test_a_delay_adds_what_was_said_to_each_direction(ends: Ends) -> None:
    near, far = ends.pair()
    for up, down in ((0.1, 0.1), (0.15, 0.0), (0.0, 0.15), (0.0, 0.0)):
        ends.proxy.shape("client-0", Conditions(delay_s=up), Conditions(delay_s=down))
        fastest = min(round_trip(near, far) for _ in range(6))
        # The fastest of six: whatever else this machine does delays some of them, hardly all.
        assert up + down <= fastest < up + down + 0.1


def test_a_delayed_connection_takes_a_round_trip_to_come_about(ends: Ends) -> None:
    ends.proxy.shape("client-0", Conditions(delay_s=0.1), Conditions(delay_s=0.1))
    began_at = time.perf_counter()
    ends.pair()
    assert time.perf_counter() - began_at >= 0.2


def test_jitter_varies_the_delay_and_keeps_the_order(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.shape("client-0", Conditions(delay_s=0.05, jitter_s=0.04), CLEAR)
    times = [round_trip(near, far) for _ in range(20)]
    assert min(times) >= 0.01
    assert max(times) - min(times) > 0.02  # 20 draws over 80 ms: one in 1e7 has less
    for number in range(200):
        near.sendall(bytes([number]))
    came = b""
    while len(came) < 200:
        came += far.recv(200)
    assert came == bytes(range(200))


def test_a_rate_is_not_exceeded_and_the_other_direction_is_free(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.shape("client-0", Conditions(rate_bytes_s=100_000), CLEAR)
    began_at = time.perf_counter()
    near.sendall(bytes(50_000))
    took = 0
    while took < 50_000:
        took += len(far.recv(1 << 16))
    slowly = time.perf_counter() - began_at
    assert slowly >= 0.5
    began_at = time.perf_counter()
    far.sendall(bytes(50_000))
    while took < 100_000:
        took += len(near.recv(1 << 16))
    assert time.perf_counter() - began_at < slowly


def test_a_fast_sender_is_held_up_and_not_stored(ends: Ends) -> None:
    near, _ = ends.pair()
    ends.proxy.shape("client-0", Conditions(rate_bytes_s=1000), CLEAR)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    near.settimeout(QUIET_S)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 1 << 22:
            sent += near.send(bytes(1 << 16))
    assert sent < 1 << 22


# -------------------------------------------------------------------- partitions


def test_a_partition_holds_everything_back_says_nothing_and_heals(ends: Ends) -> None:
    near, far = ends.pair()
    other_near, other_far = ends.pair("client-1")
    ends.proxy.shape("client-0", CUT, CUT)
    near.sendall(b"up")
    far.sendall(b"down")
    assert silent(far)
    assert silent(near)
    round_trip(other_near, other_far)  # nobody else suffers
    ends.proxy.shape("client-0", CLEAR, CLEAR)
    assert (far.recv(2), near.recv(4)) == (b"up", b"down")
    round_trip(near, far)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_one_way_partition_lets_the_other_way_pass(ends: Ends, way: str) -> None:
    near, far = ends.pair()
    ends.proxy.shape("client-0", *((CUT, CLEAR) if way == "up" else (CLEAR, CUT)))
    cut_off, free = (far, near) if way == "up" else (near, far)
    near.sendall(b"x")
    far.sendall(b"x")
    assert free.recv(1) == b"x"
    assert silent(cut_off)
    ends.proxy.shape("client-0", CLEAR, CLEAR)
    assert cut_off.recv(1) == b"x"


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_does_not_come_about_through_a_partition(ends: Ends, way: str) -> None:
    ends.proxy.shape("client-0", *((CUT, CLEAR) if way == "up" else (CLEAR, CUT)))
    near = ends.dial()
    gone = ends.dial()
    gone.close()  # this one gives up
    ends.listener.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        ends.listener.accept()
    ends.listener.settimeout(PATIENCE_S)
    ends.proxy.shape("client-0", CLEAR, CLEAR)
    round_trip(near, ends.accept())
    ends.listener.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        ends.listener.accept()


@pytest.mark.parametrize("politely", [True, False])
def test_a_peer_that_goes_away_behind_a_partition_is_not_heard_of_before_it_heals(ends: Ends, politely: bool) -> None:
    near, far = ends.pair()
    round_trip(near, far)
    ends.proxy.shape("client-0", CUT, CLEAR)
    hang_up(near, politely=politely)
    assert silent(far)
    ends.proxy.shape("client-0", CLEAR, CLEAR)
    if politely:
        assert far.recv(1) == b""
    else:
        assert_reset(far)


# -------------------------------------------------------------------- resets and refusals


def test_a_reset_reaches_both_ends_and_the_next_connection_is_whole(ends: Ends) -> None:
    first, second, other = ends.pair(), ends.pair(), ends.pair("client-1")
    assert ends.proxy.reset("client-0") == 2
    for end in (*first, *second):
        assert_reset(end)
    round_trip(*other)
    round_trip(*ends.pair())
    assert ends.proxy.reset("client-0") == 1
    assert ends.proxy.reset("client-0") == 0


def test_a_reset_is_seen_at_both_ends_even_through_a_partition(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.shape("client-0", CUT, CUT)
    assert ends.proxy.reset("client-0") == 1
    assert_reset(near)
    assert_reset(far)


def test_how_one_end_closes_is_how_the_other_sees_it(ends: Ends) -> None:
    near, far = ends.pair()
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    far.sendall(b"still")  # half-closed
    assert near.recv(5) == b"still"
    far.close()
    assert near.recv(1) == b""
    near, far = ends.pair()
    hang_up(far, politely=False)
    assert_reset(near)


def test_new_connections_are_refused_at_the_same_address_and_old_ones_are_not(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.shape("client-0", Conditions(refuse=True), CLEAR)
    with pytest.raises(ConnectionRefusedError):
        ends.dial()
    round_trip(near, far)
    round_trip(*ends.pair("client-1"))
    ends.proxy.shape("client-0", CLEAR, CLEAR)
    round_trip(*ends.pair())


def test_without_a_server_a_connection_is_reset_and_a_restarted_one_is_found(ends: Ends) -> None:
    ends.listener.close()
    with pytest.raises(ConnectionResetError):  # while it is being made, or after
        ends.dial().recv(1)
    ends.listener = socket.create_server(ends.address)
    ends.listener.settimeout(PATIENCE_S)
    round_trip(*ends.pair())


# -------------------------------------------------------------------- its own life


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_the_server_lives_where_no_outgoing_connection_can_take_its_port(proxy: ProxyBackend) -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    for name in (PS, "client-0", "client-1"):
        assert int(proxy.placement(name).address.rpartition(":")[2]) < first


def test_a_proxy_that_died_is_said_to_have(proxy: ProxyBackend) -> None:
    assert proxy.pid is not None
    os.kill(proxy.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="the proxy ended with exit code -9 when asked to 'shape'"):
        proxy.shape("client-0", CUT, CUT)


def test_closing_leaves_nothing_and_may_be_repeated() -> None:
    before = children()
    backend = ProxyBackend()
    backend.open(["client-0"])
    assert len(children() - before) == 1
    backend.close()
    backend.close()
    assert children() <= before
    ProxyBackend().close()  # never opened


def test_the_proxy_does_not_outlive_a_lab_that_is_killed() -> None:
    program = (
        "from deploy.chaos.proxy import ProxyBackend as P; import time\n"
        "p = P(); p.open(['client-0']); print(p.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        pid = int(lab.stdout.readline())
        os.kill(lab.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(PATIENCE_S)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

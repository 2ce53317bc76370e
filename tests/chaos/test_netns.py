"""Network namespaces on a bridge: what each condition does to real packets, and what is left behind. Needs root, or a
system that lets users make namespaces."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import small_experiment, until
from network_lab import (
    DELAY,
    arrives,
    calm_round_trip_ms,
    calm_throughput_bytes_s,
    comes_about,
    connected,
    connection_attempt,
    dial,
    half_open,
    handshake_ms,
    listener,
    send_datagrams,
)
from placed import PlacedServer, placed_client
from scipy.stats import binom
from system_needs import needed

from common.errors import RunFailed
from deploy.chaos.backend import CAPABILITIES, CLEAR, PS, Conditions
from deploy.chaos.netns import NetnsBackend
from ps.reader import RunReader

pytestmark = pytest.mark.system

UNLIKELY = 1e-6
ETH_P_ALL = 3
PEERS = ["client-0", "client-1", "adversary"]
TRIAL = [sys.executable, "-P", "-m", "deploy.chaos.trial", "netns"]


def within_chance(count: int, of: int, probability: float) -> bool:
    low, high = binom.ppf(UNLIKELY / 2, of, probability), binom.isf(UNLIKELY / 2, of, probability)
    return bool(low <= count <= high)


@pytest.fixture(scope="module")
def possible() -> None:
    """The machine can do it."""
    needed(NetnsBackend().probe())


@pytest.fixture(scope="module")
def network(possible: None) -> Iterator[NetnsBackend]:
    backend = NetnsBackend()
    try:
        backend.open(PEERS)
        yield backend
    finally:
        backend.close()


@pytest.fixture
def lab(network: NetnsBackend) -> Iterator[NetnsBackend]:
    """The network with clear links, before and after."""
    yield network
    for peer in PEERS:
        network.shape(peer, CLEAR, CLEAR)


def test_everything_is_possible_here(possible: None) -> None:
    assert NetnsBackend().capabilities == frozenset(CAPABILITIES)


def test_a_clear_link_carries_every_packet_once_and_in_order(lab: NetnsBackend) -> None:
    arrivals = send_datagrams(lab, "client-1", 2000)
    assert arrivals.numbers == list(range(2000))


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_packets_on_a_link_are_no_larger_than_on_a_wire(lab: NetnsBackend, down: bool) -> None:
    """Where they arrive, since it is there that they are lost."""
    with lab.star.inside("client-1" if down else "hub"):
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    with ear, connected(lab, "client-1") as (near, far):
        ear.bind(("eth0" if down else lab.star.port_device("client-1"), ETH_P_ALL))
        assert arrives(*((far, near) if down else (near, far)), bytes(100_000), within_s=10.0)
        ear.setblocking(False)
        sizes = [len(ear.recv(1 << 16)) for _ in range(60)]
    assert max(sizes) == 1514


def test_two_delays_of_25_ms_make_a_round_trip_of_50_ms(lab: NetnsBackend) -> None:
    lab.shape("client-0", DELAY, DELAY)
    assert 50.0 <= calm_round_trip_ms(lab, "client-0", 53.0) <= 53.0
    assert 50.0 <= handshake_ms(lab, "client-0") <= 56.0  # this process takes part in it
    assert calm_round_trip_ms(lab, "client-1", 25.0) < 25.0  # not everybody's


def test_a_direction_is_delayed_by_itself(lab: NetnsBackend) -> None:
    lab.shape("client-0", DELAY, CLEAR)
    assert min(send_datagrams(lab, "client-0", 20).delays_ms) >= 25.0
    assert min(send_datagrams(lab, "client-0", 20, down=True).delays_ms) < 25.0


def test_jitter_keeps_the_order(lab: NetnsBackend) -> None:
    lab.shape("client-0", Conditions(delay_s=0.02, jitter_s=0.01), CLEAR)
    arrivals = send_datagrams(lab, "client-0", 400, gap_s=0.003)
    assert arrivals.numbers == list(range(400))
    assert 10.0 <= min(arrivals.delays_ms) < 14.0
    assert sorted(arrivals.delays_ms)[300] > 22.0


def test_jitter_spreads_the_delays_evenly_where_no_order_is_kept(lab: NetnsBackend) -> None:
    lab.shape("client-0", Conditions(delay_s=0.02, jitter_s=0.01, reordering=0.001), CLEAR)
    arrivals = send_datagrams(lab, "client-0", 400, gap_s=0.003)
    assert arrivals.overtaken > 50
    lower, upper = (sorted(arrivals.delays_ms)[index] for index in (100, 300))
    assert 12.5 < lower < 18.0  # five standard deviations of a quartile are 2.2 ms; this process may be late
    assert 22.5 < upper < 28.0


def test_reordering_lets_packets_overtake(lab: NetnsBackend) -> None:
    lab.shape("client-0", Conditions(delay_s=0.05, reordering=0.25), CLEAR)
    arrivals = send_datagrams(lab, "client-0", 1000, gap_s=0.0005)
    assert sorted(arrivals.numbers) == list(range(1000))
    assert arrivals.overtaken > 300
    assert within_chance(lab.counts("client-0")["up"]["overtook"], 1000, 0.25)


@pytest.mark.parametrize("peer", ["adversary", "client-0"], ids=["by a filter", "by the emulator"])
def test_as_many_packets_are_lost_as_asked_for(lab: NetnsBackend, peer: str) -> None:
    delay_s = 0.0 if peer == "adversary" else 0.001
    lab.shape(peer, CLEAR, Conditions(loss=0.1, delay_s=delay_s))
    down, up = send_datagrams(lab, peer, 4000, down=True), send_datagrams(lab, peer, 4000)
    assert within_chance(4000 - len(down.numbers), 4000, 0.1)
    assert len(up.numbers) == 4000
    assert set(down.copies.values()) == {1}


def test_as_many_packets_arrive_twice_as_asked_for(lab: NetnsBackend) -> None:
    lab.shape("client-0", Conditions(duplication=0.1), CLEAR)
    copies = send_datagrams(lab, "client-0", 3000).copies
    assert sorted(copies) == list(range(3000))
    assert set(copies.values()) == {1, 2}
    assert within_chance(sum(count == 2 for count in copies.values()), 3000, 0.1)


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_a_connection_gets_the_rate_of_its_link(lab: NetnsBackend, down: bool) -> None:
    narrow = Conditions(rate_bytes_s=1_000_000.0)
    lab.shape("client-1", *((CLEAR, narrow) if down else (narrow, CLEAR)))
    assert 0.8e6 <= calm_throughput_bytes_s(lab, "client-1", 0.8e6, down=down) <= 1.2e6
    lab.shape("client-1", CLEAR, CLEAR)
    assert calm_throughput_bytes_s(lab, "client-1", 2e6, down=down) > 2e6


def test_of_a_cut_direction_only_the_other_one_passes(lab: NetnsBackend) -> None:
    with listener(lab) as door:
        lab.shape("client-1", CLEAR, Conditions(cut=True))
        with connection_attempt(lab, "client-1") as attempt:
            assert not comes_about(attempt, within_s=0.5)
            assert half_open(lab) == 1  # its SYN has arrived; the answer has not
            lab.shape("client-1", CLEAR, CLEAR)
            assert comes_about(attempt, within_s=20.0)
            door.accept()[0].close()
        lab.shape("client-1", Conditions(cut=True), CLEAR)
        with connection_attempt(lab, "client-1") as attempt:
            assert not comes_about(attempt, within_s=4.0)  # and nobody says "host unreachable"
            assert attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert half_open(lab) == 0
            assert len(send_datagrams(lab, "client-1", 10, down=True).numbers) == 10


@pytest.mark.parametrize("peer", ["client-1", "client-0"], ids=["by a filter", "beside the emulator"])
def test_a_connection_outlives_a_cut_that_heals(lab: NetnsBackend, peer: str) -> None:
    with connected(lab, peer) as (near, far):
        lab.shape(peer, Conditions(cut=True), Conditions(cut=True))
        assert not arrives(near, far, b"through the wall", within_s=0.5)
        lab.shape(peer, CLEAR, CLEAR)
        far.settimeout(20.0)
        assert far.recv(100) == b"through the wall"
        assert arrives(far, near, b"and back", within_s=20.0)


def test_a_connection_outlives_being_led_through_the_emulator(lab: NetnsBackend) -> None:
    backend = NetnsBackend()
    try:
        backend.open(["client-0"])
        with connected(backend, "client-0") as (near, far):
            assert arrives(near, far, b"fast", within_s=5.0)
            backend.shape("client-0", DELAY, DELAY)
            assert arrives(far, near, b"slow, and the server speaks first", within_s=20.0)
            assert arrives(near, far, b"slow", within_s=20.0)
            assert backend.counts("client-0")["down"]["arrived"] >= 1
    finally:
        backend.close()


def test_refusing_is_of_new_connections_only(lab: NetnsBackend) -> None:
    with listener(lab) as door, dial(lab, "client-1") as near, door.accept()[0] as far:
        lab.shape("client-1", Conditions(refuse=True), CLEAR)
        with pytest.raises(ConnectionRefusedError):
            dial(lab, "client-1")
        assert arrives(near, far, b"still here", within_s=5.0)
        dial(lab, "client-0").close()  # others are let in
        lab.shape("client-1", CLEAR, CLEAR)
        dial(lab, "client-1").close()


def test_a_reset_ends_the_connections_of_one_link_at_both_ends(lab: NetnsBackend) -> None:
    with (
        listener(lab) as door,
        dial(lab, "client-1") as near,
        door.accept()[0] as far,
        dial(lab, "client-0") as other,
        door.accept()[0] as other_far,
    ):
        lab.shape("client-1", Conditions(cut=True), Conditions(cut=True))  # no packet could tell the other end
        assert lab.reset("client-1") == 1
        for side in (near, far):
            side.settimeout(5.0)
            with pytest.raises(OSError, match=r"reset|abort"):
                side.recv(1)
        assert arrives(other, other_far, b"alive", within_s=5.0)
        assert lab.reset("client-1") == 0


def test_the_congestion_control_is_the_same_everywhere_and_recorded(lab: NetnsBackend) -> None:
    found = {lab.star.run(name, "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip() for name in [PS, *PEERS]}
    assert found == {lab.facts()["congestion control"]}
    assert found <= {"cubic", "reno"}


def test_a_command_that_fails_is_quoted_with_what_it_said(lab: NetnsBackend) -> None:
    with pytest.raises(RunFailed, match=r"ip link del nothing in the namespace hub failed \(1\): .*nothing"):
        lab.star.run("hub", "ip", "link", "del", "nothing")


# ---------------------------------------------------------------- a federation


def test_a_federation_trains_over_lossy_delayed_and_cut_links(lab: NetnsBackend, tmp_path: Path) -> None:
    """Four clients in two processes. Rounds need all of them, and each takes a round trip at least."""
    experiment = small_experiment(
        federation={"clients": 4, "byzantine": 0},
        training={"rounds": 25},
        network={
            "address": lab.placement(PS).address,
            "insecure": True,
            "grace_floor_s": 60.0,
            "leave_deadline_s": 10.0,
        },
    )
    wan = Conditions(delay_s=0.01, jitter_s=0.002, loss=0.005)
    for peer in ("client-0", "client-1"):
        lab.shape(peer, wan, wan)
    with (
        PlacedServer(experiment, tmp_path, lab) as server,
        placed_client(tmp_path, server.listening(), lab, "client-0", [0, 1, 2]) as three,
        placed_client(tmp_path, server, lab, "client-1", [3]) as one,
    ):

        def rounds() -> int:
            return RunReader(server.run_dir).status().round_id

        until(lambda: rounds() >= 5, "five rounds")
        lab.shape("client-1", Conditions(cut=True), wan)
        time.sleep(0.2)  # what was on its way has arrived
        reached = rounds()
        time.sleep(1.0)
        assert rounds() == reached  # only those who are heard can answer
        lab.shape("client-1", wan, wan)
        assert lab.reset("client-0") >= 1  # and then a reset of the others' connection
        summary = server.finish()
        assert (three.exit_code(), one.exit_code()) == (0, 0)
    assert (summary["status"], summary["rounds"]) == ("completed", 25)
    assert {child.events("outcome")[0]["status"] for child in (three, one)} == {"completed"}


# ---------------------------------------------------------------- what is left behind


def machine() -> list[str]:
    """The machine's own network."""
    return [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in (["ip", "-br", "link"], ["ip", "route"], ["ip", "netns"], ["nft", "list", "ruleset"])
    ]


def test_the_machines_own_network_is_never_touched(possible: None) -> None:
    before, descriptors = machine(), len(os.listdir("/proc/self/fd"))
    backend = NetnsBackend()
    try:
        backend.open(PEERS)
        backend.shape("client-0", Conditions(delay_s=0.01, rate_bytes_s=1e6, refuse=True), Conditions(loss=0.5))
        assert machine() == before
    finally:
        backend.close()
    assert machine() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    backend.close()


def test_two_labs_do_not_meet(possible: None) -> None:
    one, other = NetnsBackend(), NetnsBackend()
    try:
        one.open(["client-0"])
        other.open(["client-0"])
        one.shape("client-0", Conditions(cut=True), Conditions(cut=True))
        assert len(send_datagrams(other, "client-0", 5).numbers) == 5
        assert not send_datagrams(one, "client-0", 5).numbers
    finally:
        one.close()
        other.close()


def living(inodes: set[str]) -> list[str]:
    """Processes in any of these network namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / "net") in inodes:
                found.append(process.name)
        except OSError:
            continue
    return found


def test_nothing_outlives_a_maker_that_is_killed(possible: None) -> None:
    maker = (
        "import os, sys, time; from deploy.chaos.netns import NetnsBackend; from deploy.chaos.backend import *;"
        "lab = NetnsBackend(); lab.open(['client-0']); lab.shape('client-0', Conditions(delay_s=0.01), CLEAR);"
        "print(*(os.readlink(lab.star.path(name)) for name in ('hub', 'ps', 'client-0')), flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", maker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        inodes = set(process.stdout.readline().split())
        assert len(inodes) == 3
        assert living(inodes)  # the emulator
        process.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 20.0
    while living(inodes):
        assert time.monotonic() < give_up, "the emulator lives on"
        time.sleep(0.01)


def test_an_emulator_that_died_ends_the_run_with_its_name(possible: None) -> None:
    backend = NetnsBackend()
    try:
        backend.open(["client-0"])
        backend.shape("client-0", DELAY, DELAY)
        os.kill(backend._helper.pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match="the packet emulator ended with exit code -9"):
            backend.shape("client-0", CLEAR, CLEAR)
    finally:
        backend.close()


def test_without_the_right_to_make_namespaces_it_is_root_of_its_own(possible: None) -> None:
    if not Path("/proc/self/ns/user").exists() or subprocess.run(["unshare", "-Ur", "true"], check=False).returncode:
        needed("this system lets no user make a user namespace")
    command = ["setpriv", "--bounding-set=-sys_admin,-net_admin,-net_raw", *TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["problem"] is None
    assert {"loss", "cut", "rate", "refuse", "reset"} <= set(found["capabilities"])  # TAP devices may be root's


def test_a_bridge_that_is_too_small_is_told_before_anything_is_made() -> None:
    with pytest.raises(RunFailed, match="1001 peers: a network in namespaces has room for 1000"):
        NetnsBackend().open([f"client-{number}" for number in range(1001)])


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "nft" else f"/usr/sbin/{tool}")
    backend = NetnsBackend()
    assert backend.probe() == "needs the command nft (Debian: nftables)"
    assert backend.capabilities == frozenset(CAPABILITIES)

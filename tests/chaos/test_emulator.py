"""What the packet emulator does to frames: its decisions by themselves, and the program between two ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from scipy.stats import binom

from common.errors import RunFailed
from deploy.chaos import emulator
from deploy.chaos.backend import CLEAR, Conditions
from deploy.chaos.emulator import MOST_HELD_BYTES, Counts, Emulator, Way
from deploy.chaos.helper_process import HelperProcess

FRAMES = 20_000
UNLIKELY = 1e-6


def way(conditions: Conditions, seed: int = 1) -> Way:
    made = Way(random.Random(seed).random)
    made.become(asdict(conditions))
    return made


def within_chance(count: int, of: int, probability: float) -> bool:
    """Whether a count is none that chance makes less often than :data:`UNLIKELY`."""
    low, high = binom.ppf(UNLIKELY / 2, of, probability), binom.isf(UNLIKELY / 2, of, probability)
    return bool(low <= count <= high)


def test_a_clear_way_lets_every_frame_leave_at_once() -> None:
    clear = way(CLEAR)
    assert [clear.departures(now, 100) for now in (1.0, 1.0, 2.5)] == [[1.0], [1.0], [2.5]]


def test_a_delay_is_added_to_every_frame() -> None:
    delayed = way(Conditions(delay_s=0.025))
    assert [delayed.departures(now, 100) for now in (1.0, 1.5)] == [[1.025], [1.525]]


def test_jitter_spreads_delays_over_its_whole_range_and_keeps_the_order() -> None:
    jittery = way(Conditions(delay_s=0.02, jitter_s=0.01))
    sent = [float(k) for k in range(FRAMES)]  # a second apart: none waits for another
    delays = [jittery.departures(now, 100)[0] - now for now in sent]
    assert 0.01 <= min(delays) < 0.0101
    assert 0.0299 < max(delays) <= 0.03
    assert statistics.fmean(delays) == pytest.approx(0.02, abs=5 * 0.01 / (3 * FRAMES) ** 0.5)
    close = way(Conditions(delay_s=0.02, jitter_s=0.01))
    due = [close.departures(k * 1e-4, 100)[0] for k in range(FRAMES)]
    assert due == sorted(due)
    assert all(0.01 <= leaves - k * 1e-4 <= 0.03 + 1e-9 for k, leaves in enumerate(due))


def test_jitter_above_the_delay_never_sends_a_frame_into_the_past() -> None:
    wild = way(Conditions(delay_s=0.001, jitter_s=0.1, reordering=0.001))
    delays = [wild.departures(now, 100)[0] - now for now in map(float, range(1000))]
    assert min(delays) == 0.0
    assert max(delays) > 0.09


def test_reordering_lets_its_fraction_of_the_frames_overtake_the_delayed_ones() -> None:
    overtaking = way(Conditions(delay_s=0.02, reordering=0.25))
    delays = [round(overtaking.departures(now, 100)[0] - now, 9) for now in map(float, range(FRAMES))]
    assert set(delays) == {0.0, 0.02}
    assert delays.count(0.0) == overtaking.counts.overtook
    assert within_chance(delays.count(0.0), FRAMES, 0.25)


def test_reordering_lifts_the_order_that_jitter_would_keep() -> None:
    mixed = way(Conditions(delay_s=0.02, jitter_s=0.01, reordering=0.01))
    due = [mixed.departures(k * 1e-3, 100)[0] for k in range(1000)]
    assert sum(later < earlier for earlier, later in itertools.pairwise(due)) > 100


@pytest.mark.parametrize("fraction", [0.005, 0.3])
def test_losses_and_duplicates_are_as_frequent_as_asked_for(fraction: float) -> None:
    bad = way(Conditions(loss=fraction, duplication=fraction))
    copies = [len(bad.departures(0.0, 100)) for _ in range(FRAMES)]
    assert within_chance(copies.count(0), FRAMES, fraction)
    assert within_chance(copies.count(2), FRAMES - copies.count(0), fraction)
    assert bad.counts == Counts(arrived=FRAMES, lost=copies.count(0), duplicated=copies.count(2))


def test_certain_loss_loses_everything() -> None:
    dead = way(Conditions(loss=1.0))
    assert not any(dead.departures(0.0, 100) for _ in range(FRAMES))


def test_a_full_queue_drops_what_comes_and_says_so() -> None:
    full = way(CLEAR)
    full.held_bytes = MOST_HELD_BYTES - 100
    assert full.departures(1.0, 100) == [1.0]
    assert full.departures(1.0, 101) == []
    assert full.counts.overflowed == 1


# ---------------------------------------------------------------- the loop, between two ends that are socket pairs


@dataclass
class Line:
    """An emulator in a thread: what is sent into ``near`` comes out of ``far``, and the other way round."""

    near: socket.socket
    far: socket.socket
    orders: socket.socket

    def ask(self, op: str, **arguments: object) -> dict:
        self.orders.sendall(json.dumps({"op": op, "name": "a", **arguments}).encode() + b"\n")
        return json.loads(self.orders.makefile().readline())

    def shape(self, up: Conditions, down: Conditions) -> None:
        assert self.ask("shape", up=asdict(up), down=asdict(down)) == {}


@pytest.fixture
def line() -> Iterator[Line]:
    with contextlib.ExitStack() as stack:

        def pair() -> tuple[socket.socket, socket.socket]:
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            stack.enter_context(one)
            stack.enter_context(other)
            one.settimeout(20.0)
            return one, other

        ends = {name: pair() for name in ("near", "far", "spare")}

        def open_end(name: str) -> int:
            if name not in ends:
                raise OSError(f"no device {name}")
            ends[name][1].setblocking(False)
            return os.dup(ends[name][1].fileno())  # the emulator's own, as a device would be

        ours, theirs = socket.socketpair()
        stack.enter_context(theirs)
        program = Emulator(theirs.fileno(), theirs.fileno(), open_end)
        thread = threading.Thread(target=program.run)
        thread.start()
        stack.callback(thread.join, 20.0)
        stack.enter_context(ours)
        made = Line(ends["near"][0], ends["far"][0], ours)
        assert made.ask("line", near="near", far="far") == {}
        yield made


def test_a_round_trip_takes_both_delays_and_little_more(line: Line) -> None:
    delayed = Conditions(delay_s=0.025)
    line.shape(delayed, delayed)

    def median_ms() -> float:
        trips = []
        for _ in range(11):
            begun = time.monotonic()
            line.near.send(b"ping")
            line.far.send(line.far.recv(100))
            assert line.near.recv(100) == b"ping"
            trips.append((time.monotonic() - begun) * 1e3)
        assert min(trips) >= 50.0
        return statistics.median(trips)

    assert min(median_ms() for _ in range(3)) <= 53.0


def test_each_direction_has_conditions_of_its_own(line: Line) -> None:
    line.shape(Conditions(loss=1.0), CLEAR)
    line.near.send(b"into the void")
    line.far.send(b"arrives")
    assert line.near.recv(100) == b"arrives"
    assert line.ask("counts") == {"up": asdict(Counts(arrived=1, lost=1)), "down": asdict(Counts(arrived=1))}


def test_a_change_holds_for_the_frames_that_come_after_it(line: Line) -> None:
    line.shape(Conditions(delay_s=0.3), CLEAR)
    line.near.send(b"slow")
    while line.ask("counts")["up"]["arrived"] == 0:
        time.sleep(0.001)
    line.shape(CLEAR, CLEAR)
    line.shape(Conditions(reordering=0.5), CLEAR)  # no delay to overtake, but no order to keep either
    line.near.send(b"fast")
    assert [line.far.recv(100), line.far.recv(100)] == [b"fast", b"slow"]


def test_frames_stay_in_order_when_a_delay_shrinks(line: Line) -> None:
    line.shape(Conditions(delay_s=0.2), CLEAR)
    line.near.send(b"first")
    while line.ask("counts")["up"]["arrived"] == 0:
        time.sleep(0.001)
    line.shape(CLEAR, CLEAR)
    line.near.send(b"second")
    assert [line.far.recv(100), line.far.recv(100)] == [b"first", b"second"]


def test_a_thousand_frames_arrive_whole_and_in_order(line: Line) -> None:
    line.shape(Conditions(delay_s=0.002, jitter_s=0.002), CLEAR)
    sent = [os.urandom(1514) for _ in range(1000)]
    arrived = []
    for number, frame in enumerate(sent):
        line.near.send(frame)
        if number >= 8:  # this many are on their way: a socket pair has room for no more than ten
            arrived.append(line.far.recv(2000))
    assert [*arrived, *(line.far.recv(2000) for _ in range(8))] == sent


def test_a_frame_that_has_left_makes_room_for_another(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "MOST_HELD_BYTES", 2500)
    for _ in range(10):
        line.near.send(bytes(1000))
        assert line.far.recv(2000) == bytes(1000)
    assert line.ask("counts")["up"] == asdict(Counts(arrived=10))


def test_a_device_that_cannot_be_opened_is_an_answer(line: Line) -> None:
    assert line.ask("line", near="spare", far="missing") == {"error": "no device missing"}


def test_an_emulator_that_died_is_named() -> None:
    helper = HelperProcess(Path(emulator.__file__), "the packet emulator")
    try:
        os.kill(helper.pid, 9)
        with pytest.raises(RunFailed, match=r"the packet emulator ended with exit code -9 when asked to 'counts'"):
            helper.ask("counts", name="a")
    finally:
        helper.close()
        helper.close()


def test_the_emulator_ends_when_nobody_can_tell_it_anything() -> None:
    maker = (
        "import os, sys; from pathlib import Path; from deploy.chaos import emulator;"
        "from deploy.chaos.helper_process import HelperProcess;"
        "helper = HelperProcess(Path(emulator.__file__), 'it'); print(helper.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    pid = int(subprocess.run([sys.executable, "-c", maker], capture_output=True, text=True, check=False).stdout)
    give_up = time.monotonic() + 20.0
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < give_up, "it lives on"
        time.sleep(0.01)

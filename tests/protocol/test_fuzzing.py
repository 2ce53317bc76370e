"""Every message of both services, in every shape that nobody should send, against a parameter server that goes on.

``make test`` sends the same few hundred each time. ``make fuzz FUZZ_S=600 SEED=1`` goes on for as long as it is told,
with others each time; what it finds is printed with the seed that finds it again.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from federations import until
from fuzz_http2 import (
    ACK,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    OPENINGS,
    SETTINGS,
    SETTINGS_OF,
    Connection,
    Frame,
    Open,
    Send,
    connections,
    data_frames,
    frame,
    header_block,
)  # fmt: skip
from fuzz_messages import METHODS, Call, Change, Part, calls
from fuzz_target import MINE, Recipe, Target, fuzzed
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from common.config import Network

batches: st.SearchStrategy[list[Recipe]] = st.lists(
    calls() | calls() | calls() | connections(), min_size=6, max_size=16
)

SILENT: list[Recipe] = [
    *(Call(method, (), "hang") for method in METHODS),
    *(Connection("http/2", "usual", True, (Open(method),), "reset") for method in METHODS),
    Connection("http/2", "usual", True, (Frame(GOAWAY, 0, 0, bytes(7) + b"\x07\x1b[2J"),), "half-close"),
]
"""Calls that say nothing, and a farewell that would clear a terminal."""

bounded = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a batch is not made smaller: the server is another one after it
    suppress_health_check=list(HealthCheck),
)


FUZZ_S = float(os.environ.get("FUZZ_S") or 60.0)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with fuzzed(tmp_path) as running:
        yield running


def sender(target: Target, examples: int, *, always_the_same: bool) -> Callable[[], None]:
    """Sends so many batches."""

    @settings(bounded, max_examples=examples, derandomize=always_the_same)
    @given(batch=batches, joined=st.booleans())
    def send(batch: list[Recipe], joined: bool) -> None:
        target.send(batch, joined=joined)

    return send


@pytest.mark.system  # for the time it takes
def test_whatever_is_sent_is_answered_and_training_goes_on(target: Target) -> None:
    target.send(SILENT, joined=True)
    sender(target, 12, always_the_same=True)()
    target.assert_no_growth()
    summary = target.finish()
    print(f"{target.trainer.rounds} rounds; {dict(target.outcomes)}; memory {[round(mib) for mib in target.used]}")
    # It was worth it: every method was called, and more was refused than the first thing that can be wrong.
    assert {outcome.partition(":")[0] for outcome in target.outcomes} >= {*METHODS, "http/2"}
    assert {"malformed", "not_a_member"} <= set(summary["refusals"])
    assert len(summary["refusals"]) >= 5, summary["refusals"]


@pytest.mark.system  # for the time it takes
def test_with_suspensions_only_the_fuzzer_is_suspended(tmp_path: Path) -> None:
    """As configured by default: the honest clients, who share a machine with it, go on (else a batch fails)."""
    with fuzzed(tmp_path, strikes=Network().strikes) as target:
        target.earn_suspension()
        sender(target, 4, always_the_same=True)()
        target.finish()
        assert target.server.refusals(MINE)["suspended"] > 0
        assert not any(target.server.refusals(client_id)["suspended"] for client_id in range(MINE))


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 300)
def test_whatever_is_sent_for_as_long_as_it_is_told(target: Target) -> None:
    first = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    began, number = time.monotonic(), first
    try:
        while number == first or time.monotonic() < began + FUZZ_S:
            seed(number)(sender(target, 10, always_the_same=False))()
            number += 1
    except BaseException:
        print(f"\nonce more: make fuzz SEED={number} FUZZ_S=0; with all that went before: SEED={first}")
        raise
    target.assert_no_growth()
    summary = target.finish()
    memory = [round(mib) for mib in target.used[:: len(target.used) // 20 + 1]]
    print(
        f"\nseeds {first} to {number - 1}: {len(target.used)} batches in {time.monotonic() - began:.0f} s, meanwhile "
        f"{summary['rounds']} rounds; more memory in MiB {memory}; {dict(sorted(target.outcomes.items()))}"
    )


@pytest.mark.parametrize("ending", ["refused", "silent"])
def test_a_stream_can_be_ended_while_its_first_event_is_stuck(target: Target, ending: str) -> None:
    """The peer grants no window. For gRPC a second write is an error then, and so are the initial metadata."""
    broken = Part("heartbeat", (), (Change("insert", 0.0, 0, b"\xff"),))
    target.join()
    host, _, port = target.server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(
            OPENINGS["http/2"] + frame(SETTINGS, 0, 0, SETTINGS_OF["no window"]) + frame(SETTINGS, ACK, 0, b"")
        )
        peer.sendall(frame(HEADERS, END_HEADERS, 1, header_block(Open("Attend"))))
        peer.sendall(data_frames(Send(Part("attending"), end=False), 1, target.live))
        reached = target.trainer.rounds
        until(lambda: target.trainer.rounds > reached + 3, "rounds, of which it would be told")
        if ending == "refused":
            peer.sendall(data_frames(Send(broken, end=False), 1, target.live))
            until(lambda: target.server.refusals(None)["malformed"] == 1, "the refusal to be counted")
        else:
            until(lambda: f"taken for dead: client {MINE}" in target.server.log(), "it to be taken for dead")
        target.send([], joined=False)
    target.finish()

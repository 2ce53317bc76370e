"""A client at a parameter server that answers anything at all: it rejoins, or ends with a clear error."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import numpy as np
import pytest
from federations import small_experiment
from fuzz_messages import Edit, Live, Part, shown
from fuzz_server import Answer, HostileServer, Script, scripts
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from client.exchange import Exchange, Momentum, PublishedModel
from common.config import Experiment
from common.errors import ByzULDPError, ConfigError, JoinRefused, leaves

D = 10
ENDS_S = 45.0
"""Every wait of the client is of a second or two here, and no script makes it wait often."""
MOST_CALLS = 60
"""A client that asks more often, in a run of a few rounds, does not wait between its attempts."""
FUZZ_S = float(os.environ.get("FUZZ_S") or 60.0) / 4

KNOWN = {"completed", *(leaf.status for leaf in leaves())}

outcomes: Counter[str] = Counter()


def experiment() -> Experiment:
    network = {"rpc_deadline_s": 1.0, "round_deadline_s": 1.0, "leave_deadline_s": 1.0, "server_gone_s": 3.0}
    return small_experiment(network=network)


async def outcome_of(script: Script, most_calls: int = MOST_CALLS) -> tuple[str, HostileServer]:
    """How a client ends at such a server.

    Raises
    ------
    AssertionError
        Not at all, or by something else than its own errors, or after too many calls.
    """
    mine = experiment()
    live = Live("4b1d", 3, "secret", bytes(32), mine.fingerprint(), D, incarnation=bytes(range(16)), round_id=1)

    async def produce(model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
        yield live.client_id, np.zeros_like(model.theta)

    async with HostileServer(script, live) as server:
        exchange = Exchange(
            mine,
            address=server.address,
            tokens={live.client_id: live.token},
            schema_hash=live.schema_hash,
            num_parameters=D,
            produce=produce,
        )
        try:
            async with asyncio.timeout(ENDS_S):
                outcome = await exchange.run()
            how, said = outcome.status, outcome.message
        except ByzULDPError as problem:
            how = problem.status
            said = str(problem)
        except TimeoutError:
            raise AssertionError(f"the client does not end: {script}, {server.calls}") from None
        except Exception as problem:
            raise AssertionError(f"the client fails with {problem!r}: {script}") from problem
        finally:
            assert max(server.calls.values(), default=0) <= most_calls, f"it asks too often: {script}, {server.calls}"
        assert len(said) < 10_000, f"{script}: {len(said)} characters"
        assert all(line.isprintable() for line in said.splitlines()), f"{script}: {said}"
        assert how in KNOWN, f"{script}: {how}"
        beats = server.received["Attend"]
        assert beats <= 10 * ENDS_S, f"{beats} heartbeats: {script}"
        outcomes[how] += 1
        return how, server


async def all_of(batch: list[Script]) -> None:
    await asyncio.gather(*map(outcome_of, batch))


def sender(examples: int, *, always_the_same: bool) -> Callable[[], None]:
    """Tries so many batches of scripts."""

    @settings(
        max_examples=examples,
        derandomize=always_the_same,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(batch=st.lists(scripts(), min_size=8, max_size=16))
    def send(batch: list[Script]) -> None:
        try:
            asyncio.run(all_of(batch))
        except AssertionError as problem:
            raise AssertionError(f"{problem}\nin the batch\n{shown(batch)}") from problem

    return send


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether nothing was logged with a traceback, nor by asyncio about a task that nobody looked after."""
    return not [
        record
        for record in caplog.records
        if record.exc_info or (record.name == "asyncio" and record.levelno >= logging.ERROR)
    ]


@pytest.mark.system  # for the time it takes
def test_whatever_a_server_answers_a_client_ends_or_rejoins(caplog: pytest.LogCaptureFixture) -> None:
    sender(6, always_the_same=True)()
    assert quiet(caplog), caplog.text[-5000:]
    print(dict(outcomes))
    assert {"completed", "join_refused"} <= set(outcomes)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 300)
def test_whatever_a_server_answers_for_as_long_as_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    began, number = time.monotonic(), first
    try:
        while number == first or time.monotonic() < began + FUZZ_S:
            seed(number)(sender(5, always_the_same=False))()
            assert quiet(caplog), caplog.text[-5000:]
            caplog.clear()
            number += 1
    except BaseException:
        print(f"\nonce more: make fuzz SEED={number} FUZZ_S=0")
        raise
    print(f"\nseeds {first} to {number - 1} in {time.monotonic() - began:.0f} s: {dict(outcomes)}")


# ---------------------------------------------------------------- one thing at a time


def joined_with(**values: object) -> Script:
    """A joining of which some numbers are not what they may be."""
    edits = tuple(Edit(("joined", name), value) for name, value in values.items())
    return Script({"Join": (Answer((Part("joined", edits),)),)})


@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_s": float("nan")},
        {"heartbeat_s": -1.0},
        {"heartbeat_s": 5e-324},
        {"heartbeat_s": float("inf")},
        {"liveness_s": float("nan")},
        {"liveness_s": 5e-324},
        {"chunk_bytes": 1},
        {"incarnation": b""},
        {"run_id": "x" * 1000},
        {"run_id": "\x1b[2J"},
        {"next_round": 2**64 - 1},
        {"rounds": 2**64 - 1},
    ],
    ids=lambda values: "-".join(map(str, values)),
)
async def test_a_server_that_promises_the_impossible_is_not_joined(values: dict[str, object]) -> None:
    how, server = await outcome_of(joined_with(**values))
    assert how == JoinRefused.status
    assert set(server.calls) == {"Join"}


@pytest.mark.parametrize("said", ["", "[", "[]", "7", '{"training.seed": {}}', "[" * 100_000, '{"a": "\\u001b[2J"}'])
async def test_a_server_whose_configuration_cannot_be_read_has_another_one(said: str) -> None:
    refused = Part("not joined", (Edit(("public_configuration",), said),))
    how, _ = await outcome_of(Script({"Join": (Answer((refused,)),)}))
    assert how == ConfigError.status


@pytest.mark.parametrize(
    "part",
    [
        Part("model", (Edit(("header", "model", "element_count"), 0),)),
        Part("model"),
        Part("model", (Edit(("header", "model"), None),)),
        Part("not yet"),
        Part("model", (Edit(("header", "model", "round_id"), 2**64 - 1),)),
    ],
    ids=["no elements", "the same model, again", "no outcome", "not yet, at once", "the last round there can be"],
)
async def test_a_client_that_gets_no_model_does_not_ask_without_pause(part: Part) -> None:
    """It is held to so many calls; here it goes on for as long as it is let."""
    with suppress(TimeoutError):
        async with asyncio.timeout(3.0):
            await outcome_of(Script({"PullModel": (Answer((part,)),) * 10_000}), most_calls=100)

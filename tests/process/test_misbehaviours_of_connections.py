"""Every way in which an adversary may lean on connections, streams and names, between real processes.

As in the tests of pushes, :meth:`misbehaving.Aftermath.assert_held` says what holds for all of them. Floods are held to
a rate, so that they take a small share of a core: what a whole core of them costs is measured by the benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from federations import ServerProcess, until
from misbehaving import ADVERSARIES, AT_TIMES, HONEST, Aftermath, misbehaved

from ps.limits import limits_of

WAITS = 2
"""Rounds that may last a whole grace: the first, and one that a busy machine has made so long."""

Misbehave = Callable[..., Aftermath]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    """The same run with adversaries that behave, but for the values they send."""
    return misbehaved(tmp_path_factory.mktemp("control"), {"name": "none"})


@pytest.fixture
def misbehave(tmp_path: Path, control: Aftermath) -> Misbehave:
    """Run a misbehaviour, and check what holds for all of them."""

    def run(name: str, waits: int = WAITS, **parameters: Any) -> Aftermath:
        apart = ("network", "training", "tls", "meanwhile")
        environment = {key: parameters.pop(key) for key in apart if key in parameters}
        after = misbehaved(tmp_path, {"name": name, **parameters}, **environment)
        print(after.report(control))
        after.assert_held()
        after.assert_did_not_wait(besides=waits)
        assert after.adversary_exit == 0, after.adversary.log()
        return after

    return run


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def times(after: Aftermath) -> int:
    """How often the adversary says that it did what it is here for."""
    said = re.search(rf"{after.experiment.misbehaviour.names[0]}: begun (\d+) times", after.adversary.log())
    assert said is not None, after.adversary.log()
    return int(said[1])


def assert_nobody_was_refused(after: Aftermath) -> None:
    """What was done came to no call of ours; the adversary's own momenta may be late because of it."""
    assert after.refusals(None) == {}
    assert set(after.adversaries_refusals) <= AT_TIMES


# ---------------------------------------------------------------- too many


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("connections", [120, slow(1000)])
def test_connections_are_taken_up_to_their_maximum_and_keep_no_member_from_training(
    misbehave: Misbehave, connections: int
) -> None:
    seen: list[int] = []

    def watch(server: ServerProcess) -> None:
        process = psutil.Process(server.pid)
        maximum = limits_of(server.experiment.network, 8).connections

        def full() -> bool:
            try:
                seen.append(sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections()))
            except psutil.Error:
                return True  # it has ended: nothing was seen
            return seen[-1] >= maximum - 1

        until(full, "the connections to be taken")

    after = misbehave(
        "connection_flood", connections=connections, per_second=500.0, meanwhile=watch, training={"rounds": 60}
    )
    assert times(after) > connections
    assert max(seen) >= limits_of(after.experiment.network, 8).connections - 1
    assert_nobody_was_refused(after)


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("streams", [60, slow(1000)])
def test_calls_that_say_nothing_or_stop_half_way_end_and_keep_no_member_from_training(
    misbehave: Misbehave, streams: int
) -> None:
    after = misbehave(
        "half_open_streams",
        waits=2 * WAITS,  # each of the two answers now and then
        streams=streams,
        per_second=200.0,
        network={"first_message_s": 0.2, "max_strangers": 20},
    )
    assert times(after) > streams
    # Its own exchange finds no room among them, joins anew, and supersedes the calls that it made before.
    assert {"truncated"} <= set(after.refusals(None)) <= {"truncated", "superseded", "not_a_member"}
    assert after.adversaries_refusals["too_many_calls"] + after.adversaries_refusals["row_busy"] > 0
    # Of a future round: calls that it opened for round 0 before that was open.
    assert set(after.adversaries_refusals) <= {"too_many_calls", "row_busy", "evicted", "future_round", *AT_TIMES}


@pytest.mark.system  # for the time it takes
def test_identities_that_join_without_end_are_slowed_down_and_not_waited_for(misbehave: Misbehave) -> None:
    after = misbehave("join_storm", per_second=100.0, network={"max_joins": 10})
    joins = after.experiment.network.max_joins
    for client_id in ADVERSARIES:
        kinds = after.refusals(client_id)
        assert kinds["too_many_calls"] > 0, kinds
        assert kinds["evicted"] < 2 * joins, kinds
        assert set(kinds) <= {"too_many_calls", "evicted", "run_is_over"}, kinds
    assert after.answers(ADVERSARIES) == 0
    assert after.refusals(None) == {}


# ---------------------------------------------------------------- under another name


def test_who_claims_another_name_without_its_token_or_incarnation_gets_nowhere_and_harms_nobody(
    misbehave: Misbehave,
) -> None:
    """A name that is only claimed stands for nobody, or a stranger could have an honest client suspended."""
    after = misbehave("impersonation", per_second=100.0)
    # Truncated: what was on its way when the run, and the impostor with it, ended.
    assert {"bad_token"} < set(after.refusals(None)) <= {"bad_token", "not_a_member", "superseded", "truncated"}
    assert times(after) > len(HONEST)
    assert set(after.adversaries_refusals) <= AT_TIMES
    assert "has joined from" not in after.server.log()


@pytest.mark.system  # for the time it takes
def test_with_certificates_neither_a_members_own_nor_a_forged_one_speaks_for_another(misbehave: Misbehave) -> None:
    after = misbehave("impersonation", per_second=100.0, tls=True)
    # Of a forged certificate the server's code hears nothing: the handshake fails.
    assert "wrong_certificate" in after.server.refusals()
    assert set(after.adversaries_refusals) <= {"wrong_certificate", *AT_TIMES}


# ---------------------------------------------------------------- not this protocol


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("tls", [False, slow(True)])
@pytest.mark.parametrize("name", ["garbage", "http1", "tls_confusion"])
def test_what_is_not_this_protocol_is_hung_up_on(misbehave: Misbehave, name: str, tls: bool) -> None:
    after = misbehave(name, per_second=100.0, tls=tls)
    assert times(after) > 10
    assert_nobody_was_refused(after)


@pytest.mark.system  # for the time it takes
def test_metadata_of_any_size_is_not_kept(misbehave: Misbehave) -> None:
    after = misbehave("huge_metadata", per_second=100.0)
    assert times(after) > 4
    assert_nobody_was_refused(after)


# ---------------------------------------------------------------- HTTP/2 alone


@pytest.mark.system  # for the time it takes
def test_pings_and_settings_are_answered_or_hung_up_on(misbehave: Misbehave) -> None:
    after = misbehave("ping_flood", per_second=5_000.0)
    assert times(after) > 4  # who pings too often is thrown out, and comes again
    assert_nobody_was_refused(after)


@pytest.mark.system  # for the time it takes
def test_calls_that_are_reset_at_once_leave_nothing_behind(misbehave: Misbehave) -> None:
    after = misbehave("rapid_reset", per_second=200.0)
    assert set(after.refusals(None)) == {"truncated"}
    assert set(after.adversaries_refusals) <= AT_TIMES


@pytest.mark.system  # for the time it takes
def test_models_that_are_never_read_cost_whoever_asked_for_them_its_own_calls(misbehave: Misbehave) -> None:
    after = misbehave("never_reads", connections=4)
    assert after.adversaries_refusals["too_many_calls"] > 0
    assert set(after.adversaries_refusals) <= {"too_many_calls", *AT_TIMES}

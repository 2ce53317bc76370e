"""Every way in which an identity may break a push, or lean on its timing, between real processes.

Two of eight clients are an adversary's, whose values are an attack's and whose manners are the misbehaviour's. Whatever
it does, :meth:`misbehaving.Aftermath.assert_held` says: the run completes, every honest client is in every round and is
refused nothing, the model is to the last bit the one that those who answered make, the ledger can be recomputed, and
the parameter server needs no more memory than its formula says.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from misbehaving import ADVERSARIES, AT_TIMES, BREACHES, GRACE_S, Aftermath, misbehaved

WAITS = 6
"""Of thirty rounds, how many may last a whole grace: the first ones, and those that a busy machine makes so long."""
NO_SUCH_MEMBER = {"not_a_member", "superseded"}

Misbehave = Callable[..., Aftermath]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    """The same run with adversaries that behave, but for the values they send."""
    return misbehaved(tmp_path_factory.mktemp("control"), {"name": "none"})


@pytest.fixture
def misbehave(tmp_path: Path, control: Aftermath) -> Misbehave:
    """Run a misbehaviour, and check what holds for all of them."""

    def run(
        name: str,
        counted: Callable[..., Any] = lambda row: row,
        **parameters: Any,
    ) -> Aftermath:
        environment = {key: parameters.pop(key) for key in ("network", "training", "tls") if key in parameters}
        after = misbehaved(tmp_path, {"name": name, **parameters}, **environment)
        print(after.report(control))
        after.assert_held(counted)
        after.assert_did_not_wait(besides=WAITS)
        assert after.adversary_exit in (-signal.SIGKILL if name == "crash" else 0, None), after.adversary.log()
        return after

    return run


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def test_the_control_run_has_every_answer_and_no_refusal(control: Aftermath) -> None:
    control.assert_held()
    control.assert_did_not_wait(besides=WAITS)
    assert control.server.refusals() == {}
    assert set(map(len, control.answered)) == {control.experiment.federation.clients}


# ---------------------------------------------------------------- no answer, or none in time


def test_silent_identities_are_waited_for_once_and_cost_nothing_afterwards(misbehave: Misbehave) -> None:
    after = misbehave("silence")
    assert after.answers(ADVERSARIES) == 0
    assert after.server.refusals() == {}


@pytest.mark.system  # for the time it takes
def test_a_process_that_dies_in_the_middle_of_its_momenta_leaves_no_trace_in_the_model(misbehave: Misbehave) -> None:
    after = misbehave("crash", at_round=3)
    assert [who & set(ADVERSARIES) for who in after.answered[:3]] == [set(ADVERSARIES)] * 3
    assert after.answers(ADVERSARIES) == 2 * 3
    for client_id in ADVERSARIES:
        assert set(after.refusals(client_id)) == {"truncated"}


@pytest.mark.system  # for the time it takes
def test_a_momentum_that_comes_a_byte_at_a_time_is_cut_off_when_its_round_closes(misbehave: Misbehave) -> None:
    after = misbehave("slow_loris", bytes_per_s=20.0)
    assert after.answers(ADVERSARIES) == 0
    after.assert_refused("late")


@pytest.mark.system  # for the time it takes
def test_who_answers_at_the_last_moment_is_soon_not_waited_for(misbehave: Misbehave) -> None:
    after = misbehave("eleventh_hour", seconds_before=GRACE_S / 3)
    assert after.answered[0] >= set(ADVERSARIES)
    assert after.answers(ADVERSARIES) < after.answers()
    assert set(after.adversaries_refusals) <= AT_TIMES


@pytest.mark.system  # for the time it takes
def test_who_answers_just_too_late_is_told_so_and_has_no_part_in_the_round(misbehave: Misbehave) -> None:
    after = misbehave("late", training={"rounds": 60})
    assert after.answers(ADVERSARIES) <= 2 * 3  # where the first rounds took longer than their settings say
    assert set(after.adversaries_refusals) & {"late", "stale_round"}
    assert set(after.adversaries_refusals) <= AT_TIMES


# ---------------------------------------------------------------- of one momentum too many, or of the wrong round


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("order", ["attack_first", slow("attack_last"), slow("at_once")])
def test_of_two_momenta_for_a_round_the_first_counts(misbehave: Misbehave, order: str) -> None:
    after = misbehave("equivocation", (lambda row: -row) if order == "attack_last" else (lambda row: row), order=order)
    assert after.answers(ADVERSARIES) >= 2 * 3
    after.assert_refused("row_busy" if order == "at_once" else "equivocation")


@pytest.mark.system  # for the time it takes
def test_a_momentum_of_an_old_round_is_refused_as_stale(misbehave: Misbehave) -> None:
    after = misbehave("replay")
    after.assert_refused("stale_round")
    assert after.answers(ADVERSARIES) > len(after.rounds)  # of twice as many


@pytest.mark.system  # for the time it takes
def test_bytes_under_another_name_are_refused_and_held_against_nobody_else(misbehave: Misbehave) -> None:
    after = misbehave("replay", of="another")
    assert set(after.refusals(None)) & NO_SUCH_MEMBER
    assert set(after.adversaries_refusals) <= {"row_busy", *AT_TIMES}


@pytest.mark.slow
def test_with_certificates_bytes_under_another_name_do_not_get_so_far(misbehave: Misbehave) -> None:
    after = misbehave("replay", of="another", tls=True)
    assert not NO_SUCH_MEMBER & set(after.server.refusals())
    assert after.server.refusals()["wrong_certificate"] > 0


@pytest.mark.system  # for the time it takes
def test_a_momentum_for_a_round_that_is_not_open_is_refused_and_kept_nowhere(misbehave: Misbehave) -> None:
    misbehave("future_round").assert_refused("future_round")


# ---------------------------------------------------------------- not what the model needs


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize(
    ("where", "by", "kind"),
    [
        ("header", -1, "wrong_schema"),
        slow("header", 1, "too_large"),
        slow("trailer", -1, "malformed"),
        slow("payload", -1, "malformed"),
        slow("payload", 3, "too_large"),
    ],
)
def test_a_momentum_with_a_wrong_count_is_refused(misbehave: Misbehave, where: str, by: int, kind: str) -> None:
    misbehave("wrong_count", where=where, by=by).assert_refused(kind)


def test_a_momentum_with_a_wrong_digest_is_refused(misbehave: Misbehave) -> None:
    misbehave("wrong_digest").assert_refused("checksum")


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize(("dtype", "kind"), [("float64", "too_large"), slow("float16", "malformed")])
def test_a_momentum_of_another_dtype_is_refused(misbehave: Misbehave, dtype: str, kind: str) -> None:
    misbehave("wrong_dtype", dtype=dtype).assert_refused(kind)


@pytest.mark.system  # for the time it takes
def test_a_momentum_of_another_shape_is_refused(misbehave: Misbehave) -> None:
    misbehave("wrong_schema").assert_refused("wrong_schema")


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("order", ["reversed", slow("swapped")])
def test_chunks_in_another_order_are_refused(misbehave: Misbehave, order: str) -> None:
    misbehave("shuffled_chunks", order=order).assert_refused("malformed")


@pytest.mark.system  # for the time it takes
def test_chunks_that_overlap_are_refused(misbehave: Misbehave) -> None:
    misbehave("overlapping_chunks").assert_refused("malformed")


@pytest.mark.slow
def test_who_breaks_the_protocol_and_never_answers_is_not_waited_for(misbehave: Misbehave) -> None:
    after = misbehave("wrong_digest", then_answer=False)
    assert after.answers(ADVERSARIES) == 0


# ---------------------------------------------------------------- too much of it


@pytest.mark.system  # for the time it takes
def test_a_terabyte_is_refused_by_its_header_and_what_is_sent_of_it_is_kept_nowhere(misbehave: Misbehave) -> None:
    misbehave("oversize", megabytes=1.0).assert_refused("too_large")


@pytest.mark.slow
def test_a_gigabyte_of_it_is_kept_nowhere_either(misbehave: Misbehave) -> None:
    """Each call has a chunk of a megabyte for the server at least, of which it takes what its window holds."""
    after = misbehave("oversize", network={"chunk_bytes": 1 << 20}, training={"rounds": 120})
    after.assert_refused("too_large")
    assert after.adversaries_refusals.total() > 100
    assert after.grown < 100 << 20


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("of", ["nothing", slow("headers"), slow("zeros")])
def test_a_momentum_that_never_ends_is_ended(misbehave: Misbehave, of: str) -> None:
    after = misbehave("endless", of=of)
    assert after.answers(ADVERSARIES) == 0
    assert set(after.adversaries_refusals) <= BREACHES | AT_TIMES | {"suspended"}

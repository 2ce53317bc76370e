"""Bugs that one could have written in the server's parts. The machine of :mod:`service_machine` has to find each.

A bug stands in place of one function of the product. Those of rounds and roster are in :mod:`round_mutants`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from round_mutants import CountsSleepAsSilence

from common.rpc.frames import Frame
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps import coordinator as coordinator_module
from ps import journal, tensors, update
from ps import round_maker as round_maker_module
from ps import store as store_module
from ps.coordinator import Coordinator
from ps.inbox import Inbox, Writer
from ps.membership import Attendance, Membership
from ps.reception import Reception
from ps.round_maker import RoundMaker
from ps.round_policy import RoundPolicy
from ps.store import CommittedRound, PreparedRound, RunStore

__all__ = ["BUGS", "planted"]

BUGS: dict[str, tuple[Any, str, Any]] = {}
"""Where each goes: an owner, the name of its function, and what stands there instead."""


def instead_of(owner: Any, name: str) -> Callable[[Any], Any]:
    def plant(bug: Any) -> Any:
        BUGS[bug.__name__] = owner, name, bug
        return bug

    return plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    with patch.object(*BUGS[name]):
        yield


class Product:
    """The functions that are replaced, for the bugs that use them."""

    inbox_open, inbox_close, check = Inbox.open, Inbox.close, Membership.check
    schedule_tick, publish = Coordinator._schedule_tick, Coordinator._publish
    init_maker, open = RoundMaker.__init__, RunStore.open
    release_round, policy_of = update.release_round, coordinator_module.policy_of


# -------------------------------------------------------------------- the inbox


@instead_of(Inbox, "close")
def leaves_the_last_round_in(inbox: Inbox) -> list[int]:
    """The row of a client that does not answer is that of a round before."""
    rows = inbox._host.clone()
    complete = Product.inbox_close(inbox)
    inbox._host.copy_(rows)
    return complete


@instead_of(Inbox, "open")
def remembers_who_answered(inbox: Inbox) -> None:
    """Who answered the round before has answered this one."""
    digests = [row.digest for row in inbox._rows]
    Product.inbox_open(inbox)
    for row, digest in zip(inbox._rows, digests, strict=True):
        row.digest = digest


@instead_of(Inbox, "_check")
def fences_nobody(_inbox: Inbox, _writer: Writer) -> None:
    """Who began to write before a round closed, or before a newer incarnation joined, may go on."""


@instead_of(Inbox, "expel")
def expels_nobody(_inbox: Inbox, _client_id: int) -> None:
    """What an older incarnation began to write keeps the row busy."""


@instead_of(Inbox, "abandon")
def frees_no_row(_inbox: Inbox, _writer: Writer) -> None:
    """What broke off keeps the row busy."""


# -------------------------------------------------------------------- reception and membership


@instead_of(Reception, "_compare")
async def takes_anything_for_a_duplicate(_reception: Reception, _frame: Frame[Any], _earlier: bytes) -> pb.Accepted:
    """A second momentum for a round is acknowledged, whatever it says."""
    return pb.Accepted(duplicate=True)


@instead_of(Membership, "check")
def lets_the_superseded_speak(members: Membership, caller: pb.Caller, peer: Any, **how: bool) -> None:
    """Any incarnation speaks for its identity."""
    try:
        Product.check(members, caller, peer, **how)
    except Refused as refused:
        if refused.kind != pb.SUPERSEDED:
            raise


@instead_of(Membership, "seen")
def tells_the_rounds_of_nobody_who_revived(membership: Membership, client_id: int) -> None:
    """A momentum revives its sender in the roster; the rounds are not told."""
    member = membership.roster.members.get(client_id)
    if member is not None:
        membership.roster.heartbeat(client_id, member.incarnation, membership._clock())


@instead_of(Membership, "detach")
def sets_no_timer_for_the_lost(membership: Membership, attendance: Attendance) -> None:
    """A stream broke; that its members may be dead earlier now is not looked at."""
    membership._attendances.discard(attendance)
    for client_id, incarnation in attendance.callers.items():
        membership.roster.lost(client_id, incarnation, membership._clock())


# -------------------------------------------------------------------- the coordinator


@instead_of(coordinator_module, "Roster")
class TakesItsSleepForSilence(CountsSleepAsSilence):
    """A server that was stopped counts the time as its clients' silence."""


@instead_of(coordinator_module, "policy_of")
def asks_for_one_too_few(*given: Any) -> RoundPolicy:
    """The quorum is off by one."""
    policy = Product.policy_of(*given)
    object.__setattr__(policy, "quorum", max(1, policy.quorum - 1))
    return policy


@instead_of(Coordinator, "_schedule_tick")
def sets_no_timer_for_the_grace(coordinator: Coordinator) -> None:
    """The timer is set when a round opens, and not when answers bring it forward."""
    timer = coordinator._timer
    if timer is None or timer.cancelled() or timer.when() <= coordinator._now():
        Product.schedule_tick(coordinator)


@instead_of(Coordinator, "_publish")
def sends_the_model_before(coordinator: Coordinator, committed: CommittedRound) -> None:
    """The model that is sent is still the one of the round before."""
    before = coordinator._broadcast
    Product.publish(coordinator, committed)
    if before.round_id >= 0:
        coordinator._broadcast = before


# -------------------------------------------------------------------- making and keeping rounds


@instead_of(RoundMaker, "__init__")
def resumes_without_its_momentum(maker: RoundMaker, *given: Any, **named: Any) -> None:
    """After a restart R is zero."""
    Product.init_maker(maker, *given, **named)
    maker._state.momentum.zero_()


@instead_of(round_maker_module, "release_round")
def averages_over_all(mechanism: Any, state: Any, rows: Any, answered: Any, *rest: Any, **named: Any) -> Any:
    """Who did not answer counts as zero, also without privacy."""
    return Product.release_round(mechanism, state, rows, tuple(range(mechanism.num_clients)), *rest, **named)


@instead_of(RunStore, "commit")
def publishes_what_it_has_not_committed(store: RunStore, prepared: PreparedRound) -> CommittedRound:
    """The commit is left for later."""
    head = journal.next_head(store.latest().head, prepared.ledger_json)
    given = prepared.round_id, prepared.theta, prepared.server_momentum, head
    store._latest = CommittedRound(*given, seal=store_module._SEAL)
    return store._latest


@instead_of(RunStore, "open")
def loses_the_last_commit(folder: Path, **how: Any) -> RunStore:
    """A commit is not durable until the next one: whoever takes the run up finds the round before."""
    with closing(sqlite3.connect(folder / journal.FILE)) as database:
        ((last,),) = database.execute("SELECT MAX(round_id) FROM models").fetchall()
        if last:
            (folder / "models" / tensors.file_name(last)).unlink(missing_ok=True)
            database.executescript(
                f"DROP TRIGGER IF EXISTS ledger_rows_live; DELETE FROM models WHERE round_id = {last};"  # noqa: S608
                f"DELETE FROM ledger WHERE round_id = {last}; UPDATE run SET round_id = {last} - 1;"
            )
    return Product.open(folder, **how)

"""A server under test: its lives, one after the other, and what must hold in all of them.

Coordinator, membership, reception, inbox, round maker and run folder are the product's (:mod:`offline_server`). The
books are the test's own: what was accepted, what went into a round, what was shown and what is on the disk must agree,
and every wait ends. What happens to the server is drawn in :mod:`service_machine`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from federations import small_experiment
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from offline_server import Killed, OfflineServer, Rows, Stream, TestClock

from common.config import Experiment
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.faults import IN_STORE
from ps.membership import Attendance
from ps.rounds import CloseRound, Phase, Rounds
from ps.store import CommittedRound

CLIENTS, ROUNDS, LEARNING_RATE, SERVER_MOMENTUM = 4, 3, 0.5, 0.5
HEARTBEAT_S, LIVENESS_S, PERIOD_S, JOIN_DEADLINE_S = 1.0, 4.0, 5.0, 12.0
WHOLE, IN_PIECES = 1024, 8  # bytes of a message: a row has 40

NETWORK = {
    "join_deadline_s": JOIN_DEADLINE_S,
    "join_grace_s": 3.0,
    "round_deadline_s": 10.0,
    "quorum_deadline_s": 6.0,
    "grace_factor": 1.0,
    "grace_floor_s": 0.5,
    "heartbeat_s": HEARTBEAT_S,
    "liveness_s": LIVENESS_S,
    "round_period_s": PERIOD_S,
    "publish_margin_s": 1.0,
    "chunk_bytes": 1024,
}


def experiment(byzantine: int, quorum: int, rule: str = "mean", **privacy: Any) -> Experiment:
    return small_experiment(
        federation={"clients": CLIENTS, "byzantine": byzantine, "quorum": quorum},
        training={"rounds": ROUNDS, "learning_rate": LEARNING_RATE, "server_momentum": SERVER_MOMENTUM},
        aggregation={"rule": rule},
        privacy=privacy,
        network=NETWORK,
    )


KINDS = {
    "plain": experiment(0, 2),
    "byzantine": experiment(1, 3),
    "private": experiment(1, 3, "trimmed_mean", epsilon=8.0, delta=1e-5),
    "scheduled": experiment(1, 3, "trimmed_mean", epsilon=8.0, delta=1e-5, round_timing="fixed"),
}


class Client:
    """What the machine knows of one identity."""

    def __init__(self) -> None:
        self.callers: list[pb.Caller] = []  # its incarnations; the last one is current
        self.member = False
        self.stream: Attendance | None = None
        self.in_touch_until = 0.0  # before then the server may not take it for dead

    @property
    def incarnation(self) -> bytes:
        return self.callers[-1].incarnation if self.callers else b""


class ServiceStage(RuleBasedStateMachine):
    """One run, and the lives of its server."""

    def __init__(self) -> None:
        super().__init__()
        # Dying is played, so nothing has to be durable, and memory is faster than a disk.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
        self.folder = Path(tempfile.mkdtemp(prefix="byzuldp-machine-", dir=memory))
        self.loop = TestClock()
        self.loop.set_exception_handler(self.in_a_callback)
        self.broken: AssertionError | None = None  # seen where the server would take it for a failure of its own
        self.in_order = False  # no event that was begun has failed
        self.dies_at, self.dies_after = "", 0
        self.forget()
        # What outlives a server.
        self.ledger: list[Any] = []
        self.shown: dict[int, bytes] = {}  # θ of every round that was published
        self.pulled: dict[int, bytes] = {}  # every byte that clients got
        self.expected: dict[int, tuple[Rows, Rows]] = {}  # θ and R where no noise hides them

    def forget(self) -> None:
        """A server is gone, and all that was only between it and its clients."""
        self.server: OfflineServer | None = None
        self.ended: str | None = None
        self.died = False
        self.clients = [Client() for _ in range(CLIENTS)]
        self.pushes: list[Stream] = []  # that have not been answered yet
        self.accepted: dict[int, dict[int, Rows]] = defaultdict(dict)  # round, identity

    # ---------------------------------------------------------------- a server's lives

    @property
    def running(self) -> OfflineServer:
        assert self.server is not None
        return self.server

    @property
    def up(self) -> bool:
        return self.server is not None and self.ended is None

    @property
    def rounds(self) -> Rounds:
        return self.running.coordinator.rounds

    @property
    def live(self) -> frozenset[int]:
        return self.running.coordinator.members.roster.live

    @property
    def collecting(self) -> bool:
        return self.rounds.phase is Phase.COLLECTING

    @initialize(kind=st.sampled_from(sorted(KINDS)), dies_at=st.sampled_from((*5 * ("",), *IN_STORE)))
    def begins(self, kind: str, dies_at: str) -> None:
        """A new run; the server may die over θ_0."""
        self.experiment = KINDS[kind]
        self.private, self.scheduled = self.experiment.privacy.epsilon is not None, kind == "scheduled"
        self.dies_at, self.dies_after = dies_at, 1
        self.starts()
        self.in_order = True

    def is_up(self) -> bool:
        if self.ended not in (None, "completed"):
            self.buried()
        if self.server is None:
            self.starts()
        return self.up

    def starts(self) -> None:
        self.died = False
        with suppress(Killed):
            self.server = OfflineServer(
                self.folder,
                self.experiment,
                self.loop,
                fault=self.fault,
                closing=self.watched(self.closing),
                published=self.watched(self.published),
            )
            self.does(lambda: None)

    def fault(self, point: str) -> None:
        if point == self.dies_at:
            self.dies_after -= 1
            if self.dies_after == 0:
                self.died, self.dies_at = True, ""
                raise Killed(point)

    def in_a_callback(self, _loop: object, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if not isinstance(problem, Killed):
            self.broken = AssertionError(f"{context['message']}: {problem!r}")

    def watched(self, check: Callable[..., None]) -> Callable[..., None]:
        def watch(*what: Any) -> None:
            try:
                check(*what)
            except AssertionError as problem:
                self.broken = self.broken or problem

        return watch

    def does(self, what: Callable[[], Any]) -> Any:
        """Something, and all that follows from it at once; what it returned, or None if the server died of it."""
        result = None
        with suppress(Killed):
            result = self.loop.settle(what)
        self.settled()
        return result

    def settled(self) -> None:
        """Bury the server if it died, or take down how it ended."""
        if self.broken is not None:
            raise self.broken
        if self.died:
            self.buried()
        elif self.up and self.running.running.done():
            end = self.running.running.result()
            self.running.store.finish(end.status, end.message)
            self.ended = end.status
        if self.up:
            self.who_keeps_in_touch_is_live()
            self.nothing_is_overdue()

    def buried(self) -> None:
        if self.server is not None:
            self.server.die()
        self.forget()

    # ---------------------------------------------------------------- what must hold

    def closing(self, closed: CloseRound, rows: Rows) -> None:
        """A round is about to be made of these rows."""
        answers = self.accepted[closed.round_id]
        assert closed.answered == tuple(sorted(answers)), f"{closed}: {sorted(answers)} were accepted"
        if not self.scheduled:
            assert len(answers) >= self.experiment.federation.needed, f"{closed} below the quorum"
        for client_id, row in enumerate(rows):
            sent = answers.get(client_id, np.zeros_like(row))
            shorter = np.all(row == row[0]) and abs(row[0]) <= abs(sent[0]) and row[0] * sent[0] >= 0
            assert np.array_equal(row, sent) or (self.private and shorter), f"client {client_id} did not send this row"
        if not self.private:
            before = np.frombuffer(self.shown[0], np.float32)
            theta, momentum = self.expected.get(closed.round_id, (before, np.zeros_like(before)))
            mean = np.mean([*answers.values()], axis=0)
            momentum = SERVER_MOMENTUM * momentum + (1.0 - SERVER_MOMENTUM) * mean
            self.expected[closed.round_id + 1] = theta - LEARNING_RATE * momentum, momentum

    def published(self, committed: CommittedRound) -> None:
        """A model leaves, and must be on the disk already."""
        round_id, theta = committed.round_id, committed.theta.tobytes()
        with closing(sqlite3.connect(f"file:{self.folder / 'run.sqlite'}?mode=ro", uri=True)) as database:
            ((last,),) = database.execute("SELECT MAX(round_id) FROM ledger").fetchall()
        assert round_id <= last, f"round {round_id} is published, and {last} was the last one committed"
        assert self.shown.setdefault(round_id, theta) == theta, f"round {round_id} is published twice, differently"
        if round_id in self.expected:
            np.testing.assert_allclose(committed.theta, self.expected[round_id][0], rtol=1e-5, atol=1e-6)

    @invariant()
    def what_was_committed_stands(self) -> None:
        if self.server is not None:
            rows = self.server.store.ledger_rows()
            assert rows[: len(self.ledger)] == self.ledger, "the ledger has changed"
            assert [row[0] for row in rows] == list(range(len(rows))), "a round is missing in the ledger"
            assert self.shown.keys() <= set(range(len(rows))), "published, and not committed"
            self.ledger = rows

    def who_keeps_in_touch_is_live(self) -> None:
        assert self.rounds._live == self.live, "the rounds do not know who is live"
        for client_id, client in enumerate(self.clients):
            kept = self.loop.now < client.in_touch_until
            assert client_id in self.live or not kept, f"client {client_id} kept in touch and is counted dead"

    def nothing_is_overdue(self) -> None:
        now = self.loop.now
        for asked in (self.rounds.next_tick(now), self.running.coordinator.members.roster.next_tick(now)):
            assert asked is None or asked > now, f"{self.rounds.phase.value}: something is due, and no timer was set"

    # ---------------------------------------------------------------- the end

    def comes_to_an_end(self) -> None:
        """Nobody does anything any more."""
        self.dies_at = ""
        if self.server is None:
            self.starts()
        longest = self.loop.now + self.running.policy.longest_s(ROUNDS)
        while self.ended is None:
            if self.loop.work:
                self.does(self.loop.work.pop(0))
                continue
            due = self.loop.next_timer()
            assert due < float("inf"), f"nothing will ever happen again, and it is {self.rounds.phase.value}"
            self.loop.advance(max(0.0, due - self.loop.now))
            self.settled()
            assert self.loop.now <= longest + 2.0, "it waits without end"
        assert self.ended in ("completed", "quorum_lost", "interrupted"), self.ended
        assert self.running.store.status().status == self.ended
        self.what_was_committed_stands()

    def teardown(self) -> None:
        self.buried()
        self.loop.close()
        shutil.rmtree(self.folder)

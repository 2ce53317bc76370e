"""The server's real parts against what must hold, whatever clients do, whenever time passes and wherever it dies.

Hypothesis plays clients that join, attend, push whole or broken momenta, fall silent and come back, a thread that
makes rounds when it gets to it, a clock, and a death at any named point of a round. Coordinator, membership,
reception, inbox, round maker and run folder are the product's. What was seen and what is on the disk must agree.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import small_experiment
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from offline_server import Killed, OfflineServer, Rows, Stream, TestClock
from round_mutants import ClosesBelowQuorum, CountsSleepAsSilence

from common.config import Experiment
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps import coordinator as coordinator_module
from ps.coordinator import Coordinator
from ps.faults import POINTS
from ps.inbox import Inbox
from ps.membership import Attendance, Membership
from ps.rounds import CloseRound, Phase
from ps.store import CommittedRound

CLIENTS, ROUNDS, LEARNING_RATE = 4, 3, 0.5
HEARTBEAT_S, LIVENESS_S = 1.0, 4.0
CHUNK_BYTES = 1024  # a row is one message: 40 bytes

NETWORK = {
    "join_deadline_s": 12.0,
    "join_grace_s": 3.0,
    "round_deadline_s": 10.0,
    "quorum_deadline_s": 6.0,
    "grace_factor": 1.0,
    "grace_floor_s": 0.5,
    "heartbeat_s": HEARTBEAT_S,
    "liveness_s": LIVENESS_S,
    "round_period_s": 5.0,
    "publish_margin_s": 1.0,
    "first_message_s": 50.0,
    "chunk_bytes": CHUNK_BYTES,
}


def experiment(byzantine: int, quorum: int, **privacy: Any) -> Experiment:
    return small_experiment(
        federation={"clients": CLIENTS, "byzantine": byzantine, "quorum": quorum},
        training={"rounds": ROUNDS, "learning_rate": LEARNING_RATE},
        aggregation={"rule": "trimmed_mean" if privacy else "mean"},
        privacy=privacy,
        network=NETWORK,
    )


KINDS = {
    "plain": experiment(0, 2),
    "byzantine": experiment(1, 3),
    "private": experiment(1, 3, epsilon=8.0, delta=1e-5),
    "on a public schedule": experiment(1, 3, epsilon=8.0, delta=1e-5, round_timing="fixed"),
}

clients = st.integers(0, CLIENTS - 1)
everybody_or_some = st.just(tuple(range(CLIENTS))) | st.lists(clients, unique=True).map(tuple)
values = st.integers(-8, 8).map(lambda k: k / 8)


def step(name: str, **how: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(how))


answering = step(
    "several_answer", who=everybody_or_some, value=values, joining=st.booleans(), then=st.sampled_from((0, 1, 2, 2))
)
pushing = step(
    "pushes_a_momentum",
    client_id=clients,
    value=values,
    other_round=st.sampled_from((0, 0, 0, 0, 0, 0, -1, 1)),
    superseded=st.sampled_from((False, False, False, True)),
    whole=st.booleans(),
)
passing = step("time_passes", seconds=st.sampled_from((0.25, 0.5, 0.5, 1.0, 3.0, 5.0, 20.0)), beating=st.booleans())
steps = st.one_of(  # each as often as it is named
    *(answering, answering, answering, pushing, pushing, pushing, passing, passing, passing),
    *(working := step("the_thread_works", until_done=st.booleans()), working),
    step("a_push_goes_on", breaks=st.booleans()),
    step("joins", client_id=clients, attends=st.booleans()),
    step("attends", client_id=clients),
    step("is_cut_off", client_id=clients),
    step("leaves", client_id=clients),
    step("somebody_pulls", ahead=st.integers(0, 1)),
    step("was_stopped_for", seconds=st.sampled_from((0.25, 30.0, 1000.0))),
    step("is_unlucky", killed_at=st.none() | st.sampled_from(POINTS), times=st.integers(1, 3)),
)


class Client:
    """What a test knows of one identity."""

    def __init__(self) -> None:
        self.caller: pb.Caller | None = None
        self.former: list[pb.Caller] = []
        self.stream: Attendance | None = None
        self.heard_at = -1e9
        self.lost = False

    def forgotten(self) -> None:
        """Whoever runs the server now knows nobody."""
        self.caller, self.stream, self.former = None, None, []


class Service(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # Dying is played, so nothing has to be durable, and memory is faster than a disk.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
        self.folder = Path(tempfile.mkdtemp(prefix="byzuldp-machine-", dir=memory))
        self.loop = TestClock()
        self.loop.set_exception_handler(self.in_a_callback)
        self.server: OfflineServer | None = None
        self.died, self.dies_at = False, ("", 0)
        self.clients = [Client() for _ in range(CLIENTS)]
        self.pushes: list[Stream] = []  # that are not whole yet
        self.accepted: dict[int, dict[int, Rows]] = defaultdict(dict)  # round, identity; of this life
        self.ended: str | None = None
        self.broken: AssertionError | None = None  # seen where the server would take it for a failure of its own
        # What outlives a server.
        self.ledger: list[Any] = []
        self.shown: dict[int, bytes] = {}  # θ of every round that was published
        self.pulled: dict[int, bytes] = {}  # every byte that clients got
        self.expected: dict[int, Rows] = {}  # θ where no noise hides it

    # ---------------------------------------------------------------- a server's lives

    @property
    def up(self) -> bool:
        return self.server is not None and self.ended is None

    @property
    def running(self) -> OfflineServer:
        assert self.server is not None
        return self.server

    @property
    def phase(self) -> Phase:
        return self.running.coordinator.rounds.phase

    @property
    def round_id(self) -> int:
        return self.running.coordinator.rounds.round_id

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def begins(self, kind: str) -> None:
        self.experiment = KINDS[kind]
        self.public_schedule = self.experiment.privacy.round_timing == "fixed"
        self.starts()

    @rule(what=steps)
    def and_then(self, what: tuple[str, dict[str, Any]]) -> None:
        """One rule for all, since hypothesis plays many a time with a part of the rules only."""
        name, how = what
        getattr(self, name)(**how)

    def is_up(self) -> bool:
        """A server that is down is started, a run that ended goes on; False when it is complete."""
        if self.ended not in (None, "completed"):
            self.buried()
        if self.server is None:
            self.starts()
        return self.up

    def starts(self) -> None:
        self.died, self.ended = False, None
        try:
            self.server = OfflineServer(
                self.folder,
                self.experiment,
                self.loop,
                fault=self.fault,
                closing=self.closing,
                published=self.published,
            )
        except Killed:  # over θ_0
            return
        self.does(lambda: None)

    def fault(self, point: str) -> None:
        name, times = self.dies_at
        if name == point:
            self.dies_at = (name, times - 1)
            if times == 1:
                self.dies_at, self.died = ("", 0), True
                raise Killed(point)

    def in_a_callback(self, _loop: object, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if not isinstance(problem, Killed):
            raise AssertionError(f"{context['message']}: {problem!r}")

    def settled(self) -> None:
        """Bury the server if it died, or take down how it ended."""
        if self.broken is not None:
            raise self.broken
        if self.died:
            self.buried()
        elif self.server is not None and self.server.running.done() and self.ended is None:
            end = self.server.running.result()
            self.server.store.finish(end.status, end.message)
            self.ended = end.status

    def buried(self) -> None:
        if self.server is not None:
            self.server.die()
            self.server, self.ended, self.died = None, None, False
            for client in self.clients:
                client.forgotten()
            self.pushes.clear()
            self.accepted.clear()

    def does(self, event: Callable[[], Any]) -> Any:
        """An event and all that follows from it at once; what it returned, or None if the server died of it."""
        try:
            result = self.loop.settle(event)
        except Killed:
            result = None
        self.settled()
        return result

    def is_unlucky(self, killed_at: str | None, times: int) -> None:
        """Killed at a point of the making of a round, or at once; or asked to stop."""
        if killed_at is not None:
            self.dies_at = (killed_at, times)
        elif times == 1:
            self.buried()
        elif self.is_up():
            self.does(lambda: self.running.coordinator.stop("interrupted", "asked to"))

    # ---------------------------------------------------------------- time, and the thread that makes rounds

    def time_passes(self, seconds: float, beating: bool) -> None:
        if not self.is_up():
            return
        for step in [HEARTBEAT_S] * int(seconds // HEARTBEAT_S) + [seconds % HEARTBEAT_S]:
            if self.up:
                self.loop.advance(step)
                self.settled()
                if beating:
                    self.all_beat()

    def was_stopped_for(self, seconds: float) -> None:
        """Clients went on meanwhile, and the server hears them when it wakes; but its timers come first."""
        if not self.is_up():
            return
        before = self.running.coordinator.members.roster.live
        self.loop.jump(seconds)
        self.settled()
        if seconds > 1.0 and self.server is not None:
            assert self.ended is None, f"{self.ended} before anybody could reach it"
            assert self.running.coordinator.members.roster.live == before, "its own sleep is taken for their silence"
        self.all_beat()

    def the_thread_works(self, until_done: bool) -> None:
        """A piece of making a round: the making itself, or saying that it is made."""
        for _ in range(2 if until_done else 1):
            if self.loop.work:
                self.does(self.loop.work.pop(0))

    # ---------------------------------------------------------------- clients

    def joins(self, client_id: int, attends: bool) -> None:
        if not self.is_up():
            return
        client, server = self.clients[client_id], self.running
        caller = self.does(lambda: server.join(client_id))
        if caller is None or self.server is None:
            return
        if client.caller is not None:
            client.former.append(client.caller)
        client.caller, client.stream = caller, None
        self.heard(client)
        if attends:
            self.attends(client_id)

    def heard(self, client: Client) -> None:
        client.heard_at, client.lost = self.loop.now, False

    def attends(self, client_id: int) -> None:
        client = self.clients[client_id]
        if self.up and client.caller is not None and client.stream is None:
            client.stream = self.does(lambda: self.running.attend(client.caller))
            self.heard(client)

    def all_beat(self) -> None:
        for client in self.clients:
            if self.server is not None and client.stream is not None:
                self.does(lambda stream=client.stream: self.running.coordinator.members.heartbeat(stream))
                self.heard(client)

    def is_cut_off(self, client_id: int) -> None:
        client = self.clients[client_id]
        if client.stream is not None:
            stream, client.stream, client.lost = client.stream, None, True
            self.does(lambda: self.running.coordinator.members.detach(stream))

    def leaves(self, client_id: int) -> None:
        client = self.clients[client_id]
        if self.up and client.caller is not None:
            self.does(lambda: self.running.leave(client.caller))
            client.forgotten()

    def pushes_a_momentum(self, client_id: int, value: float, other_round: int, superseded: bool, whole: bool) -> None:
        if not self.is_up():
            return
        client, server = self.clients[client_id], self.running
        caller = client.former[-1] if superseded and client.former else client.caller
        if caller is None:
            return
        round_id = max(0, self.round_id + other_round)
        row = np.full(server.task.num_parameters, value, np.float32)
        stream = self.does(lambda: server.push(caller, round_id, row, CHUNK_BYTES if whole else 8))
        if self.server is None:
            return
        self.pushes.append(stream)
        self.goes_on(stream, None if whole else 2)

    def several_answer(self, who: tuple[int, ...], value: float, joining: bool, then: int) -> None:
        """After joining, if they have not; and the thread does so many pieces of work on what they sent."""
        for client_id in who:
            if joining and self.clients[client_id].caller is None:
                self.joins(client_id, attends=True)
        if self.up and joining and self.public_schedule and self.phase is Phase.JOINING:
            self.time_passes(NETWORK["join_deadline_s"], beating=True)
        for client_id in who:
            self.pushes_a_momentum(client_id, value + client_id, 0, superseded=False, whole=True)
        if self.up and joining and self.public_schedule and self.phase is Phase.COLLECTING:
            self.time_passes(NETWORK["round_period_s"], beating=True)
        for _ in range(then):
            self.the_thread_works(until_done=False)

    def a_push_goes_on(self, breaks: bool) -> None:
        if not (self.up and self.pushes):
            return
        if breaks:
            stream = self.pushes[0]
            self.does(stream.break_off)
            self.answered(stream, may_be_accepted=False)
        else:
            self.goes_on(self.pushes[0])

    def goes_on(self, stream: Stream, messages: int | None = None) -> None:
        """Send more of a momentum, and look at how it is answered."""
        client = self.clients[stream.client_id]
        due = (
            self.phase is Phase.COLLECTING
            and stream.round_id == self.round_id
            and client.caller is not None
            and stream.incarnation == client.caller.incarnation
            and stream.client_id not in self.accepted[stream.round_id]
            and stream.writes
        )
        others = [other for other in self.pushes if other is not stream and other.incarnation == stream.incarnation]
        self.does(lambda: stream.send(messages))
        if self.server is None:
            return
        self.answered(stream, may_be_accepted=due)
        if stream.answer.done() and due and not others:
            assert stream.answer.exception() is None, f"refused, and nothing was wrong: {stream.answer.exception()}"
        stream.writes = due

    def answered(self, stream: Stream, *, may_be_accepted: bool) -> None:
        if self.server is None or not stream.answer.done():
            return
        self.pushes.remove(stream)
        rows = self.accepted[stream.round_id]
        problem = stream.answer.exception()
        if problem is None:
            answer = stream.answer.result()
            if answer.duplicate:
                assert np.array_equal(rows[stream.client_id], stream.row), "another momentum passes for the same"
                return
            assert may_be_accepted, f"client {stream.client_id} is accepted"
            rows[stream.client_id] = stream.row
            self.heard(self.clients[stream.client_id])
        else:
            assert isinstance(problem, Refused), repr(problem)
            if problem.kind == pb.EQUIVOCATION:
                assert not np.array_equal(rows[stream.client_id], stream.row), "the same passes for another momentum"

    def somebody_pulls(self, ahead: int) -> None:
        if not self.is_up():
            return
        wanted, phase = self.round_id + ahead, self.phase
        got = self.loop.run_until_complete(self.running.pull(wanted))
        assert (got is not None) is (ahead == 0 and phase is Phase.COLLECTING)
        if got is not None:
            assert self.pulled.setdefault(wanted, got) == got, f"round {wanted} was sent twice, differently"

    # ---------------------------------------------------------------- what the server does

    def closing(self, closed: CloseRound, rows: Rows) -> None:
        try:
            self.check_closing(closed, rows)
        except AssertionError as problem:
            self.broken = problem

    def check_closing(self, closed: CloseRound, rows: Rows) -> None:
        round_id, answers = closed.round_id, self.accepted[closed.round_id]
        assert closed.answered == tuple(sorted(answers)), f"{closed}: {sorted(answers)} were accepted"
        if not self.public_schedule:
            assert len(answers) >= self.running.policy.quorum, f"{closed} below the quorum"
        for client_id, row in enumerate(rows):
            sent = answers.get(client_id, np.zeros_like(row))
            same_direction = np.all(row == row[0]) and abs(row[0]) <= abs(sent[0]) and row[0] * sent[0] >= 0
            assert np.array_equal(row, sent) or (self.experiment.privacy.epsilon and same_direction), "another row"
        if self.experiment.privacy.epsilon is None:
            theta = np.frombuffer(self.shown[round_id], np.float32)
            self.expected[round_id + 1] = theta - LEARNING_RATE * np.mean([*answers.values()], axis=0)

    def published(self, committed: CommittedRound) -> None:
        round_id, theta = committed.round_id, committed.theta.tobytes()
        with sqlite3.connect(f"file:{self.folder / 'run.sqlite'}?mode=ro", uri=True) as database:
            ((last,),) = database.execute("SELECT MAX(round_id) FROM ledger").fetchall()
        database.close()
        assert round_id <= last, f"round {round_id} is published, and {last} was the last one committed"
        assert self.shown.setdefault(round_id, theta) == theta, f"round {round_id} is published twice, differently"
        if round_id in self.expected:
            np.testing.assert_allclose(committed.theta, self.expected[round_id], rtol=1e-5, atol=1e-6)

    @invariant()
    def what_was_committed_stands(self) -> None:
        if self.server is not None:
            rows = self.server.store.ledger_rows()
            assert rows[: len(self.ledger)] == self.ledger, "the ledger has changed"
            assert [row[0] for row in rows] == list(range(len(rows))), "a round is missing in the ledger"
            assert self.shown.keys() <= set(range(len(rows))), "published, and not committed"
            self.ledger = rows

    @invariant()
    def who_keeps_in_touch_is_live_and_the_rounds_know(self) -> None:
        if self.up:
            coordinator, now = self.running.coordinator, self.loop.now
            live = coordinator.members.roster.live
            assert coordinator.rounds._live == live, "the rounds do not know who is live"
            for client_id, client in enumerate(self.clients):
                if client.caller is not None and not client.lost and now - client.heard_at < LIVENESS_S:
                    assert client_id in live, f"client {client_id} kept in touch and is counted dead"

    @invariant()
    def every_wait_has_a_timer(self) -> None:
        if self.up and self.phase in (Phase.JOINING, Phase.COLLECTING):
            rounds, timer = self.running.coordinator.rounds, self.running.coordinator._timer
            due = rounds.next_tick(self.loop.now)
            assert due is not None
            assert timer is not None
            assert not timer.cancelled()
            assert timer.when() <= due, f"a timer for {timer.when()}: something is due at {due}"

    # ---------------------------------------------------------------- the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "experiment"):
                self.comes_to_an_end()
                self.can_be_resumed_and_completed()
        finally:
            self.buried()
            self.loop.close()
            shutil.rmtree(self.folder)

    def comes_to_an_end(self) -> None:
        """Nobody does anything any more."""
        self.dies_at = ("", 0)
        if self.server is None:
            self.starts()
        longest = self.loop.now + self.running.policy.longest_s(ROUNDS)
        while self.ended is None:
            if self.loop.work:
                self.does(self.loop.work.pop(0))
                continue
            due = self.loop.next_timer()
            assert due < float("inf"), f"nothing will ever happen again, and it is {self.phase.value}"
            self.loop.advance(max(0.0, due - self.loop.now))
            self.settled()
            assert self.loop.now <= longest + 2.0, "it waits without end"
        assert self.ended in ("completed", "quorum_lost", "interrupted"), self.ended
        assert self.running.store.status().status == self.ended
        self.what_was_committed_stands()

    def can_be_resumed_and_completed(self) -> None:
        for _ in range(ROUNDS + 1):
            self.several_answer(tuple(range(CLIENTS)), 0.5, joining=True, then=2)
            if self.up:
                self.time_passes(NETWORK["round_period_s"], beating=True)
        assert self.ended == "completed"
        self.what_was_committed_stands()
        assert len(self.ledger) == ROUNDS + 1


FEW = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_what_was_seen_and_what_is_on_the_disk_agree_whatever_happens():
    run_state_machine_as_test(Service, settings=FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_was_seen_and_what_is_on_the_disk_agree_in_many_more_runs():
    run_state_machine_as_test(Service, settings=settings(FEW, max_examples=2000, derandomize=False))


# Bugs that one could have written, in place of a function each.


def seen_and_not_told(membership: Membership, client_id: int) -> None:
    """A momentum revives its sender in the roster; the rounds are not told."""
    member = membership.roster.members.get(client_id)
    if member is not None:
        membership.roster.heartbeat(client_id, member.incarnation, membership._clock())


def expels_nobody(_inbox: Inbox, _client_id: int) -> None:
    """What an older incarnation began to write keeps the row busy."""


def leaves_the_last_round_in(inbox: Inbox) -> list[int]:
    """The row of a client that does not answer is that of the round before."""
    inbox._open, inbox._fence = False, inbox._fence + 1
    return [client_id for client_id, row in enumerate(inbox._rows) if row.digest is not None]


def remembers_who_answered(inbox: Inbox) -> None:
    """Who answered the round before has answered this one."""
    inbox._open, inbox._fence = True, inbox._fence + 1


def sets_no_timer_for_the_grace(coordinator: Coordinator) -> None:
    """The timer is set when a round opens, and not when answers bring it forward."""
    if coordinator._timer is None or coordinator._timer.cancelled() or coordinator._timer.when() <= coordinator._now():
        schedule_tick(coordinator)


schedule_tick = Coordinator._schedule_tick


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Membership, "seen", seen_and_not_told),
        (Inbox, "expel", expels_nobody),
        (Inbox, "close", leaves_the_last_round_in),
        (Inbox, "open", remembers_who_answered),
        (Coordinator, "_schedule_tick", sets_no_timer_for_the_grace),
        (coordinator_module, "Rounds", ClosesBelowQuorum),
        (coordinator_module, "Roster", CountsSleepAsSilence),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_machine_finds_planted_bugs(monkeypatch, owner, name, bug):
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Service, settings=settings(FEW, phases=[Part.generate], max_examples=200))

"""A hypothesis state machine over the server's real parts: whatever clients do, whenever time passes, wherever it dies.

Hypothesis plays clients that join, attend, push whole or broken momenta, fall silent and come back; the thread that
makes rounds, when it gets to it; a clock; and a death at any named point of a round. What must hold is asserted in
:mod:`service_stage`, and here how clients are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from offline_server import Stream
from service_stage import CLIENTS, HEARTBEAT_S, JOIN_DEADLINE_S, LIVENESS_S, PERIOD_S, ROUNDS, Client, ServiceStage

from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps import rounds
from ps.faults import POINTS

__all__ = ["Service", "play"]

WHOLE, IN_PIECES = 1024, 8  # bytes of a message: a row has 40

clients = st.integers(0, CLIENTS - 1)
values = st.integers(-8, 8).map(lambda eighths: eighths / 8)
mostly = st.sampled_from((True, True, True, False))

EVENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
"""Whatever may happen, and how."""
OFTEN: list[str] = []
"""Each event as often as its weight."""

Event = Callable[..., None]


def event(weight: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Event], Event]:
    """What may happen to a server that is up: one that is down is started first, a run that ended early taken up."""

    def as_event(happens: Event) -> Event:
        @wraps(happens)
        def with_a_server(self: Service, **how: Any) -> None:
            if self.is_up():
                happens(self, **how)

        EVENTS[happens.__name__] = st.fixed_dictionaries(drawn)
        OFTEN.extend([happens.__name__] * weight)
        return with_a_server

    return as_event


class Service(ServiceStage):
    """Events, and how their clients are answered."""

    @rule(name=st.deferred(lambda: st.sampled_from(OFTEN)), data=st.data())
    def next(self, name: str, data: st.DataObject) -> None:
        """One rule for all: hypothesis plays many a run with a part of the rules only, and a round needs most."""
        self.in_order = False
        getattr(self, name)(**data.draw(EVENTS[name]))
        self.in_order = True

    @event(1, how=st.sampled_from((*POINTS, "at once", *2 * ("asked to stop",))), times=st.integers(1, 3))
    def is_unlucky(self, how: str, times: int) -> None:
        """Killed at once, or where the making of a round comes by for the so-manieth time; or asked to stop."""
        if how == "at once":
            self.buried()
        elif how != "asked to stop":
            self.dies_at, self.dies_after = how, times
        else:
            self.does(lambda: self.running.coordinator.stop("interrupted", "asked to"))

    # ---------------------------------------------------------------- time, and the thread that makes rounds

    @event(3, seconds=st.sampled_from((0.25, 0.5, 1.0, 3.0, 5.0, 8.0)), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        for step in [HEARTBEAT_S] * int(seconds // HEARTBEAT_S) + [seconds % HEARTBEAT_S]:
            if self.up:
                self.loop.advance(step)
                self.settled()
                if beating:
                    self.all_beat()

    @event(1, seconds=st.sampled_from((0.25, 30.0, 1000.0)))
    def was_stopped(self, seconds: float) -> None:
        """Clients went on meanwhile, and the server hears them when it wakes; but its timers come first."""
        before = self.live
        self.loop.jump(seconds)
        self.settled()
        if seconds > 1.0 and self.server is not None:
            assert self.ended in (None, "completed"), f"{self.ended} before anybody could reach it"
            assert self.live == before, "its own sleep is taken for their silence"
        self.all_beat()

    @event(2, pieces=st.integers(1, 2))
    def the_thread_works(self, pieces: int) -> None:
        """A piece of making a round: the making itself, or saying that it is made."""
        for _ in range(pieces):
            if self.loop.work:
                self.does(self.loop.work.pop(0))

    # ---------------------------------------------------------------- clients come and go

    @event(2, client_id=clients, attends=mostly)
    def joins(self, client_id: int, attends: bool) -> None:
        caller = self.does(lambda: self.running.join(client_id))
        if caller is not None and self.up:
            client = self.clients[client_id]
            client.callers.append(caller)
            client.member, client.stream = True, None
            self.heard(client)
            if attends:
                self.attends(client_id=client_id)

    @event(1, client_id=clients)
    def attends(self, client_id: int) -> None:
        client = self.clients[client_id]
        if client.member and client.stream is None:
            client.stream = self.does(lambda: self.running.attend(client.callers[-1]))
            self.heard(client)

    @event(2, client_id=clients, politely=st.booleans())
    def goes(self, client_id: int, politely: bool) -> None:
        """Its stream ends, after a good-bye or without."""
        client = self.clients[client_id]
        stream, client.stream, client.in_touch_until = client.stream, None, 0.0
        if politely and client.member:
            client.member = False
            self.does(lambda: self.running.leave(client.callers[-1]))
        elif stream is not None:
            self.does(lambda: self.running.coordinator.members.detach(stream))

    def all_beat(self) -> None:
        for client in self.clients:
            if self.up and client.stream is not None:
                self.does(partial(self.running.coordinator.members.heartbeat, client.stream))
                self.heard(client)

    def heard(self, client: Client) -> None:
        client.in_touch_until = self.loop.now + LIVENESS_S

    # ---------------------------------------------------------------- clients pull and push

    @event(1, ahead=st.integers(0, 1))
    def somebody_pulls(self, ahead: int) -> None:
        wanted, there = self.rounds.round_id + ahead, self.collecting and not ahead
        got = self.loop.run_until_complete(self.running.pull(wanted))
        assert (got is not None) is there
        if got is not None:
            assert self.shown[wanted] in got, f"what is sent is not the model of round {wanted}"
            assert self.pulled.setdefault(wanted, got) == got, f"round {wanted} is sent twice, differently"

    @event(
        3,
        client_id=clients,
        value=values,
        late=st.sampled_from((0, 0, 0, 0, -1, 1)),
        life=st.sampled_from((-1, -1, -2)),
        whole=st.booleans(),
    )
    def pushes_a_momentum(self, client_id: int, value: float, late: int, life: int, whole: bool) -> None:
        """Or a part of one; for this round or another; in the name of its last incarnation, or the one before."""
        callers, server = self.clients[client_id].callers[life:], self.running
        if callers:
            row = np.full(server.task.num_parameters, value, np.float32)
            round_id = max(0, self.rounds.round_id - late)
            stream = self.does(lambda: server.push(callers[0], round_id, row, WHOLE if whole else IN_PIECES))
            if self.up:
                rivals = [other for other in self.pushes if other.client_id == client_id and self.may_write(other)]
                stream.holds = self.clients[client_id].member and self.awaited(stream) and not rivals
                self.pushes.append(stream)
                self.goes_on(stream, None if whole else 2)

    @event(4, how=st.sampled_from(("goes on", "breaks off", "is overtaken")), value=values)
    def what_becomes_of_a_push(self, how: str, value: float) -> None:
        """Of one that was begun: the rest of it comes; or another follows, from the same life, or from two of them."""
        if not self.pushes:
            return
        stream, client_id = self.pushes[-1], self.pushes[-1].client_id
        if how == "goes on":
            self.goes_on(stream, None)
            return
        if how == "breaks off":
            self.does(stream.break_off)
            self.answered(stream, may=False, must=False)
        else:
            self.joins(client_id=client_id, attends=True)
            self.pushes_a_momentum(client_id=client_id, value=value, late=0, life=-2, whole=True)
        self.pushes_a_momentum(client_id=client_id, value=value, late=0, life=-1, whole=True)

    @event(
        4,
        who=st.just(tuple(range(CLIENTS))) | st.lists(clients, unique=True).map(tuple),
        value=values,
        joining=mostly,
        last_one_whole=st.booleans(),
        pieces=st.sampled_from((2, 1, 0, 2)),
    )
    def several_answer(
        self, who: tuple[int, ...], value: float, joining: bool, last_one_whole: bool, pieces: int
    ) -> None:
        """After joining if they have not, each with another value; and the thread gets to work on it."""
        for client_id in who:
            if joining and not self.clients[client_id].member:
                self.joins(client_id=client_id, attends=True)
        if joining and self.scheduled and self.up and self.rounds.phase is rounds.Phase.JOINING:
            self.time_passes(seconds=JOIN_DEADLINE_S, beating=True)
        for client_id in who:
            whole = last_one_whole or client_id != who[-1]
            self.pushes_a_momentum(client_id=client_id, value=value + client_id, late=0, life=-1, whole=whole)
        if joining and self.scheduled and self.up and self.collecting:
            self.time_passes(seconds=PERIOD_S, beating=True)
        if pieces:
            self.the_thread_works(pieces=pieces)

    def awaited(self, stream: Stream) -> bool:
        """Does this momentum count, should the rest of it arrive now?"""
        return (
            self.collecting
            and stream.round_id == self.rounds.round_id
            and stream.incarnation == self.clients[stream.client_id].incarnation
            and stream.client_id not in self.accepted[stream.round_id]
        )

    def may_write(self, stream: Stream) -> bool:
        """Has it the row of its identity, and may it go on?"""
        stream.holds = stream.holds and self.awaited(stream)
        return stream.holds

    def goes_on(self, stream: Stream, messages: int | None) -> None:
        may = self.may_write(stream)
        must = may and self.clients[stream.client_id].member
        self.does(lambda: stream.send(messages))
        self.answered(stream, may=may, must=must)

    def answered(self, stream: Stream, *, may: bool, must: bool) -> None:
        """Look at how a momentum is answered that may be accepted, or must be if it is whole."""
        if self.server is None or not stream.answer.done():
            return
        self.pushes.remove(stream)
        client, who = self.clients[stream.client_id], f"client {stream.client_id}"
        rows, problem = self.accepted[stream.round_id], stream.answer.exception()
        known = rows.get(stream.client_id)
        same = known is not None and np.array_equal(known, stream.row)
        if problem is not None:
            assert isinstance(problem, Refused), repr(problem)
            assert not must, f"{who} is refused, and nothing was wrong: {problem}"
            assert problem.kind != pb.EQUIVOCATION or (known is not None and not same), f"{who} sent nothing else"
        elif stream.answer.result().duplicate:
            assert same, f"{who} did not send this before"
        else:
            assert may, f"{who} is accepted"
            rows[stream.client_id] = stream.row
            if client.member:
                self.heard(client)

    # ---------------------------------------------------------------- the end

    def can_be_completed(self) -> None:
        """Whatever happened, with everybody there the run goes on to its last round."""
        for _ in range(ROUNDS + 1):
            self.several_answer(who=tuple(range(CLIENTS)), value=0.5, joining=True, last_one_whole=True, pieces=2)
            self.time_passes(seconds=PERIOD_S, beating=True)
        assert self.ended == "completed"
        self.what_was_committed_stands()
        assert len(self.ledger) == ROUNDS + 1

    def teardown(self) -> None:
        try:
            if self.in_order:
                self.comes_to_an_end()
                self.can_be_completed()
        finally:
            super().teardown()


def play(runs: int, first_seed: int = 0, machine: type[Service] = Service, *, shrink: bool = True) -> None:
    """So many runs, the same ones every time.

    Raises
    ------
    AssertionError
        A run broke a rule; hypothesis prints the shortest script that does.
    """
    run_state_machine_as_test(
        seed(first_seed)(machine),
        settings=settings(
            max_examples=runs,
            stateful_step_count=40,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )

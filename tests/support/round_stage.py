"""One parameter server without I/O, under a referee: what coordinator, membership and store do, and no more.

A :class:`Stage` is deterministic. What happens to it is a script of steps ``(time, what, arguments)``, which can be
told, replayed and shortened. The chance is all in :mod:`round_simulator`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from round_referee import Books, Referee, RosterReferee

from ps.roster import Roster, Standing
from ps.round_policy import RoundPolicy
from ps.rounds import Action, CloseRound, EndRun, OpenRound, Phase, Rounds

Step = tuple[float, str, tuple[Any, ...]]


class _Killed(Exception):
    """The server dies here."""


class Stage:
    """A server, its disk and its referees.

    Parameters
    ----------
    happened
        Told ``("opened", round)``, ``("closing", round)``, ``("dead", ids)`` and ``("crashed", where)``.
    trace
        Receives what happens, in words.
    """

    rounds_type: type[Rounds] = Rounds
    roster_type: type[Roster] = Roster
    referee_type: type[Referee] = Referee
    members_type: type[RosterReferee] = RosterReferee

    def __init__(
        self,
        policy: RoundPolicy,
        liveness_s: float,
        grace_s: float,
        honest: frozenset[int],
        now: float,
        happened: Callable[[str, Any], None] = lambda _what, _of_it: None,
        trace: list[str] | None = None,
    ) -> None:
        self.policy, self.liveness_s, self.grace_s, self.honest = policy, liveness_s, grace_s, honest
        self.now, self.happened, self.trace = now, happened, trace
        self.books = Books()
        self.ledger = self.books.ledger  # the model of the store: this, and nothing else, is there after a crash
        self.script: list[Step] = []
        self.seen: Counter[str] = Counter()
        self.fuse = 0  # so many more actions until the server dies; 0: it lives
        self.contents = 0
        self.resumed_at = 0
        self.up = False
        self.over = False
        self.stirred = True  # something happened that may bring a timer forward
        self.late_s = 0.0  # of the last tick, where a member might have died

    def begin(self) -> None:
        """The first start."""
        self._say(
            "%s, liveness %s, grace %s, honest %s",
            *(self.policy, self.liveness_s, self.grace_s, sorted(self.honest)),
        )
        self.do(self.now, "start")

    def do(self, time: float, what: str, *arguments: Any) -> Any:
        """One step: something happens at a time; a time that is past means now."""
        if time > self.now:
            self.now = time
        self.script.append((self.now, what, arguments))
        if what != "beat":
            self.stirred = True
        if not self.up and what not in ("start", "wake"):
            return None
        if self.trace is not None:
            self._say("%s%s", what, arguments)
        try:
            answer = getattr(self, what)(*arguments)
        except _Killed as killed:
            self._die(str(killed))
            return None
        assert self.roster.live == self.referee.live, f"the rounds take {sorted(self.referee.live)} for live"
        return answer

    def due(self) -> float:
        """When the server asked to be woken; asserts that it is not too late for anything."""
        if not self.up:
            return inf
        now = self.now
        rounds, roster = self.rounds.next_tick(now), self.roster.next_tick(now)
        by, dies = self.referee.acts_by(), self.members.next_death()
        if rounds is None:
            assert by == inf, f"no tick was asked for, and one is due at {by}"
            rounds = inf
        else:
            assert rounds == now or now < rounds <= by, f"a tick at {rounds}: due at {by}"
        if roster is None:
            roster = inf
        assert roster == max(dies, now), f"a tick at {roster}: {dies} is a death"
        return min(rounds, roster)

    # ---------------------------------------------------------------- steps: the server's life

    def start(self) -> None:
        """A server starts, and knows only what was committed."""
        latest = len(self.ledger) - 1
        self.up, self.resumed_at = True, latest
        self.roster = self.roster_type(
            range(self.policy.num_clients), liveness_s=self.liveness_s, reconnect_grace_s=self.grace_s
        )
        self.rounds = self.rounds_type(self.policy, start_round=latest)
        self.members = self.members_type(self.liveness_s, self.grace_s)
        self.referee = self.referee_type(self.policy, self.honest, latest, self.now)
        self.inbox: set[int] = set()
        self.making: tuple[int, int] | None = None  # the round being made of what was closed, and its content
        self.books.published(latest, self.ledger[latest])
        self._act(self.rounds.started(self.now))

    def fuse_at(self, actions: int) -> None:
        """The server will die after so many more actions, wherever that is."""
        self.fuse = actions

    def crash(self) -> None:
        raise _Killed(f"while {self.referee.state}")

    def sleep(self) -> None:
        """The clock jumps: the server is stopped for a while; the time of the next step says for how long."""

    def wake(self) -> None:
        """Nothing happens, but the time is later."""

    def stop(self, status: str) -> None:
        if self.referee.state != "ended":
            self.referee.stop = self.referee.stop or status
            self.seen[f"stop while {self.referee.state}"] += 1
        self._rounds(self.rounds.stop, status, "asked to")

    def tick(self) -> None:
        self.late_s = self.now - self.members.next_death()
        dead, expected = self.roster.tick(self.now), self.members.expire(self.now)
        assert dead == expected, f"newly dead are {dead}: expected {expected}"
        if dead:
            self._say("    dead: %s", dead)
            self.happened("dead", dead)
            self._live_changed()
        self._rounds(self.rounds.tick)

    # ---------------------------------------------------------------- steps: making a round

    def fail(self) -> None:
        """The round that is closing cannot be made."""
        if self.making is not None:
            self.making = None
            self.referee.fails("failed", self.now)
            self.seen["failed"] += 1
            self._act(self.rounds.stop("failed", "disk full", self.now, at_once=True))

    def commit(self) -> None:
        if self.making is not None and self.making[0] == len(self.ledger):
            self._burn("between close and commit")
            self.books.committed(*self.making)
            self._burn("between commit and publish")

    def publish(self) -> bool:
        """θ of the committed round leaves; False when it is not yet time."""
        if self.making is None or self.making[0] != len(self.ledger) - 1:
            return True
        due = self.rounds.publish_at
        if due is not None and self.now < due:
            return False
        (round_id, content), self.making = self.making, None
        self.books.published(round_id, content)
        self._burn("after publishing")
        self.referee.published(self.now)
        self._act(self.rounds.published(round_id, self.now))
        return True

    # ---------------------------------------------------------------- steps: clients

    def join(self, client_id: int, incarnation: bytes) -> None:
        before = self.members.current.get(client_id)
        evicted = self.roster.join(client_id, incarnation, self.now)
        assert evicted == before, f"evicted {evicted!r}: expected {before!r}"
        self.members.join(client_id, incarnation, self.now)
        self._live_changed()

    def beat(self, client_id: int, incarnation: bytes) -> bool:
        """A heartbeat; whether it was the current incarnation's."""
        before = self.roster.live
        ours = self._ours(client_id, incarnation, self.roster.heartbeat(client_id, incarnation, self.now))
        if ours:
            self.members.hear(client_id, self.now)
        if self.roster.live != before:
            self._live_changed()
        return ours

    def lost(self, client_id: int, incarnation: bytes) -> None:
        """A stream broke."""
        if self._ours(client_id, incarnation, self.roster.lost(client_id, incarnation, self.now)):
            self.members.lose(client_id, self.now)
        self._live_changed()

    def leave(self, client_id: int, incarnation: bytes) -> None:
        if self._ours(client_id, incarnation, self.roster.leave(client_id, incarnation, self.now)):
            self.members.leave(client_id)
        self._live_changed()

    def push(self, client_id: int, incarnation: bytes, round_id: int) -> str:
        """A momentum arrives in full; how it is answered."""
        current = self.members.current.get(client_id) == incarnation
        counted = round_id == self.referee.round_id and client_id in self.referee.answers
        how = self._receive(client_id, incarnation, round_id)
        assert current is (how not in ("superseded", "not_a_member")), f"client {client_id} is {how}"
        assert how != "accepted" or not counted, f"client {client_id} is counted twice"
        return how

    def _receive(self, client_id: int, incarnation: bytes, round_id: int) -> str:
        standing = self.roster.standing(client_id, incarnation)
        if standing is not Standing.CURRENT:
            assert standing is self._standing(client_id, incarnation), f"client {client_id} is {standing}"
            return standing.value
        rounds = self.rounds
        if round_id != rounds.round_id or rounds.phase is Phase.JOINING:
            return "stale" if round_id < rounds.round_id else "future"
        if client_id in self.inbox:
            self.seen["duplicate"] += 1
            return "duplicate"
        if rounds.phase is not Phase.COLLECTING:
            return "late"
        self.inbox.add(client_id)
        self._seen_alive(client_id, incarnation)
        self.answer(client_id, round_id)
        return "accepted"

    def answer(self, client_id: int, round_id: int) -> None:
        """The event behind it, whether or not anything was checked."""
        self.referee.clock(self.now)
        self.referee.answered(client_id, round_id, self.now)
        self._act(self.rounds.momentum_complete(client_id, round_id, self.now))

    # ---------------------------------------------------------------- what steps are made of

    def _seen_alive(self, client_id: int, incarnation: bytes) -> None:
        """A momentum is a sign of life."""
        before = self.roster.live
        self.roster.heartbeat(client_id, incarnation, self.now)
        self.members.hear(client_id, self.now)
        if self.roster.live != before:
            self._live_changed()

    def _ours(self, client_id: int, incarnation: bytes, taken: bool) -> bool:
        ours = self.members.current.get(client_id) == incarnation
        assert taken is ours, f"client {client_id}, incarnation {incarnation!r}: taken for current: {taken}"
        return ours

    def _standing(self, client_id: int, incarnation: bytes) -> Standing:
        current = self.members.current.get(client_id)
        if current == incarnation:
            return Standing.CURRENT
        former = self.members.old.get(client_id, [])[-64:]
        return Standing.SUPERSEDED if current is not None and incarnation in former else Standing.NOT_A_MEMBER

    def _live_changed(self) -> None:
        live = self.roster.live
        assert live == self.members.live, f"live are {sorted(live)}: expected {sorted(self.members.live)}"
        self.stirred = True
        self.referee.clock(self.now)
        self.referee.lives(live, self.now)
        self._act(self.rounds.live_changed(live, self.now))

    def _rounds(self, event: Callable[..., list[Action]], *arguments: Any) -> None:
        self.referee.clock(self.now)
        self._act(event(*arguments, self.now))

    def _act(self, actions: list[Action]) -> None:
        if self.trace is not None:
            for action in actions:
                self._say("    -> %s", action)
        self.referee.check(actions, self.now)
        for action in actions:
            if self.fuse:
                self._burn(f"before {type(action).__name__}")
            if isinstance(action, OpenRound):
                self.inbox.clear()
                self.happened("opened", action.round_id)
            elif isinstance(action, CloseRound):
                self.seen[action.reason] += 1
                self.contents += 1  # noise: a round that is made twice is two different models
                self.making = action.round_id + 1, self.contents
                self.happened("closing", action.round_id)
            elif isinstance(action, EndRun):
                self.seen[action.status] += 1
                self.over = True

    def _burn(self, where: str) -> None:
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise _Killed(where)

    def _die(self, where: str) -> None:
        self.up, self.fuse = False, 0
        self.seen[f"crash {where}"] += 1
        self._say("    crashed %s", where)
        self.happened("crashed", where)

    def _say(self, words: str, *values: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.2f}  {words % values}")


def replay(stage: Callable[..., Stage], script: Sequence[Step]) -> tuple[str, list[str]] | None:
    """Play a script again: the failure and everything up to it; None when there is none."""
    trace: list[str] = []
    try:
        played = stage(trace=trace)
        played.begin()
        for time, what, arguments in script[1:]:  # the first step is the start
            played.do(time, what, *arguments)
            played.due()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}", trace
    return None


def shortened(stage: Callable[..., Stage], script: Sequence[Step], failure: str, replays: int = 2000) -> list[Step]:
    """A shorter script that fails in the same way, by leaving out ever smaller pieces; the same one if none does."""
    kind = re.sub(r"[\d.]+|-?inf", "#", failure)[:40]

    def fails(candidate: Sequence[Step]) -> bool:
        nonlocal replays
        replays -= 1
        found = None
        with contextlib.suppress(RecursionError):
            found = replay(stage, candidate)
        return found is not None and re.sub(r"[\d.]+|-?inf", "#", found[0])[:40] == kind

    kept = list(script)
    if not fails(kept):
        return kept
    piece = len(kept) // 2
    while piece and replays > 0:
        at = 1
        while at < len(kept) and replays > 0:
            without = kept[:at] + kept[at + piece :]
            if fails(without):
                kept = without
            else:
                at += piece
        piece //= 2
    return kept

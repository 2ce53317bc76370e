"""What a run of rounds may do, kept in books of its own: nothing here knows how ``Rounds`` and ``Roster`` work.

The referee is told what really happened and what was decided, and asserts after every step that the rules hold. The
rules are written once more, from their description, in the plainest way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ps.round_policy import RoundPolicy
from ps.rounds import Action, CloseRound, EndRun, OpenRound, Wait


class RosterReferee:
    """Who must be live."""

    def __init__(self, liveness_s: float, grace_s: float) -> None:
        self.liveness_s, self.grace_s = liveness_s, grace_s
        self.current: dict[int, bytes] = {}
        self.old: dict[int, list[bytes]] = {}
        self.heard: dict[int, float] = {}
        self.broken: dict[int, float] = {}
        self.live: set[int] = set()

    def join(self, client_id: int, incarnation: bytes, now: float) -> None:
        if client_id in self.current:
            self.old.setdefault(client_id, []).append(self.current[client_id])
        self.current[client_id] = incarnation
        self.hear(client_id, now)

    def hear(self, client_id: int, now: float) -> None:
        self.heard[client_id] = now
        self.broken.pop(client_id, None)
        self.live.add(client_id)

    def lose(self, client_id: int, now: float) -> None:
        if client_id in self.live:
            self.broken.setdefault(client_id, now)

    def leave(self, client_id: int) -> None:
        del self.current[client_id]
        self.live.discard(client_id)
        self.broken.pop(client_id, None)

    def dies_at(self, client_id: int) -> float:
        silent = self.heard[client_id] + self.liveness_s
        return min(silent, self.broken[client_id] + self.grace_s) if client_id in self.broken else silent

    def next_death(self) -> float:
        heard, silent = self.heard, math.inf
        for client_id in self.live:
            if heard[client_id] < silent:
                silent = heard[client_id]
        silent += self.liveness_s
        return min(silent, min(self.broken.values()) + self.grace_s) if self.broken else silent

    def expire(self, now: float) -> list[int]:
        """Who is dead from now on; a server that was stopped gives them the grace to be heard."""
        stopped = now - self.next_death() > 0.25 * self.grace_s
        dead = sorted(i for i in self.live if now >= self.dies_at(i))
        if stopped:
            for client_id in dead:
                self.heard[client_id] = self.broken[client_id] = now
            return []
        self.live.difference_update(dead)
        for client_id in dead:
            self.broken.pop(client_id, None)
        return dead


@dataclass
class Books:
    """What outlives a crash: the ledger as the disk has it, and what the world was shown."""

    ledger: list[int] = field(default_factory=lambda: [0])  # the content of each round's model
    shown: dict[int, int] = field(default_factory=dict)

    def committed(self, round_id: int, content: int) -> None:
        assert round_id == len(self.ledger), f"round {round_id} committed after round {len(self.ledger) - 1}"
        self.ledger.append(content)

    def published(self, round_id: int, content: int) -> None:
        assert round_id < len(self.ledger), f"round {round_id} published, and not committed"
        assert content == self.ledger[round_id], f"round {round_id} published with another content than committed"
        assert self.shown.setdefault(round_id, content) == content, f"round {round_id} published twice, differently"


class Referee:
    """One life of a server: from its start to a crash or the run's end.

    Parameters
    ----------
    honest
        The identities that keep to the protocol; the others may do anything. When there are more than f of those, what
        is guaranteed against f of them is not asserted.
    """

    def __init__(self, policy: RoundPolicy, honest: frozenset[int], committed: int, now: float) -> None:
        self.policy, self.honest = policy, honest
        self.within_f = policy.num_clients - len(honest) <= policy.num_byzantine
        self.round_id = committed
        self.state = "joining"
        self.live: frozenset[int] = frozenset()
        self.answers: dict[int, float] = {}
        self.times: list[float] = []
        self.opened_at = self.began_at = now
        self.deadline = now + policy.join_deadline_s
        self.give_up = self.deadline + policy.quorum_deadline_s
        self.enough_since = self.honest_since = math.inf
        self.overdue = False
        self.closing_since = self.closing_took = 0.0
        self.stop: str | None = None
        self.hopeless = False
        self.wait: Wait | None = None
        self.status: str | None = None
        self.credit = [policy.patience_s] * policy.num_clients
        self.vain = [0] * policy.num_clients  # rounds, one after the other, that waited for one in vain
        self.turned_down: set[int] = set()
        self.spent_to = now

    # what happened

    def clock(self, now: float) -> None:
        """An event comes; a server that was stopped waits anew for those that could not reach it."""
        if self.state in ("joining", "open"):
            if now - (self.give_up if self.overdue else self.deadline) > self.policy.tardy_s:
                self.give_up = max(self.give_up, now + self.policy.quorum_deadline_s)
            self.overdue = now >= self.deadline
        if self.state == "open":
            self.spend(now)

    def lives(self, live: frozenset[int], now: float) -> None:
        self.live = live
        self.judge(now)
        if self.state == "joining":
            enough = len(live) >= max(self.policy.num_clients - self.policy.num_byzantine, self.policy.quorum)
            self.enough_since = min(self.enough_since, now) if enough else math.inf
            self.honest_since = min(self.honest_since, now) if self.honest <= live else math.inf

    def answered(self, client_id: int, round_id: int, now: float) -> None:
        if self.state == "open" and round_id == self.round_id and client_id not in self.answers:
            self.answers[client_id] = now
            self.times.append(now)
            self.vain[client_id] = 0
            self.judge(now)

    def spend(self, now: float) -> None:
        """Nothing has changed since the last event: whoever was waited for beyond what is free has paid for it."""
        for client_id in self.waited_for():
            costs_from = max(self.spent_to, self.costs_from(client_id))
            if costs_from < min(now, self.grace_over()):
                self.credit[client_id] -= min(now, self.grace_over()) - costs_from
                assert self.credit[client_id] >= 0, f"client {client_id} was waited for beyond its credit"
        self.spent_to = now

    def judge(self, now: float) -> None:
        """Whose credit does not cover what is left of the grace is not waited for on credit in this round."""
        for client_id in self.waited_for():
            if self.credit[client_id] < self.grace_over() - max(now, self.costs_from(client_id)):
                self.turned_down.add(client_id)

    def published(self, now: float) -> None:
        assert self.state == "closing", f"published while {self.state}"
        self.round_id += 1
        self.closing_took += now - self.closing_since
        self.state = "published"

    def fails(self, status: str, now: float) -> None:
        """The closing round cannot be made."""
        self.stop, self.hopeless = status, True
        self.closing_took += now - self.closing_since

    # what follows from it

    def closes_at(self) -> float:
        """When the open round must close, if nothing more happens; infinite below the quorum."""
        policy, answers = self.policy, self.answers
        if policy.period_s is not None:
            return self.deadline
        if len(answers) < policy.quorum:
            return math.inf
        owing = len(self.live - answers.keys())
        if not owing:
            return -math.inf
        return min(self.deadline, self.waits_for_the_rest_until())

    def reached_at(self) -> float:
        """When the pace was reached; infinite: it was not."""
        policy, answers = self.policy, self.answers
        if self.state != "open" or len(answers) < policy.quorum:
            return math.inf
        pace = max(len(self.live | answers.keys()) - policy.num_byzantine, policy.quorum)
        return self.times[pace - 1] if len(answers) >= pace else math.inf

    def grace_s(self) -> float:
        return max(self.policy.grace_floor_s, self.policy.grace_factor * (self.reached_at() - self.opened_at))

    def grace_over(self) -> float:
        return self.reached_at() + self.grace_s()

    def free_until(self) -> float:
        """Those in good standing are waited for so long, whatever it was they did before."""
        free_s = self.policy.patience_share * (self.reached_at() - self.opened_at)
        return self.reached_at() + min(self.grace_s(), free_s)

    def waited_for(self) -> set[int]:
        """On credit, once the pace is reached."""
        if self.policy.period_s is not None or self.reached_at() == math.inf:
            return set()
        return set(self.live - self.answers.keys() - self.turned_down)

    def costs_from(self, client_id: int) -> float:
        return self.free_until() if self.vain[client_id] < 3 else self.reached_at()

    def waits_for_the_rest_until(self) -> float:
        if self.reached_at() == math.inf:
            return math.inf
        if self.waited_for():
            return self.grace_over()
        anybody = any(self.vain[client_id] < 3 for client_id in self.live - self.answers.keys())
        return self.free_until() if anybody else self.reached_at()

    def settle(self, action: CloseRound, now: float) -> None:
        """The round closes: who was missed, and what is added to the credits."""
        assert action.reason != "patience_over" or now < self.grace_over(), f"{action}: the grace is over"
        if self.policy.period_s is None and self.reached_at() < math.inf:
            if now >= self.free_until():
                for client_id in self.live - self.answers.keys():
                    self.vain[client_id] += 1
            more = self.policy.patience_refill / max(self.policy.num_byzantine, 1)
            for client_id, credit in enumerate(self.credit):
                if credit < max(self.policy.patience_s, self.grace_s()):
                    self.credit[client_id] += more * (self.reached_at() - self.opened_at)
        self.turned_down.clear()

    def guaranteed_at(self) -> float:
        """When the open round must have closed because all honest members have answered; the others do not count."""
        if not self.within_f or self.live & self.honest - self.answers.keys():
            return math.inf
        honest = [at for client_id, at in self.answers.items() if client_id in self.honest]
        if len(honest) < self.policy.quorum:
            return math.inf
        took = honest[-1] - self.opened_at
        return honest[-1] + max(self.policy.grace_floor_s, self.policy.grace_factor * took)

    def opens_at(self) -> float:
        policy, have = self.policy, len(self.live)
        if policy.period_s is not None:
            return self.deadline
        if have == policy.num_clients:
            return -math.inf
        at = self.deadline if have >= policy.quorum else math.inf
        return min(at, self.start_grace_over(self.enough_since))

    def start_grace_over(self, since: float) -> float:
        policy = self.policy
        return since + max(policy.join_grace_s, policy.grace_floor_s, policy.grace_factor * (since - self.began_at))

    def opening_guaranteed_at(self) -> float:
        """Whether the first round waits for those that never come is not in the hand of f of them."""
        if self.within_f and len(self.honest) >= self.policy.quorum and self.policy.period_s is None:
            return max(self.start_grace_over(self.honest_since), self.began_at)
        return math.inf

    def acts_by(self) -> float:
        """No later than this something must be done, whatever happens."""
        if self.state == "joining":
            by = self.opens_at()
        elif self.state == "open":
            by = self.closes_at()
        else:
            return math.inf
        return by if self.policy.period_s is not None else min(by, self.give_up)

    # what was done about it

    def check(self, actions: list[Action], now: float) -> None:
        for action in actions:
            assert self.state != "ended", f"{action} after the end"
            getattr(self, f"on_{type(action).__name__}")(action, now)
        if self.state in ("joining", "open"):
            assert self.stop is None, "went on after a stop"
            due = self.acts_by()
            assert now < due, f"{self.state} at {now}, something was due at {due}"
            if self.policy.period_s is None:
                self.check_waiting(now)
        assert self.state != "published", "nothing follows from a published round"

    def check_waiting(self, now: float) -> None:
        if self.state == "open":
            due = self.guaranteed_at()
            assert now < due, f"open at {now}, all honest clients had answered, and it was due at {due}"
            waits = len(self.answers) < self.policy.quorum and (
                now >= self.deadline or self.live <= self.answers.keys()
            )
            there = len(self.answers)
        else:
            due = self.opening_guaranteed_at()
            assert now < due, f"joining at {now}, all honest clients were there, and it was due at {due}"
            waits, there = True, len(self.live)
        if waits:
            assert self.wait is not None, "an invisible wait"
            told, right = (self.wait.have, self.wait.until), (there, self.waits_until(now))
            assert told == right, f"an outdated wait: told {told}, right is {right}"

    def waits_until(self, now: float) -> float:
        if self.state == "joining" and now < self.deadline:
            return min(self.deadline, self.start_grace_over(self.enough_since))
        return self.give_up

    def on_OpenRound(self, action: OpenRound, now: float) -> None:  # noqa: N802
        policy = self.policy
        assert self.state in ("joining", "published"), f"{action} while {self.state}"
        assert self.state == "published" or now >= self.opens_at(), f"{action} too early"
        assert self.stop is None, f"{action} after a stop"
        assert action.round_id == self.round_id < policy.rounds, f"{action}: expected round {self.round_id}"
        if policy.period_s is not None:
            assert self.state == "joining" or now >= self.opened_at + policy.period_s, f"{action} before its time"
            assert action.deadline == now + policy.period_s - policy.margin_s, f"{action}: another deadline"
        else:
            assert action.deadline == now + policy.round_deadline_s, f"{action}: another deadline"
        self.state, self.answers, self.times, self.opened_at = "open", {}, [], now
        self.deadline, self.give_up = action.deadline, action.deadline + policy.quorum_deadline_s
        self.wait, self.overdue, self.spent_to = None, False, now

    def on_CloseRound(self, action: CloseRound, now: float) -> None:  # noqa: N802
        assert self.state == "open", f"{action} while {self.state}"
        assert action.round_id == self.round_id, f"{action}: expected round {self.round_id}"
        assert action.answered == tuple(sorted(self.answers)), f"{action}: answers are {sorted(self.answers)}"
        late = tuple(i for i in range(self.policy.num_clients) if i not in self.answers)
        assert action.late == late, f"{action}: late are {late}"
        if self.policy.period_s is None:
            assert len(action.answered) >= self.policy.quorum, f"{action} below the quorum"
        assert now >= self.closes_at(), f"{action} before {self.closes_at()}"
        self.settle(action, now)
        self.state, self.closing_since = "closing", now

    def on_Wait(self, action: Wait, now: float) -> None:  # noqa: N802
        assert self.policy.period_s is None or self.state == "joining", f"{action} on a public schedule"
        assert (action.need, action.of) == (self.policy.quorum, self.policy.num_clients), f"{action}"
        if self.state == "joining":
            assert action.have == len(self.live), f"{action}: {len(self.live)} have joined"
        else:
            assert self.state == "open", f"{action} while {self.state}"
            assert len(self.answers) < self.policy.quorum, f"{action} with a quorum"
            assert now >= self.deadline or self.live <= self.answers.keys(), "a wait while all is well"
            assert action.have == len(self.answers), f"{action}: {len(self.answers)} answered"
        assert now < action.until, f"{action} is over"
        self.wait = action

    def on_EndRun(self, action: EndRun, now: float) -> None:  # noqa: N802
        if action.status == "completed":
            assert self.round_id == self.policy.rounds, f"{action} after round {self.round_id}"
            assert self.state in ("published", "joining"), f"{action} while {self.state}"
        elif action.status == "quorum_lost":
            assert self.state in ("open", "joining"), f"{action} while {self.state}"
            assert self.policy.period_s is None, "a public schedule does not give up"
            there = self.answers if self.state == "open" else self.live
            assert len(there) < self.policy.quorum, "quorum lost with a quorum"
            assert now >= self.give_up, f"gave up before {self.give_up}"
        else:
            assert action.status == self.stop, f"{action}: nobody asked"
            assert self.state != "closing" or self.hopeless, "ended before what was committed was published"
        self.state, self.status = "ended", action.status

"""Bugs that one could have written. The simulator is worth what it finds of them.

Each class is a copy of :class:`Rounds`, :class:`Roster` or of the stage's coordinator with one mistake, named in its
docstring. :data:`MUTANTS` are stages with one of them each.
"""

from __future__ import annotations

import math

from round_stage import Stage

from ps.patience import Patience
from ps.roster import Roster
from ps.rounds import CloseRound, Phase, Rounds, Wait

# -------------------------------------------------------------------- rounds


class ClosesBelowQuorum(Rounds):
    """The quorum is off by one."""

    def _reason_to_close(self, now, was_overdue):
        one_short = len(self._answered) == self.policy.quorum - 1 and self.policy.period_s is None
        return "rest_gone" if one_short and not self._owing else super()._reason_to_close(now, was_overdue)


class ClosesWithoutQuorumAtTheDeadline(Rounds):
    """The deadline closes a round whoever answered."""

    def _reason_to_close(self, now, was_overdue):
        return super()._reason_to_close(now, was_overdue) or ("deadline" if now >= self._deadline else None)


class CountsTheLive(Rounds):
    """The quorum is taken of the live members, not of the answers."""

    def _reason_to_close(self, now, was_overdue):
        answered = self._answered
        self._answered = answered | self._live
        reason = super()._reason_to_close(now, was_overdue)
        self._answered = answered
        return reason


class CountsADuplicateTwice(Rounds):
    """A second answer of the same member counts for the pace."""

    def momentum_complete(self, client_id, round_id, now):
        if round_id == self.round_id and client_id in self._answered:
            self._answered_at.append(now)
        return super().momentum_complete(client_id, round_id, now)


class ForgetsTheGrace(Rounds):
    """Only answers and the deadline close a round."""

    def _wait_over(self):
        return math.inf if self._phase is Phase.COLLECTING else super()._wait_over()


class LetsTheGraceStartAnew(Rounds):
    """The grace counts from the last answer instead of from the one that was enough."""

    def _reached_at(self):
        return None if super()._reached_at() is None else self._answered_at[-1]


class CountsTheGraceFromTheDeadline(Rounds):
    """The grace is a multiple of the time that is left, not of the time taken."""

    def _grace_over(self):
        return self._counted_from_the_deadline(super()._grace_over)

    def _watch(self, now):
        self._counted_from_the_deadline(lambda: Rounds._watch(self, now))

    def _counted_from_the_deadline(self, act):
        opened_at, self._opened_at = self._opened_at, self._deadline - self.policy.round_deadline_s / 2
        value = act()
        self._opened_at = opened_at
        return value


class ExpectsTheDead(Rounds):
    """The pace is max(n − f, q) whoever is dead: f silent members and one death hold every round to its deadline."""

    def _reached_at(self):
        pace = self.policy.pace(self.policy.num_clients)
        return self._answered_at[pace - 1] if len(self._answered_at) >= pace else None


class WaitsForThoseThatNeverCome(Rounds):
    """The first round waits for all n until the join deadline."""

    def _grace_over(self):
        return math.inf if self._phase is Phase.JOINING else super()._grace_over()


class RemembersThoseThatLeftWhileJoining(Rounds):
    """The grace before the first round goes on although too few are left."""

    def _may_start(self, now):
        since = self._enough_since
        may = super()._may_start(now)
        self._enough_since = since if self._enough_since is None else self._enough_since
        return may


class TakesAnswersToOtherRounds(Rounds):
    """An answer counts for the open round, whichever it was for."""

    def momentum_complete(self, client_id, round_id, now):  # noqa: ARG002
        return super().momentum_complete(client_id, self.round_id, now)


class TakesAnswersWhileClosing(Rounds):
    """A late answer is added to a round that has closed."""

    def momentum_complete(self, client_id, round_id, now):
        actions = super().momentum_complete(client_id, round_id, now)
        if self.phase is Phase.CLOSING and not actions and client_id not in self.answered:
            return [CloseRound(round_id, tuple(sorted({*self.answered, client_id})), self.missing, "deadline")]
        return actions


class KeepsTheAnswersOfTheRoundBefore(Rounds):
    """Who answered the last round need not answer this one."""

    def _open(self, now):
        before = set(self._answered)
        actions = super()._open(now)
        self._answered |= before
        return actions


class WaitsForTheDead(Rounds):
    """Whoever was live once is waited for."""

    def live_changed(self, live, now):
        return super().live_changed(self._live | live, now)


class WaitsAgainForOneThatRevived(Rounds):
    """A member that answered, died and revived owes another answer."""

    def live_changed(self, live, now):
        if self.phase is Phase.COLLECTING:
            self._owing |= live - self._live
        return super().live_changed(live, now)


class NeverGivesUp(Rounds):
    """The wait for the quorum has no end."""

    def _wait_until(self, deadline):
        super()._wait_until(deadline)
        self._give_up = deadline + 1e6


class GivesUpAfterSleeping(Rounds):
    """A server that was stopped counts the time as waiting."""

    def _settle(self, now):
        give_up = self._give_up
        if self._collecting_or_joining() and now >= give_up:
            self._overdue, self._deadline = True, now - 0.25
            self._give_up = now
        return super()._settle(now)


class ForgetsTheDeadlineAfterAResume(Rounds):
    """A run that is resumed opens its first round without a deadline."""

    def __init__(self, policy, *, start_round=0):
        super().__init__(policy, start_round=start_round)
        self._resumed_at = start_round

    def _wait_until(self, deadline):
        super()._wait_until(deadline)
        if self._phase is Phase.COLLECTING and self._round_id == self._resumed_at > 0:
            self._deadline = self._give_up = math.inf


class StartsFromTheBeginning(Rounds):
    """A run that is resumed starts at round 0."""

    def __init__(self, policy, *, start_round=0):  # noqa: ARG002
        super().__init__(policy)


class EndsBeforeWhatIsCommittedIsPublished(Rounds):
    """A stop ends the run at once, also while a round is being committed."""

    def stop(self, status, message, now, *, at_once=False):  # noqa: ARG002
        return super().stop(status, message, now, at_once=True)


class ForgetsToStop(Rounds):
    """A stop during the closing is lost."""

    def published(self, round_id, now):
        self._stopping = None
        return super().published(round_id, now)


class WaitsInSilence(Rounds):
    """Waits that a timer begins are not told."""

    def tick(self, now):
        return [action for action in super().tick(now) if not isinstance(action, Wait)]


class AsksForNoTickAtTheEndOfTheGrace(Rounds):
    """The timer is set for the deadline alone."""

    def next_tick(self, now):
        due = super().next_tick(now)
        return None if due is None else max(self._give_up if self._overdue else self._deadline, now)


class GoesOnAfterTheEnd(Rounds):
    """The end is said, and not remembered."""

    def _end(self, end):
        return end


class HurriesOnAPublicSchedule(Rounds):
    """A round on a public schedule closes when all have answered."""

    def _reason_to_close(self, now, was_overdue):
        all_there = self.policy.period_s is not None and len(self._answered) == self.policy.num_clients
        return "all_answered" if all_there else super()._reason_to_close(now, was_overdue)


# -------------------------------------------------------------------- patience


class WaitsOutEachGrace(Patience):
    """Nobody is ever charged: silence costs every round its grace."""

    def _charge(self, client_id, watch, now):
        pass


class GivesAFreeShareToWhoNeverAnswers(Patience):
    """Standing is not lost."""

    def in_good_standing(self, client_id):  # noqa: ARG002
        return True


class NeverForgives(Patience):
    """An answer does not restore standing."""

    def answered(self, client_id, now):
        missed = self._missed[client_id]
        super().answered(client_id, now)
        self._missed[client_id] = missed


class NeverRefills(Patience):
    """What is spent is spent: who comes back is not waited for any more."""

    def closed(self, owing, *, took, grace_s, now):  # noqa: ARG002
        super().closed(owing, took=0.0, grace_s=grace_s, now=now)


class RefillsWithoutEnd(Patience):
    """Credit grows for ever: who behaves for an hour may then hold up rounds for minutes."""

    def closed(self, owing, *, took, grace_s, now):  # noqa: ARG002
        super().closed(owing, took=took, grace_s=math.inf, now=now)


class ChargesNobodyThatLeaves(Patience):
    """Who is gone just before the round closes has waited for nothing."""

    def interrupt(self, now):
        super().interrupt(now if self._watch is None else self._watch.since)


class ChargesTheDead(Patience):
    """Who was waited for and is gone is charged to the end of the round."""

    def interrupt(self, now):
        held = self._watch.on_credit if self._watch else ()
        super().interrupt(now)
        self.gone_since = dict.fromkeys(held, now) | getattr(self, "gone_since", {})

    def closed(self, owing, *, took, grace_s, now):
        gone_since, self.gone_since = getattr(self, "gone_since", {}), {}
        super().closed(owing, took=took, grace_s=grace_s, now=now)
        for client_id in gone_since.keys() - set(owing):
            self._credit[client_id] -= min(now - gone_since[client_id], self._credit[client_id])


class ChargesForTheServersSleep(Patience):
    """A timer that comes late is charged to whoever was missing."""

    def _charge(self, client_id, watch, now):
        watch.grace_until = max(watch.grace_until, now)
        super()._charge(client_id, watch, now)


class ChargesTheFreeShareToo(Patience):
    """A member as fast as the free share allows runs out of credit."""

    def watch(self, owing, *, reached_at, took, grace_s, now):
        super().watch(owing, reached_at=reached_at, took=took, grace_s=grace_s, now=now)
        for client_id in self._watch.on_credit:
            self._watch.on_credit[client_id] = reached_at


class WaitsOnCreditThatDoesNotCover(Patience):
    """Any credit is enough to be waited for."""

    def watch(self, owing, *, reached_at, took, grace_s, now):
        credit, self._credit = self._credit, [math.inf if credit > 0 else credit for credit in self._credit]
        super().watch(owing, reached_at=reached_at, took=took, grace_s=grace_s, now=now)
        self._credit = credit


class TurnsDownForEver(Patience):
    """Whom the credit did not cover once is not waited for on credit again."""

    def closed(self, owing, *, took, grace_s, now):
        turned_down = set(self._turned_down)
        super().closed(owing, took=took, grace_s=grace_s, now=now)
        self._turned_down = turned_down


class GivesCreditToEachIncarnation(Rounds):
    """Who joins anew has all the patience again."""

    def live_changed(self, live, now):
        self._patience.interrupt(now)
        for client_id in live - self._live:
            self._patience._credit[client_id] = self.policy.patience_s
            self._patience._missed[client_id] = 0
        return super().live_changed(live, now)


class AsksForNoTickWhenPatienceIsOver(Rounds):
    """The timer is set for the end of the grace."""

    def next_tick(self, now):
        due = super().next_tick(now)
        return (
            None
            if due is None
            else max(min(self._give_up if self._overdue else self._deadline, self._grace_over()), now)
        )


def impatient(bug: type[Patience]) -> type[Rounds]:
    """Rounds with that kind of patience."""

    def __init__(self, policy, *, start_round=0):  # noqa: N807
        Rounds.__init__(self, policy, start_round=start_round)
        self._patience.__class__ = bug

    return type(bug.__name__, (Rounds,), {"__init__": __init__})


# -------------------------------------------------------------------- roster


class DoesNotEvict(Roster):
    """A re-join leaves the older incarnation in its place."""

    def join(self, client_id, incarnation, now):
        known = self._members.get(client_id)
        return super().join(client_id, incarnation if known is None else known.incarnation, now)


class InheritsTheLoss(Roster):
    """A new incarnation has only what is left of the older one's grace."""

    def join(self, client_id, incarnation, now):
        since = self._lost_at.get(client_id)
        evicted = super().join(client_id, incarnation, now)
        if since is not None:
            self._lost_at[client_id] = since
        return evicted


class ForgetsTheReconnection(Roster):
    """A heartbeat does not end the grace of a broken stream."""

    def heartbeat(self, client_id, incarnation, now):
        since = self._lost_at.get(client_id)
        known = super().heartbeat(client_id, incarnation, now)
        if since is not None and known:
            self._lost_at[client_id] = since
        return known


class LengthensTheGrace(Roster):
    """Losing the stream again gives another grace."""

    def lost(self, client_id, incarnation, now):
        known = super().lost(client_id, incarnation, now)
        if known and client_id in self._lost_at:
            self._lost_at[client_id] = now
            self._lost_at.move_to_end(client_id)
        return known


class HearsTheSuperseded(Roster):
    """Any incarnation speaks for its identity."""

    def _current(self, client_id, incarnation):  # noqa: ARG002
        return self._members.get(client_id)


class LetsTheDeadLive(Roster):
    """A death is noticed a quarter of a second late."""

    def tick(self, now):
        return super().tick(now - 0.25)


class NeverRevives(Roster):
    """The heartbeat of a dead member is not heard."""

    def _hear(self, member, now):
        if member.client_id in self._heard_at or member.last_seen == now:
            super()._hear(member, now)


class CountsSleepAsSilence(Roster):
    """A server that was stopped counts the time as its clients' silence."""

    def _bear_with(self, silent, now):
        pass


# -------------------------------------------------------------------- the coordinator and the store, as modelled


class PublishesBeforeCommitting(Stage):
    """The model leaves first, and is committed afterwards."""

    def commit(self):
        (round_id, content), self.making = self.making, None
        self.books.published(round_id, content)
        self._burn("between publish and commit")
        self.books.committed(round_id, content)
        self.referee.published(self.now)
        self._act(self.rounds.published(round_id, self.now))


class CommitsAnew(Stage):
    """A server that died between commit and publish makes the round again, with other noise."""

    def start(self):
        if len(self.ledger) > 1 and len(self.ledger) - 1 not in self.books.shown:
            self.contents += 1
            self.books.shown[len(self.ledger) - 1] = self.contents
        super().start()


class LosesTheLastCommit(Stage):
    """A commit is not durable until the next one: a crash loses the last row of the ledger."""

    def start(self):
        if len(self.ledger) > 1:
            del self.ledger[-1]
        super().start()


class LeavesTheInboxOpen(Stage):
    """A momentum that arrives while its round is being made still goes to the rounds."""

    def _receive(self, client_id, incarnation, round_id):
        how = super()._receive(client_id, incarnation, round_id)
        if how == "late":
            self.inbox.add(client_id)
            self.making = (self.making[0], self.making[1] + 1) if self.making else None
            return "accepted"
        return how


class IgnoresWhoRevivesByAnswering(Stage):
    """A momentum revives its sender in the roster; the rounds are not told."""

    def _seen_alive(self, client_id, incarnation):
        self.roster.heartbeat(client_id, incarnation, self.now)
        self.members.hear(client_id, self.now)


class TakesAnybodysMomentum(Stage):
    """The incarnation of a momentum is not checked."""

    def _receive(self, client_id, incarnation, round_id):
        current = self.members.current.get(client_id)
        return super()._receive(client_id, incarnation if current is None else current, round_id)


class KeysTheInboxByIncarnation(Stage):
    """A member that joins anew may answer the same round again."""

    def join(self, client_id, incarnation):
        super().join(client_id, incarnation)
        self.inbox.discard(client_id)


class PublishesAheadOfTheSchedule(Stage):
    """A model that is ready early is published early."""

    def publish(self):
        opened_at = self.rounds._opened_at
        self.rounds._opened_at = -math.inf
        try:
            return super().publish()
        finally:
            if self.rounds._opened_at == -math.inf:
                self.rounds._opened_at = opened_at


ROUNDS = (
    *(ClosesBelowQuorum, ClosesWithoutQuorumAtTheDeadline, CountsTheLive, CountsADuplicateTwice, ForgetsTheGrace),
    *(LetsTheGraceStartAnew, CountsTheGraceFromTheDeadline, ExpectsTheDead, WaitsForThoseThatNeverCome),
    *(RemembersThoseThatLeftWhileJoining, TakesAnswersToOtherRounds, TakesAnswersWhileClosing),
    *(KeepsTheAnswersOfTheRoundBefore, WaitsForTheDead, WaitsAgainForOneThatRevived, NeverGivesUp),
    *(GivesUpAfterSleeping, ForgetsTheDeadlineAfterAResume, StartsFromTheBeginning),
    *(EndsBeforeWhatIsCommittedIsPublished, ForgetsToStop, WaitsInSilence, AsksForNoTickAtTheEndOfTheGrace),
    *(GoesOnAfterTheEnd, HurriesOnAPublicSchedule, GivesCreditToEachIncarnation, AsksForNoTickWhenPatienceIsOver),
)
PATIENCE = (
    *(WaitsOutEachGrace, GivesAFreeShareToWhoNeverAnswers, NeverForgives, NeverRefills, RefillsWithoutEnd),
    *(ChargesNobodyThatLeaves, ChargesTheDead, ChargesForTheServersSleep, ChargesTheFreeShareToo),
    *(WaitsOnCreditThatDoesNotCover, TurnsDownForEver),
)
ROSTER = (
    *(DoesNotEvict, InheritsTheLoss, ForgetsTheReconnection, LengthensTheGrace, HearsTheSuperseded, LetsTheDeadLive),
    *(NeverRevives, CountsSleepAsSilence),
)
COORDINATOR = (
    *(PublishesBeforeCommitting, CommitsAnew, LosesTheLastCommit, LeavesTheInboxOpen, IgnoresWhoRevivesByAnswering),
    *(TakesAnybodysMomentum, KeysTheInboxByIncarnation, PublishesAheadOfTheSchedule),
)

MUTANTS: dict[str, type[Stage]] = {
    **{bug.__name__: type(bug.__name__, (Stage,), {"rounds_type": bug}) for bug in ROUNDS},
    **{bug.__name__: type(bug.__name__, (Stage,), {"rounds_type": impatient(bug)}) for bug in PATIENCE},
    **{bug.__name__: type(bug.__name__, (Stage,), {"roster_type": bug}) for bug in ROSTER},
    **{bug.__name__: bug for bug in COORDINATOR},
}

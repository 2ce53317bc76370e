"""When rounds open, close and give up, and what that guarantees against silent and slow clients. Sans-I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ConfigError

__all__ = ["RoundPolicy"]


@dataclass(frozen=True)
class RoundPolicy:
    """The times and numbers of a run's rounds, fixed before it starts. Durations are in seconds.

    Raises
    ------
    ConfigError
        A count that does not fit the others, or a duration that is negative, zero where it bounds a wait, or not
        finite.

    Notes
    -----
    *Guarantee.* Let at most ``f`` of the ``n`` identities be Byzantine, ``q`` be the quorum, and ``k`` of the other
    n − f be dead, with n − f − k ≥ q. Let T be the time from the opening of a round until the last of the live honest
    members has answered. Then the round closes by max(T + max(grace_floor_s, grace_factor · T), the time by which the
    k deaths are noticed), and never after its deadline; whatever the Byzantine members do: keep silent, answer early
    or late, come and go.

    *Proof.* At any instant from T on, let P members be present (live, or with an answer), h of them honest. At most f
    are Byzantine, so P ≤ h + f; once the deaths are noticed, h ≥ n − f − k ≥ q, and the pace max(P − f, q) is at most
    h. All h have answered by T, so the answer that reached the pace came no later, and its grace is over by then. ∎

    So n − f − q honest deaths cost nothing but their detection. What f Byzantine members can do, by answering at once
    or by leaving, is to start the grace when all but f of the honest ones present have answered; and no round closes
    below q. When n − f < q, silence alone holds every round until its deadline, and then ends the run: see
    :meth:`warning`.

    *All rounds together.* A grace in every round would let silence multiply the length of short rounds. What bounds it
    is patience (:mod:`ps.patience`), with s = ``patience_share`` and r = ``patience_refill``. Now let T of a round be
    the time from its opening until the last moment at which a live honest member owed an answer. Of any number of
    rounds, from the server's start on, with n − f − k ≥ q in each and timers on time, let W be the sum of what they
    stayed open after their T. Then W ≤ (s + r) · ΣT + f · patience_s, whatever the f Byzantine members do.

    *Proof.* As above, at any instant after T the pace was reached at some R ≤ T after the opening, and only Byzantine
    members are missing; the round is open because one of them is waited for. Either that instant is before the end of
    its free share, (1 + s) · R ≤ (1 + s) · T: such instants come to s · T at most. Or it is charged for that instant.
    Nobody is charged more than its credit covers, and that is ``patience_s`` and what was added: in each round r / f
    times the R of its closing, which is no later than T if the round outlasted T, and otherwise earlier than the
    closing and so than T. So f members are charged f · patience_s + r · ΣT at most. ∎

    *Who is waited for.* An honest member that answers within (1 + min(s, grace)) times the pace is never left out for
    its slowness: it begins in good standing, no round that waits for it through its free share misses it, so it stays
    there. One that is slower is waited for as long as its credit lasts, and then as often as the refill pays for what
    it takes beyond. One that has lost its standing, by a long partition say, is waited for through a whole grace again
    once the times R to the pace have come to f/r times the longest grace G since: until then its credit grows by
    r/f · R in each round it is not waited for, and at G it covers any. With graces of R, that is f/r rounds (40 with
    f = 4). It need not wait so long where others are slower: to answer before a round closes, whoever that waited for,
    restores its standing.
    """

    num_clients: int
    num_byzantine: int
    quorum: int
    rounds: int
    join_deadline_s: float
    round_deadline_s: float
    grace_factor: float
    grace_floor_s: float
    quorum_deadline_s: float
    period_s: float | None = None
    """From the opening of a round to the opening of the next, on a public schedule; None closes by answers."""
    margin_s: float = 0.0
    """How much of the period is left to make and publish the round after it closed."""
    join_grace_s: float = 15.0
    """The grace before the first round is at least so long: those who miss it miss rounds, not seconds of one."""
    tardy_s: float = 5.0
    """A timer that is later than this shows that the server itself was stopped, and that nobody could reach it."""
    patience_s: float = 3.0
    """Waiting that one identity may cost, over all rounds; infinite: each grace is waited out."""
    patience_share: float = 0.4
    """Of a round's T: the wait that costs nothing."""
    patience_refill: float = 0.1
    """Of a round's T: what is added to the credits of f identities together."""

    def __post_init__(self) -> None:
        n = self.num_clients
        for name, least, most in (
            ("num_clients", 1, None),
            ("num_byzantine", 0, n - 1),
            ("quorum", 1, n),
            ("rounds", 1, None),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                limits = f"at least {least}" if most is None else f"{least} to {most} with {n} clients"
                raise ConfigError(f"{name} = {value!r}: expected {limits}")
        bounding = ("join_deadline_s", "round_deadline_s", "quorum_deadline_s", "tardy_s")
        for name in (*bounding, "grace_factor", "grace_floor_s", "join_grace_s"):
            value = getattr(self, name)
            bounds_a_wait = name in bounding
            if not (math.isfinite(value) and (value > 0 if bounds_a_wait else value >= 0)):
                raise ConfigError(
                    f"{name} = {value!r}: expected a finite number {'above 0' if bounds_a_wait else 'of at least 0'}"
                )
        if not self.patience_s >= 0:
            raise ConfigError(f"patience_s = {self.patience_s!r}: expected at least 0")
        for name in ("patience_share", "patience_refill"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: expected a share of 0 to 1")
        if self.period_s is not None and not 0 <= self.margin_s < self.period_s < math.inf:
            raise ConfigError(f"margin_s = {self.margin_s!r}: expected less than the period of {self.period_s!r} s")

    @property
    def collect_s(self) -> float:
        """How long a round collects at most, while the quorum is there."""
        return self.round_deadline_s if self.period_s is None else self.period_s - self.margin_s

    def pace(self, present: int) -> int:
        """``max(P − f, q)``: with so many answers, a round waits for the rest of the P present only for the grace."""
        return max(present - self.num_byzantine, self.quorum)

    def grace_s(self, took_s: float) -> float:
        """How long a round waits for the rest, when the pace was reached after ``took_s``."""
        return max(self.grace_floor_s, self.grace_factor * took_s)

    def start_grace_s(self, took_s: float) -> float:
        """How long the first round waits for the rest, when max(n − f, q) had joined after ``took_s``."""
        return max(self.join_grace_s, self.grace_s(took_s))

    def longest_s(self, rounds: int) -> float:
        """Seconds after which a run with ``rounds`` rounds to go has ended.

        The time spent publishing is apart, and what it takes because the server was stopped: the stop itself, and one
        more ``quorum_deadline_s`` for each.
        """
        waiting = self.quorum_deadline_s if self.period_s is None else self.margin_s
        return self.join_deadline_s + self.quorum_deadline_s + rounds * (self.collect_s + waiting)

    def warning(self) -> str | None:
        """A sentence when the margin is so small that the Byzantine clients can set the pace, else None."""
        n, f, q = self.num_clients, self.num_byzantine, self.quorum
        if f == 0 or self.period_s is not None:
            return None
        if q > n - f:
            return (
                f"{f} Byzantine clients can set the pace: the quorum is {q}, and only {n - f} of {n} clients are sure "
                f"to answer, so by keeping silent they hold every round until its deadline and then end the run; "
                f"lower the quorum to {n - f} or less, or add clients"
            )
        if n <= 3 * f + 1:
            return (
                f"{n} clients leave no margin for {f} Byzantine ones: when these keep silent, {n - f} answers are left "
                f"of which a robust rule can need {2 * f + 1}, so with any honest client absent too, the silent ones "
                f"set the pace of every round; at least {3 * f + 2} clients are advised"
            )
        return None

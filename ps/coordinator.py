"""The coordinator: carries out what ``rounds.py`` and ``roster.py`` decide.

The imperative shell around the pure parts. Events come from the service (joined, momentum complete, …) and from the
clock; actions go to the inbox, the round maker and the waiting clients. Everything runs on the event loop, except the
making of a round, which has a thread of its own so that heartbeats and pulls are served meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from common.errors import ByzULDPError, RunEnded, RunFailed, StoreProblem, publicly
from common.rpc.frames import tensor_frames
from common.rpc.refusals import Refused, kind_name
from common.rpc.texts import shown
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.broadcast import Broadcast
from ps.faults import Fault, no_fault
from ps.identity import Peer
from ps.inbox import Inbox
from ps.membership import Attendance, Membership
from ps.roster import Roster
from ps.round_maker import RoundMaker
from ps.round_policy import RoundPolicy
from ps.rounds import Action, CloseRound, EndRun, OpenRound, Phase, Rounds, Wait
from ps.store import CommittedRound, RefusalCount, RoundMetrics, RunStore
from ps.tally import Tally
from ps.timeouts import Timeouts
from ps.timing import RoundTiming

if TYPE_CHECKING:
    from common.config import Experiment

__all__ = ["Coordinator", "Report"]

log = logging.getLogger("byzuldp.ps")

Report = Callable[[dict[str, Any]], None]
"""Takes what the operator may see, answers and missing clients included: ``{"event": …}`` with JSON values."""


class Coordinator:
    """One run of one parameter server.

    Parameters
    ----------
    experiment
        The configuration in force.
    store
        The open run folder; the run goes on after its latest committed round.
    maker
        Makes a committed model of a closed round.
    inbox
        Where momenta land.
    membership
        Builds the run's membership, given a roster, a clock and what to call when somebody comes or goes.
    report
        Told what an onlooker may see.
    evaluate
        Offered every committed model.
    observe
        Given the record of every round, once its model is published. It must return at once.
    fault
        A test's hook: see :mod:`ps.faults`.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        store: RunStore,
        maker: RoundMaker,
        inbox: Inbox,
        membership: Callable[[Roster, Callable[[], float], Callable[[], None]], Membership],
        report: Report,
        evaluate: Callable[[CommittedRound], None],
        observe: Callable[[RoundMetrics], None] = lambda _: None,
        fault: Fault = no_fault,
    ) -> None:
        network = experiment.network
        self.experiment, self.store, self.inbox, self.maker = experiment, store, inbox, maker
        policy = policy_of(experiment, inbox.row_bytes, maker.mechanism.rule.minimum_clients)
        self.rounds = Rounds(policy, start_round=store.latest().round_id)
        roster = Roster(
            range(experiment.federation.clients),
            liveness_s=network.liveness_s,
            reconnect_grace_s=2 * network.heartbeat_s,
        )
        self.members = membership(roster, self._now, self._live_changed)
        self._report, self._evaluate, self._observe, self._fault = report, evaluate, observe, fault
        self._end: EndRun | None = None
        self.store_problem: StoreProblem | None = None
        """Why no more rounds can be committed: the run folder cannot be used as it is."""
        self._broadcast = Broadcast(-1, ())
        self._closing: asyncio.Queue[CloseRound | None] = asyncio.Queue()
        self._pulls: set[asyncio.Event] = set()  # waiting for a round to open
        self._waiters: set[asyncio.Event] = set()  # waiting for anything else
        self._timeouts = Timeouts()
        self._timer: asyncio.TimerHandle | None = None
        self._timing: RoundTiming | None = None  # of the round whose θ is available; the first one's begins with it
        self._bytes_down = self._bytes_up = 0
        self._errors_told: set[tuple[int, int]] = set()
        self._tally = Tally(self._write_refusals)
        self._refusals: Counter[str] = Counter()  # by kind, since this server began
        self._answered_by: dict[int, bytes] = {}  # the incarnation whose momentum of the open round is complete
        self._repeats: Counter[int] = Counter()  # of a momentum of the open round that is complete

    # ---------------------------------------------------------------- the life of a run

    async def run(self) -> EndRun:
        """From listening to the run's end. Returns how it ended; the clients have been told."""
        self._publish(self.store.latest())
        self._carry_out(self.rounds.started(self._now()))
        with ThreadPoolExecutor(1, thread_name_prefix="round") as thread:
            while (closing := await self._closing.get()) is not None:
                await self._finish_round(closing, thread)
        if self._timer is not None:
            self._timer.cancel()
        assert self._end is not None  # noqa: S101 - only EndRun queues None
        return self._end

    async def _finish_round(self, closing: CloseRound, thread: ThreadPoolExecutor) -> None:
        timing = self._timing
        assert timing is not None  # noqa: S101 - a round closes after it opened
        self._fault("round_closed")
        try:
            making = asyncio.get_running_loop().run_in_executor(thread, self.maker.make, closing, timing)
            committed = await making
        except ByzULDPError as problem:
            status = problem.status if isinstance(problem, RunEnded) else RunFailed.status
            if isinstance(problem, StoreProblem):
                self.store_problem = problem
            self._carry_out(self.rounds.stop(status, str(problem), self._now(), at_once=True))
            return
        except Exception as defect:  # whatever happens, the run ends with a status and its clients are told
            log.exception("round %d could not be made", closing.round_id)
            message = f"round {closing.round_id} could not be made: {defect!r}"
            self._carry_out(self.rounds.stop(RunFailed.status, message, self._now(), at_once=True))
            return
        try:
            await self._public_time(committed)
        except StoreProblem as problem:
            self.store_problem = problem
            self._carry_out(self.rounds.stop(RunFailed.status, str(problem), self._now(), at_once=True))
            return
        timing.ends("hold")
        self._fault("before_publish")
        self._publish(committed)
        timing.ends("publish")
        self._timing = RoundTiming(committed.round_id, timing.available_at + timing.latency_s)
        self._carry_out(self.rounds.published(committed.round_id, self._now()))
        self._fault("published")
        self._record(closing, timing)

    async def _public_time(self, committed: CommittedRound) -> None:
        """On a public schedule, hold a model back until its time; one that is late says so, and the run's claim too."""
        due = self.rounds.publish_at
        if due is not None:
            if self._now() > due:
                log.warning(
                    "the model of round %d is published %.2f s behind the public schedule, so this run's claim rests "
                    "on premise P2 too; raise network.publish_margin_s",
                    committed.round_id,
                    self._now() - due,
                )
                await asyncio.get_running_loop().run_in_executor(None, self.store.note_late, committed.round_id)
            await asyncio.sleep(due - self._now())

    def stop(self, status: str, message: str) -> None:
        """End the run in good order; a round that is being made is still published."""
        self._carry_out(self.rounds.stop(status, message, self._now()))

    def tick(self) -> None:
        """Let time pass: deaths, deadlines, the grace."""
        self._timer = None
        if dead := self.members.roster.tick(self._now()):
            log.info("taken for dead: client%s %s", "s" * (len(dead) > 1), ", ".join(map(str, dead)))
            self._live_changed()
        self._carry_out(self.rounds.tick(self._now()))

    # ---------------------------------------------------------------- carrying out actions

    def _carry_out(self, actions: Iterable[Action]) -> None:
        _wake(self._waiters)
        for action in actions:
            match action:
                case OpenRound():
                    self._open(action)
                    _wake(self._pulls)  # only now: with n of them, waking each at each arrival would cost n² a round
                case CloseRound():
                    self.inbox.close()
                    self._collected(action)
                    self._closing.put_nowait(action)
                case Wait():
                    self._report({"event": "wait", "message": action.message, "seconds": action.until - self._now()})
                case EndRun():
                    log.info("the run ended: %s: %s", action.status, action.message)
                    self._end = action
                    # Everybody is told the status alone: the message may name clients, or quote what a rule saw.
                    self.members.finish(action.status, publicly(action.status), releases=self.maker.releases)
                    self._closing.put_nowait(None)
                    _wake(self._pulls)
        self._schedule_tick()

    def _open(self, action: OpenRound) -> None:
        self.inbox.open()
        self._errors_told.clear()
        self._answered_by.clear()
        self._repeats.clear()
        self.maker.foresee(action.round_id)
        if self._timing is None:  # the first round of this process: θ has waited for clients, not for us
            self._timing = RoundTiming(action.round_id, self._now())
        self._timing.ends("open")
        self._fault("round_opened")

    def _publish(self, committed: CommittedRound) -> None:
        """Serialise a committed model once; the same bytes go to every client that pulls it."""
        header = pb.ModelHeader(
            model=pb.Model(
                round_id=committed.round_id,
                element_count=len(committed.theta),
                schema_hash=self.members.schema_hash,
                ledger_head=committed.head,
            )
        )
        self._broadcast.let_go()
        frames = tensor_frames(header, committed.theta, self.experiment.network.chunk_bytes)
        self._broadcast = Broadcast(committed.round_id, frames)
        self._evaluate(committed)

    def _collected(self, closing: CloseRound) -> None:
        """The round has closed: say when the pace was reached, and that the wait for the rest is over."""
        assert self._timing is not None  # noqa: S101 - a round closes after it opened
        now = self._now()
        if not closing.answered:
            self._timing.ends("first", now)
        self._timing.ends("collect", self.rounds.pace_reached_at or now)
        self._timing.ends("grace", now)

    def _record(self, closing: CloseRound, timing: RoundTiming) -> None:
        latency_s = timing.latency_s
        metrics = RoundMetrics(
            round_id=closing.round_id,
            started_at=time.time() - (self._now() - timing.available_at),
            latency_s=latency_s,
            segments=timing.segments,
            spans=timing.spans,
            answered=len(closing.answered),
            missing=closing.late,
            bytes_down=self._bytes_down,
            bytes_up=self._bytes_up,
        )
        with _best_effort():
            self.store.record_round(metrics)
        self._observe(metrics)
        self._tally.flush()
        self._bytes_down = self._bytes_up = 0
        self._report(
            {
                "event": "round",
                "round": closing.round_id + 1,
                "of": self.experiment.training.rounds,
                "latency_s": latency_s,
                "segments": metrics.segments,
                "live": len(self.members.roster.live),
                "answered": len(closing.answered),
                "clients": self.experiment.federation.clients,
                "missing": list(closing.late),
                "epsilon": self.maker.epsilon_spent(),
            }
        )

    def _live_changed(self) -> None:
        self._carry_out(self.rounds.live_changed(self.members.roster.live, self._now()))

    def _schedule_tick(self) -> None:
        """Be called when the next thing is due, or before: a timer that is set for earlier is left as it is."""
        if self.rounds.phase is Phase.ENDED:
            return
        now = self._now()
        dues = [due for due in (self.rounds.next_tick(now), self.members.roster.next_tick(now)) if due is not None]
        if not dues:
            return
        if self._timer is not None:
            if self._timer.when() <= min(dues):
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(min(dues), self.tick)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- waiting for the round

    async def model(self, wanted: int, wait_s: float) -> Broadcast | pb.NotYet | pb.RunFinished:
        """The open round's model, once that round is ``wanted`` or a later one."""
        if not await self._until(lambda: self._is_open(wanted), wait_s, self._pulls):
            return pb.NotYet(round_id=self.rounds.round_id, waiting_for=f"round {wanted} to open")
        return self._broadcast if self.members.over is None else self.members.over

    def _is_open(self, wanted: int) -> bool:
        return self.rounds.phase is Phase.COLLECTING and self.rounds.round_id >= wanted

    async def reached(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition of the round, or for the run's end; False when the time is over."""
        return await self._until(condition, wait_s, self._waiters)

    async def _until(self, condition: Callable[[], bool], wait_s: float, waiters: set[asyncio.Event]) -> bool:
        if self.members.over is not None or condition():
            return True
        changed = asyncio.Event()
        waiters.add(changed)
        try:
            # A peer's number: only a comparison that NaN fails may let it near the event loop's timers.
            limit = self.experiment.network.rpc_deadline_s
            with self._timeouts.within(wait_s if 0.0 <= wait_s <= limit else limit if wait_s > limit else 0.0):
                while self.members.over is None and not condition():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            waiters.discard(changed)
        return True

    # ---------------------------------------------------------------- what arrives

    def join(self, request: pb.JoinRequest, peer: Peer) -> bytes:
        """A member joins; a momentum that its older incarnation was still sending is dropped.

        Raises
        ------
        Refused
            See :meth:`ps.membership.Membership.join`.
        """
        joining = self.members.join(request, peer)
        self.inbox.expel(request.client_id)
        if joining.taken_over:
            log.warning("%s", joining.taken_over)
            self.count("evicted", request.client_id)
        return joining.incarnation

    def arrived(self, client_id: int, round_id: int, incarnation: bytes) -> None:
        """A momentum is complete in the inbox; whoever sent it is alive."""
        self._fault("momentum_complete")
        self._answered_by[client_id] = incarnation
        if self._timing is not None and len(self._answered_by) == 1:
            self._timing.ends("first")
        self.members.seen(client_id)
        self._carry_out(self.rounds.momentum_complete(client_id, round_id, self._now()))

    def repeats(self, client_id: int) -> None:
        """A member sends once more what is complete.

        Raises
        ------
        Refused
            Too often: it would be read and hashed each time.
        """
        self._repeats[client_id] += 1
        most = self.experiment.network.max_repeats
        if self._repeats[client_id] > most:
            raise Refused(
                pb.TOO_MANY_CALLS,
                f"client {client_id} has repeated its momentum {most} times in this round (network.max_repeats)",
            )

    def is_the_one_that_answered(self, caller: pb.Caller) -> bool:
        """Whether the same incarnation sent the complete momentum of the open round."""
        return self._answered_by.get(caller.client_id) == caller.incarnation

    def breach(self, client_id: int, kind: int) -> None:
        """A member, beyond doubt, has sent what no honest client sends: a strike, and the last one suspends it."""
        suspended_s = self.members.strike(client_id)
        if suspended_s > 0:
            self.inbox.expel(client_id)
            self.count(pb.SUSPENDED, client_id)
            message = (
                f"client {client_id} is suspended for {suspended_s:.0f} s: it has broken the protocol "
                f"{self.experiment.network.strikes} times, the last time by {kind_name(kind)}"
            )
            log.warning("%s", message)
            self._report({"event": "suspended", "client": client_id, "seconds": suspended_s, "message": message})

    def took(
        self, name: str, client_id: int, round_id: int, began_at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Something of a round took time beside its critical path; what is of a round that is over comes too late."""
        if self._timing is not None and self._timing.round_id == round_id:
            self._timing.span(name, client_id, began_at, seconds, num_bytes)

    def count_bytes(self, *, down: int = 0, up: int = 0) -> None:
        """Payload that travelled, for the round's record."""
        self._bytes_down += down
        self._bytes_up += up

    def count(self, kind: int | str, client_id: int | None) -> None:
        """Count a refusal (or ``non_finite``, ``client_error``), under the identity it came from if it is known."""
        name = kind if isinstance(kind, str) else kind_name(kind)
        self._tally.add(name, self.members.known(client_id), self.rounds.round_id)

    def close(self) -> None:
        """Nobody calls any more: write what is not yet recorded."""
        self._tally.close()

    def _write_refusals(self, counts: Sequence[RefusalCount]) -> None:
        with _best_effort():
            self.store.record_refusals(counts)
        for refusal in counts:
            self._refusals[refusal.kind] += refusal.count
        self._report({"event": "refusals", "counts": dict(self._refusals)})

    def client_error(self, attendance: Attendance, error: pb.ClientError) -> None:
        """A client reports a fault of its own."""
        told = (error.client_id, self.rounds.round_id)
        if error.client_id in attendance.callers and told not in self._errors_told:
            self._errors_told.add(told)  # one a round of each identity: a peer must not fill logs and disks
            message = f"client {error.client_id}, round {error.round_id}: {shown(error.kind)}: {shown(error.message)}"
            log.warning("%s", message)
            self.count("client_error", error.client_id)
            self._report({"event": "client_error", "message": message})


def _wake(waiters: Iterable[asyncio.Event]) -> None:
    for changed in waiters:
        changed.set()


@contextmanager
def _best_effort() -> Iterator[None]:
    """A metric that cannot be written is logged and lost; the ledger and the models have their own path."""
    try:
        yield
    except StoreProblem as problem:
        log.warning("not recorded: %s", problem)


def policy_of(experiment: Experiment, model_bytes: int, rule_needs: int) -> RoundPolicy:
    """When rounds open, close and give up, as configured; the quorum is never below what the rule needs."""
    federation, network = experiment.federation, experiment.network
    return RoundPolicy(
        num_clients=federation.clients,
        num_byzantine=federation.byzantine,
        quorum=max(federation.needed, rule_needs),
        rounds=experiment.training.rounds,
        join_deadline_s=network.join_deadline_s,
        join_grace_s=network.join_grace_s,
        round_deadline_s=network.deadline_of_round(model_bytes, federation.clients),
        grace_factor=network.grace_factor,
        grace_floor_s=network.grace_floor_s,
        quorum_deadline_s=network.quorum_deadline_s,
        period_s=network.round_period_s if experiment.privacy.round_timing == "fixed" else None,
        margin_s=network.publish_margin_s,
        patience_s=network.patience_s,
    )

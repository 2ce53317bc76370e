"""``byzuldp simulate``: a run with its folder, ledger and summary, in one process.

Rounds are made, charged and committed by the server's own :class:`ps.round_maker.RoundMaker`, in the server's own
store. What the network did in between is :class:`deploy.simulate.clients.SimulatedClients`.

While a round is being made durable, the next gradients are computed. They, and what is computed from them, stay in
memory until that commit has ended; only then is another aggregate made. So there is never more than one release that
is not in the ledger, and nothing of it is visible: it is not reported, scored or given to an attack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.aggregation.step import prepare_conditioning
from common.config import Experiment
from common.errors import BudgetExhausted, Interrupted, RunEnded, RunFailed
from common.learning.task import Task, build_task, single_threaded
from deploy.simulate.clients import SimulatedClients, refuse_network_only
from deploy.simulate.momenta import load_momenta, save_momenta
from deploy.tokens import refuse_others_clients
from ps.conclusion import COMPLETED, conclude
from ps.evaluation import Evaluator, Score
from ps.faults import Fault, no_fault
from ps.mechanism import device_of, noise_of, opened
from ps.opening import as_promised, begin_run, stored_run, with_schedule_of
from ps.privacy.ledger import Budget, Ledger
from ps.privacy.plan import warnings_of
from ps.records import RoundMetrics
from ps.release import Mechanism
from ps.round_maker import MadeRound, RoundMaker
from ps.rounds import CloseRound
from ps.store import CommittedRound, RunStore
from ps.timing import RoundTiming

__all__ = ["run_simulation"]

Report = Callable[[dict[str, Any]], None]

ROUND_EVENT_S = 0.1  # ε is worked out anew for each


def run_simulation(
    experiment: Experiment,
    run_dir: Path,
    *,
    resume: bool = False,
    report: Report = lambda _event: None,
    exact: bool = False,
    stop: threading.Event | None = None,
    fault: Fault = no_fault,
) -> dict[str, Any]:
    """Simulate a run until it ends; returns its summary, which is also in ``run_dir/summary.json``.

    Parameters
    ----------
    run_dir
        A new folder; with ``resume`` that of the run to go on with, under the configuration stored there.
    report
        Told what an onlooker may see, as the parameter server tells it.
    exact
        One client after the other, by the clients' own code. Otherwise gradients are computed together where the model
        allows it, and agree with those within float32 rounding.
    stop
        Set by whoever wants the run to end after the round in hand, as ``interrupted``.
    fault
        A test's hook: see :mod:`ps.faults`.

    Raises
    ------
    ByzULDPError
        A leaf that says why there is no run. A run that began ends with a status in the summary instead.
    """
    started_at = time.perf_counter()
    with ExitStack() as resources:
        if resume:
            refuse_others_clients(run_dir)
            store = resources.enter_context(RunStore.open(run_dir, fault=fault))
            ledger, stored = stored_run(store)
            experiment = stored.model_copy(update={"network": with_schedule_of(stored, experiment.network)})
        refuse_network_only(experiment)
        single_threaded()
        task = build_task(experiment)
        if resume:
            budget, mechanism = Budget.of(ledger.genesis), as_promised(ledger.genesis, stored, task)
            report({"event": "resumed", "round": store.latest().round_id})
        else:
            previous, budget, mechanism = opened(experiment, lambda: task.dataset.train.labels)
        # Whatever can refuse the experiment does so before there is a folder.
        clients = SimulatedClients(experiment, task, mechanism, device_of(experiment.training.device), exact=exact)
        if not resume:
            store, ledger = begin_run(experiment, run_dir, task, mechanism, previous, fault)
            resources.enter_context(store)
        how = "one client after the other" if clients.one_by_one else "all clients at once"
        report({"event": "note", "message": f"run {store.run_id}, gradients of {how}, folder {store.folder}"})
        run = _Run(experiment, store, task, ledger, budget, mechanism, clients, report, started_at, fault)
        return run.through(stop or threading.Event(), resume=resume)


@dataclass
class _Run:
    experiment: Experiment
    store: RunStore
    task: Task
    ledger: Ledger
    budget: Budget | None
    mechanism: Mechanism
    clients: SimulatedClients
    report: Report
    started_at: float
    fault: Fault
    _told_at: float = -1e9

    def through(self, stop: threading.Event, *, resume: bool) -> dict[str, Any]:
        """All rounds that are left, and the ending."""
        experiment, n, d = self.experiment, self.experiment.federation.clients, self.task.num_parameters
        self.mechanism.rule.prepare(n, d, self.clients.device)
        prepare_conditioning(n * max(1, experiment.training.rounds // 100), d)  # a compiler is worth a long run's rows
        # A model of its own: the task's may be in use for gradients.
        evaluator = Evaluator(
            self.task.model.copied(self.clients.device),
            self.task.dataset,
            images=experiment.evaluation.images,
            record=self._scored,
        )
        maker = RoundMaker(
            experiment,
            store=self.store,
            ledger=self.ledger,
            budget=self.budget,
            mechanism=self.mechanism,
            noise=noise_of(experiment, d),
            inbox=self.clients,
            fault=self.fault,
        )
        if resume:
            self._restore()
        for warning in warnings_of(experiment, self.mechanism, d):
            self.report({"event": "warning", "message": warning})
        self._evaluate(evaluator, self.store.latest())
        status, message = self._rounds(maker, evaluator, stop)
        self.ledger = maker.ledger
        if (held := self.clients.held()) is not None:
            save_momenta(self.store.folder, self.store.run_id, held)
        return conclude(
            experiment,
            store=self.store,
            task=self.task,
            ledger=self.ledger,
            mechanism=self.mechanism,
            evaluator=evaluator,
            status=status,
            message=message,
            started_at=self.started_at,
            report=self.report,
        )

    def _rounds(self, maker: RoundMaker, evaluator: Evaluator, stop: threading.Event) -> tuple[str, str]:
        everyone, rounds = tuple(range(self.experiment.federation.clients)), self.experiment.training.rounds
        available_at = time.monotonic()
        try:
            with _one_at_a_time() as commit:
                for round_id in range(self.store.latest().round_id, rounds):
                    if stop.is_set():
                        raise Interrupted("asked to stop; go on with --resume")
                    timing = RoundTiming(round_id, available_at)
                    maker.foresee(round_id)
                    self.fault("round_opened")
                    timing.ends("open")
                    self.clients.compute(round_id, maker.state.theta)
                    commit.wait()
                    self.clients.collect(round_id)
                    timing.ends("collect")
                    self.fault("round_closed")
                    made = maker.compute(CloseRound(round_id, everyone, (), "all_answered"), timing)
                    available_at = time.monotonic()
                    commit.begin(partial(self._commit, maker, evaluator, made, timing))
                commit.wait()
        except RunEnded as ended:
            return ended.status, str(ended)
        return COMPLETED, f"all {rounds} rounds are done"

    def _commit(self, maker: RoundMaker, evaluator: Evaluator, made: MadeRound, timing: RoundTiming) -> None:
        """Make a round durable, then show it. On a thread of its own; the next gradients are under way."""
        experiment, rounds = self.experiment, self.experiment.training.rounds
        if made.prepared.round_id % experiment.client.persist_every == 0 and made.prepared.round_id < rounds:
            held = self.clients.held()
            assert held is not None  # noqa: S101 - a round has been computed
            save_momenta(self.store.folder, self.store.run_id, held)
        committed = maker.commit(made, timing)
        self.fault("before_publish")
        timing.ends("publish")
        now, answered = time.time(), experiment.federation.clients
        self.store.record_round(
            RoundMetrics(
                round_id=timing.round_id,
                started_at=now - timing.latency_s,
                latency_s=timing.latency_s,
                segments=timing.segments,
                spans=timing.spans,
                answered=answered,
            )
        )
        if time.monotonic() - self._told_at >= ROUND_EVENT_S or committed.round_id == rounds:
            self._told_at = time.monotonic()
            self.report(
                {
                    "event": "round",
                    "round": committed.round_id,
                    "of": rounds,
                    "latency_s": timing.latency_s,
                    "answered": answered,
                    "clients": answered,
                    "missing": [],
                    "epsilon": maker.epsilon_spent(),
                }
            )
        self._evaluate(evaluator, committed)
        self.fault("published")

    def _evaluate(self, evaluator: Evaluator, committed: CommittedRound) -> None:
        at, rounds = committed.round_id, self.experiment.training.rounds
        if at % self.experiment.evaluation.every == 0 and at < rounds:
            evaluator.offer(at, committed.theta, patiently=True)

    def _scored(self, score: Score) -> None:
        self.store.record_evaluation(score.round_id, score.accuracy, score.loss, score.images)
        self.report({"event": "evaluation", "round": score.round_id, "accuracy": score.accuracy, "loss": score.loss})

    def _restore(self) -> None:
        """The momenta of an earlier life, as far as they were written."""
        n, d, reached = self.experiment.federation.clients, self.task.num_parameters, self.store.latest().round_id
        held = load_momenta(self.store.folder, self.store.run_id, n * d, reached)
        if held is not None:
            self.clients.restore(held)
        if reached and (held is None or held.round_id < reached - 1):
            since = "zero" if held is None else f"those of round {held.round_id}"
            message = f"the momenta of round {reached - 1} were not written before the end: clients go on from {since}"
            self.report({"event": "warning", "message": message})


class _OneAtATime:
    """Runs one piece of work beside the caller, who waits for it before beginning another."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._under_way: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self._under_way = self._thread.submit(work)

    def wait(self) -> None:
        """Until it has ended; what it raised is raised here."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


@contextmanager
def _one_at_a_time() -> Iterator[_OneAtATime]:
    with ThreadPoolExecutor(1, thread_name_prefix="commit") as thread:
        beside = _OneAtATime(thread)
        try:
            yield beside
        except (Interrupted, BudgetExhausted, RunFailed):
            beside.wait()  # what was released before is durable first, or that is the worse problem
            raise

"""The parameter server process: from an experiment to its summary."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2

from common.aggregation.step import prepare_conditioning
from common.config import Experiment
from common.errors import StoreProblem
from common.learning.task import Task, build_task, single_threaded
from common.rpc.addresses import Address, parse_address, refuse_insecure
from common.rpc.credentials import refuse_unusable_server, server_credentials
from common.rpc.methods import PARAMETER_SERVER, WIRETAP, handlers
from ps.conclusion import conclude
from ps.coordinator import Coordinator, Report
from ps.evaluation import Evaluator, Score
from ps.faults import Fault, no_fault
from ps.identity import Gate
from ps.inbox import Inbox
from ps.limits import limits_of, memory_of, options_of, refuse_beyond, with_descriptors
from ps.listening import Credentials, Health, bind, bind_again, refuse_unbindable
from ps.mechanism import (
    device_of,
    noise_of,
    opened,
)
from ps.membership import Membership
from ps.opening import as_promised, begin_run, stored_run, with_schedule_of
from ps.privacy.ledger import Budget, Ledger
from ps.privacy.plan import warnings_of
from ps.release import Mechanism
from ps.roster import Roster
from ps.round_maker import RoundMaker
from ps.rounds import EndRun
from ps.service import ParameterServerService
from ps.status import Members, RunFacts, StatusPage
from ps.store import CommittedRound, RoundMetrics, RunStore
from ps.streams import Streams
from ps.strikes import Strikes
from ps.tokens import issue_tokens, load_hashes, save_hashes
from ps.tracing import Tracing

__all__ = ["run_parameter_server"]

log = logging.getLogger("byzuldp.ps")


def run_parameter_server(
    experiment: Experiment,
    run_dir: Path,
    *,
    resume: bool = False,
    token_hashes: Mapping[int, bytes] | None = None,
    report: Report,
    fault: Fault = no_fault,
) -> dict[str, Any]:
    """Serve a run until it ends; returns its summary, which is also in ``run_dir/summary.json``.

    Parameters
    ----------
    resume
        Go on with the run in ``run_dir``, under the configuration stored there; of ``experiment`` only ``[network]``
        and ``[monitoring]`` count.
    token_hashes
        SHA-256 of each identity's join token; without them, tokens are made and left in ``run_dir/operator``.
    report
        Told what an onlooker may see.
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
            store = resources.enter_context(RunStore.open(run_dir, fault=fault))
            ledger, stored = stored_run(store)
            # The run keeps its configuration; where it listens, how long it waits and who watches may change.
            changed = {"network": with_schedule_of(stored, experiment.network), "monitoring": experiment.monitoring}
            experiment = stored.model_copy(update=changed)
        address = parse_address(experiment.network.address)
        refuse_insecure(address, insecure=experiment.network.insecure, tls=experiment.network.tls.enabled)
        refuse_unbindable(address)
        page = resources.enter_context(closing(StatusPage(experiment.monitoring.status, report)))
        report = page.report
        tracing = resources.enter_context(closing(Tracing(experiment.monitoring.otlp)))
        refuse_unusable_server(experiment.network.tls)
        credentials = partial(server_credentials, experiment.network.tls) if experiment.network.tls.enabled else None
        gate = Gate(experiment.network.tls, experiment.federation.clients)
        single_threaded()
        task = build_task(experiment)
        memory = refuse_beyond(experiment, task.num_parameters)
        log.info("at most %s will be needed beside what is loaded now", memory)
        if resume:
            mechanism = as_promised(ledger.genesis, stored, task)
            budget = Budget.of(ledger.genesis)
            if token_hashes is None:
                token_hashes = load_hashes(run_dir / "operator")
            if token_hashes is None:  # killed before there were any, or the file was deleted
                token_hashes = issue_tokens(run_dir / "operator", range(experiment.federation.clients))
                save_hashes(run_dir / "operator", token_hashes)
                report({"event": "warning", "message": "the join tokens were lost: new ones are in operator/"})
            report({"event": "resumed", "round": store.latest().round_id})
        else:
            previous, budget, mechanism = opened(experiment, lambda: task.dataset.train.labels)
            store, ledger = begin_run(experiment, run_dir, task, mechanism, previous, fault)
            resources.enter_context(store)
            if token_hashes is None:
                token_hashes = issue_tokens(run_dir / "operator", range(experiment.federation.clients))
            save_hashes(run_dir / "operator", token_hashes)
        run = _Run(
            experiment,
            store,
            task,
            ledger,
            budget,
            mechanism,
            token_hashes,
            gate,
            page,
            tracing,
            report,
            started_at,
            fault,
        )
        return run.serve(address, credentials)


@dataclass
class _Run:
    experiment: Experiment
    store: RunStore
    task: Task
    ledger: Ledger
    budget: Budget | None
    mechanism: Mechanism
    token_hashes: Mapping[int, bytes]
    gate: Gate
    page: StatusPage
    tracing: Tracing
    report: Report
    started_at: float
    fault: Fault

    def serve(self, address: Address, credentials: Credentials | None) -> dict[str, Any]:
        """Listen, run the rounds, tell the clients the end, and sum up."""
        every = self.experiment.evaluation.every
        evaluator = Evaluator(
            self.task.model, self.task.dataset, images=self.experiment.evaluation.images, record=self._scored
        )

        def evaluate(committed: CommittedRound) -> None:
            if committed.round_id % every == 0 and committed.round_id < self.experiment.training.rounds:
                evaluator.offer(committed.round_id, committed.theta)

        gc.freeze()  # what is loaded stays: looking through it again and again takes a tenth of a busy server's time
        try:
            return asyncio.run(self._serve(address, credentials, evaluator, evaluate))
        finally:
            gc.unfreeze()

    async def _serve(
        self,
        address: Address,
        credentials: Credentials | None,
        evaluator: Evaluator,
        evaluate: Callable[[CommittedRound], None],
    ) -> dict[str, Any]:
        experiment, network = self.experiment, self.experiment.network
        device = device_of(experiment.training.device)
        self.mechanism.rule.prepare(self.mechanism.num_clients, self.task.num_parameters, device)
        prepare_conditioning(self.mechanism.num_clients, self.task.num_parameters)
        inbox = Inbox(self.mechanism.num_clients, self.task.num_parameters, self.mechanism.condition, device)
        maker = RoundMaker(
            experiment,
            store=self.store,
            ledger=self.ledger,
            budget=self.budget,
            mechanism=self.mechanism,
            noise=noise_of(experiment, self.task.num_parameters, device),
            inbox=inbox,
            fault=self.fault,
        )
        coordinator = Coordinator(
            experiment,
            store=self.store,
            maker=maker,
            inbox=inbox,
            membership=self._membership,
            report=self.report,
            evaluate=evaluate,
            observe=self._observe,
            fault=self.fault,
        )
        limits = limits_of(network, self.mechanism.num_clients)
        options, most = options_of(limits, network), limits.message_bytes
        streams = Streams(
            per_client=limits.streams_per_client,
            strangers=limits.strangers,
            first_message_s=network.first_message_s,
        )
        public = json.dumps(experiment.public(), sort_keys=True)
        service = handlers(PARAMETER_SERVER, ParameterServerService(coordinator, public, streams), most)
        doctor = Health(streams)
        server, port = bind(address, (service, doctor.handler()), options, limits.backstop, credentials)
        servers, tap_address = [server], None
        if experiment.attack.knowledge == "omniscient" and experiment.num_adversaries:
            from ps.wiretap import WiretapService  # here alone: without an omniscient adversary it is not even loaded

            tap = WiretapService(coordinator, experiment.honest_ids, experiment.adversary_ids, streams)
            tap_server, tap_port = bind_again(
                self.store.folder, address.host, handlers(WIRETAP, tap, most), options, limits.backstop, credentials
            )
            servers.append(tap_server)
            tap_address = str(Address(address.host, tap_port))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, coordinator.stop, "interrupted", "asked to stop; go on with --resume")
        for item in servers:
            await item.start()
        await doctor.set(PARAMETER_SERVER, health_pb2.HealthCheckResponse.SERVING)
        self.report(
            {
                "event": "listening",
                "address": str(Address(address.host, port)),
                "wiretap": tap_address,
                "run_id": self.store.run_id,
                "run_dir": str(self.store.folder),
                "memory_bytes": memory_of(experiment, self.task.num_parameters, limits).total,
            }
        )
        self.page.start(self._facts(), Members(loop, coordinator.members.roster))
        self.tracing.start(self.store.run_id)
        for warning in self._warnings(coordinator):
            self.report({"event": "warning", "message": warning})
        try:
            end = await coordinator.run()
            await doctor.enter_graceful_shutdown()
            if not await coordinator.members.all_left(network.leave_deadline_s):
                log.warning("some clients had not left %.0f s after the run's end", network.leave_deadline_s)
        finally:
            for item in servers:
                await item.stop(grace=0.5)
        coordinator.close()
        self.ledger = maker.ledger
        if coordinator.store_problem is not None:  # no summary either, but one message with the remedy, and its status
            with suppress(StoreProblem):
                self.store.finish(end.status, end.message)
            raise coordinator.store_problem
        # Still on the loop, so that a late SIGTERM finds a handler and not a half-written ending.
        return await loop.run_in_executor(None, self._conclude, end, evaluator)

    def _observe(self, metrics: RoundMetrics) -> None:
        self.page.observe(metrics)
        self.tracing.observe(metrics)

    def _facts(self) -> RunFacts:
        return RunFacts(
            run_id=self.store.run_id,
            experiment=self.experiment,
            ledger=self.ledger,
            folder=self.store.folder,
            rule=self.mechanism.rule.name,
            parameters=self.task.num_parameters,
        )

    def _warnings(self, coordinator: Coordinator) -> Iterator[str]:
        """What should be known before a long run: who could slow it down, and whether the noise lets it learn."""
        if slow := coordinator.rounds.policy.warning():
            yield slow
        if few := with_descriptors(limits_of(self.experiment.network, self.mechanism.num_clients)):
            yield few
        yield from warnings_of(self.experiment, self.mechanism, self.task.num_parameters)

    def _membership(self, roster: Roster, clock: Callable[[], float], live_changed: Callable[[], None]) -> Membership:
        network = self.experiment.network
        return Membership(
            roster,
            run_id=self.store.run_id,
            fingerprint=self.experiment.fingerprint(),
            schema_hash=self.task.schema_hash,
            token_hashes=self.token_hashes,
            gate=self.gate,
            clock=clock,
            live_changed=live_changed,
            strikes=Strikes(
                strikes=network.strikes,
                window_s=network.strike_window_s,
                suspension_s=network.suspension_s,
                max_joins=network.max_joins,
                join_every_s=network.join_every_s,
            ),
        )

    def _scored(self, score: Score) -> None:
        self.store.record_evaluation(score.round_id, score.accuracy, score.loss, score.images)
        self.report({"event": "evaluation", "round": score.round_id, "accuracy": score.accuracy, "loss": score.loss})

    def _conclude(self, end: EndRun, evaluator: Evaluator) -> dict[str, Any]:
        return conclude(
            self.experiment,
            store=self.store,
            task=self.task,
            ledger=self.ledger,
            mechanism=self.mechanism,
            evaluator=evaluator,
            status=end.status,
            message=end.message,
            started_at=self.started_at,
            report=self.report,
        )

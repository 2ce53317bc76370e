"""A real federation some of whose identities misbehave, and what became of it.

:func:`misbehaved` runs a parameter server, honest clients and an adversary in processes of their own until the run
ends; :class:`Aftermath` is what there is to see afterwards, and what must hold whatever the adversaries did::

    after = misbehaved(tmp_path, {"name": "silence"})
    after.assert_held()                    # completed, honest ones unharmed, memory, ledger, model
    after.assert_did_not_wait(besides=8)   # all but so many rounds closed without waiting out a grace
    assert after.refusals(6) == {}
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from federations import Child, ServerProcess, adversary_process, client_process, small_experiment

from adversary.main import misbehaviours_of, own_momenta
from client.crew import build_crew
from common.config import Experiment, Tls
from common.learning.task import build_task, single_threaded
from deploy.certs.folder import CertificateFolder
from ps.limits import limits_of, memory_of
from ps.mechanism import noise_of, opened
from ps.privacy.released import Unreleased
from ps.reader import RunReader
from ps.records import RoundMetrics
from ps.update import advance, initial_state, release_round
from ps.verification import Verification, verify_run

__all__ = [
    "ADVERSARIES",
    "AT_TIMES",
    "BREACHES",
    "GRACE_S",
    "HONEST",
    "ROUNDS",
    "Aftermath",
    "expected_model",
    "federation",
    "misbehaved",
]

CLIENTS, BYZANTINE, ROUNDS = 8, 2, 30
HONEST, ADVERSARIES = range(CLIENTS - BYZANTINE), range(CLIENTS - BYZANTINE, CLIENTS)
GRACE_S = 1.5
PATIENCE_S = 2.6
"""One grace in vain for each identity; on a machine that is busy, an honest one may be later than others by as much in
a round, and by PATIENCE_S - GRACE_S in all of them together."""
SAMPLE_S = 0.02
AT_TIMES = frozenset(("late", "stale_round", "not_a_member", "run_is_over", "truncated"))
"""Refusals that good order may meet on a busy machine, or at the run's end."""
BREACHES = frozenset(("checksum", "equivocation", "future_round", "malformed", "too_large", "wrong_schema"))
"""Refusals of what no honest client sends, whatever the network does: so many of them, and an identity is suspended."""

Table = Mapping[str, Any]
Row = Callable[[torch.Tensor], torch.Tensor]


def federation(misbehaviour: Table, **sections: Table) -> Experiment:
    """Eight clients of whom the last two are the adversary's, CWTM, d = 2,000 in eight chunks.

    Nobody has momentum, so that a round depends on nothing but θ and who answered; the noise can be repeated.

    Parameters
    ----------
    misbehaviour
        The experiment's ``[misbehaviour]``.
    sections
        What else is different.
    """
    given: dict[str, dict[str, Any]] = {
        "federation": {"clients": CLIENTS, "byzantine": BYZANTINE, "quorum": CLIENTS - BYZANTINE},
        "training": {"rounds": ROUNDS, "learning_rate": 0.5, "client_momentum": 0.0, "server_momentum": 0.0},
        "aggregation": {"rule": "trimmed_mean"},
        "privacy": {"epsilon": 500.0, "delta": 1e-3, "noise_seed": 3},
        "attack": {"name": "bit_flip"},
        "misbehaviour": dict(misbehaviour),
        "data": {"dataset": "tiny_task:long_blobs"},
        "network": {
            "chunk_bytes": 1024,
            "grace_floor_s": GRACE_S,
            "patience_s": PATIENCE_S,
            "strikes": 3,
            "heartbeat_s": 0.2,
            "leave_deadline_s": 2.0,
        },
    }
    for name, section in sections.items():
        given.setdefault(name, {}).update(section)
    return small_experiment(**given)


@dataclass
class Aftermath:
    """What became of a run."""

    experiment: Experiment
    server: ServerProcess
    adversary: Child
    summary: dict[str, Any]
    honest_exit: int
    adversary_exit: int | None
    """None: some of its identities were suspended, so it may not have heard of the end, and has been killed."""
    grown: int
    """Bytes that the PS came to need at most, beyond what it had when it listened."""
    num_parameters: int
    rounds: list[RoundMetrics] = field(default_factory=list)

    @property
    def bound(self) -> int:
        """What the formula of :mod:`ps.limits` allows it."""
        limits = limits_of(self.experiment.network, self.experiment.federation.clients)
        return memory_of(self.experiment, self.num_parameters, limits).total

    @property
    def answered(self) -> list[frozenset[int]]:
        """Who answered each round."""
        everybody = frozenset(range(self.experiment.federation.clients))
        return [everybody - set(record.missing) for record in self.rounds]

    def answers(self, ids: Collection[int] | None = None) -> int:
        """How many momenta of these identities counted, in all rounds; of everybody's by default."""
        return sum(len(who if ids is None else who & set(ids)) for who in self.answered)

    @property
    def verification(self) -> Verification:
        return verify_run(self.server.run_dir)

    def refusals(self, client_id: int | None) -> Counter[str]:
        """By kind, those of an identity; None: those of strangers."""
        return self.server.refusals(client_id)

    @property
    def adversaries_refusals(self) -> Counter[str]:
        return sum((self.refusals(client_id) for client_id in self.experiment.adversary_ids), Counter())

    @property
    def waited(self) -> int:
        """How many rounds may have waited out a grace."""
        return sum(record.segments["collect"] >= self.experiment.network.grace_floor_s for record in self.rounds)

    @property
    def latency_s(self) -> float:
        """Median of a round in the run's second half, when the adversaries have had all they were given."""
        return median(record.latency_s for record in self.rounds[len(self.rounds) // 2 :])

    def assert_held(self, counted: Row = lambda row: row) -> None:
        """The run is complete, its honest clients were in every round and unmolested, its ledger, model and memory
        are right.

        ``counted`` makes what an adversary's identity is known to have sent of the attack's row.
        """
        assert (self.summary["status"], self.honest_exit) == ("completed", 0), (self.summary, self.server.log())
        assert len(self.rounds) == self.experiment.training.rounds
        honest = set(self.experiment.honest_ids)
        without = {record.round_id: missing for record in self.rounds if (missing := honest & set(record.missing))}
        assert not without, f"honest clients missed rounds: {without}\n{self.server.log()}"
        for client_id in honest:
            assert not self.refusals(client_id), (client_id, self.refusals(client_id))
        self.assert_the_ledger_is_right()
        np.testing.assert_array_equal(self.server.theta(), expected_model(self.experiment, self.answered, counted))
        assert self.grown <= self.bound, f"{self.grown} bytes more, {self.bound} allowed"

    def assert_the_ledger_is_right(self) -> None:
        """All that it claims can be recomputed, and it counts those who answered."""
        verified = self.verification
        assert verified.holds, [check for check in verified.checks if not check.holds]
        assert verified.rounds == len(self.rounds) == len(self.answered)
        assert self.summary["epsilon_spent"] <= self.summary["epsilon"] * (1 + 1e-9)

    def assert_did_not_wait(self, *, besides: int) -> None:
        """No more rounds than these can have waited for somebody who did not come."""
        took = [round(record.segments["collect"], 3) for record in self.rounds]
        assert self.waited <= besides, f"{self.waited} rounds waited: {took}"

    def assert_refused(self, kind: str, *, besides: Collection[str] = ()) -> None:
        """Each of the adversary's identities was refused for this, and suspended if that is a breach of the protocol.

        ``besides`` are other kinds that may occur.
        """
        for client_id in self.experiment.adversary_ids:
            kinds = self.refusals(client_id)
            assert kind in kinds, kinds
            assert set(kinds) <= {kind, "suspended", *AT_TIMES, *besides}, kinds
            if kind in BREACHES:
                assert "suspended" in kinds, kinds
                assert kinds[kind] == self.experiment.network.strikes, kinds

    def report(self, control: Aftermath) -> str:
        """A line for the table of what misbehaviours cost."""
        name = ", ".join(self.experiment.misbehaviour.names)
        kinds = dict(sorted(self.adversaries_refusals.items()))
        return (
            f"{name} {self.experiment.misbehaviour.parameters}: latency {self.latency_s / control.latency_s:.2f} of "
            f"the control's {control.latency_s * 1000:.0f} ms, {self.waited} rounds waited, "
            f"{_mib(self.grown)} MiB more (control {_mib(control.grown)}, allowed {_mib(self.bound)}), "
            f"adversaries answered {self.answers(self.experiment.adversary_ids)} of "
            f"{len(self.rounds) * len(self.experiment.adversary_ids)}, refused {kinds}, "
            f"strangers {dict(self.refusals(None))}"
        )


def misbehaved(
    folder: Path,
    misbehaviour: Table,
    *,
    tls: bool = False,
    meanwhile: Callable[[ServerProcess], None] | None = None,
    **sections: Table,
) -> Aftermath:
    """Run a federation whose adversary misbehaves, until it ends.

    Parameters
    ----------
    misbehaviour
        The experiment's ``[misbehaviour]``; ``{"name": "none"}`` for a control run.
    tls
        Every identity has a certificate, and so has the server; there are no tokens.
    meanwhile
        Done once all processes run.
    sections
        What else is different from :func:`federation`'s experiment.
    """
    experiment = federation(misbehaviour, **sections)
    kinds = misbehaviours_of(experiment)
    if any(not kind.takes_part for kind in kinds.values()):  # nobody need wait long for identities that do not join
        network = {"join_grace_s": 0.5, **sections.get("network", {})}
        experiment = federation(misbehaviour, **{**sections, "network": network})
    with ExitStack() as processes:
        servers, theirs = _with_certificates(experiment, folder / "certs") if tls else (experiment, experiment)
        server = processes.enter_context(ServerProcess(servers, folder)).listening()
        memory = processes.enter_context(_Memory(server.pid))
        byzantine, honest = (
            dict.fromkeys(ids, "") if tls else server.tokens(ids)
            for ids in (experiment.adversary_ids, experiment.honest_ids)
        )
        adversary = processes.enter_context(
            adversary_process(folder, theirs, server.address, byzantine, server.wiretap)
        )
        clients = processes.enter_context(client_process(folder, theirs, server.address, honest))
        if meanwhile is not None:
            meanwhile(server)
        summary = server.finish()
        suspended = "suspended" in server.refusals()
        return Aftermath(
            experiment=experiment,
            server=server,
            adversary=adversary,
            summary=summary,
            honest_exit=clients.exit_code(),
            adversary_exit=None if suspended else adversary.exit_code(),
            grown=memory.grown,
            num_parameters=server.num_parameters,
            rounds=RunReader(server.run_dir).rounds(),
        )


def expected_model(
    experiment: Experiment, answered: Sequence[Collection[int]], counted: Row = lambda row: row
) -> np.ndarray:
    """θ after rounds that these identities answered, each with its own momentum or the attack's row, and nobody else.

    Only for the attack of :func:`federation`, and for runs without client momentum: there what an identity sends does
    not depend on which rounds it has seen.
    """
    single_threaded()
    task = build_task(experiment)
    _, _, mechanism = opened(experiment, lambda: task.dataset.train.labels)
    n, d = experiment.federation.clients, task.num_parameters
    mechanism.rule.prepare(n, d, torch.device("cpu"))
    crew = build_crew(experiment, task, range(n))
    byzantine = {client_id: crew[client_id] for client_id in experiment.adversary_ids}
    noises = noise_of(experiment, d)
    rate = experiment.training.schedule_of("learning_rate")
    state = initial_state(task.model.parameters_flat().clone())
    for round_id, present in enumerate(answered):
        task.model.set_parameters(state.theta)
        sent = {i: torch.from_numpy(crew[i].step(round_id)) for i in experiment.honest_ids}
        if byzantine:
            flipped = own_momenta(byzantine, round_id).mean(dim=0).neg_()
            sent |= dict.fromkeys(byzantine, counted(flipped))
        rows = torch.zeros((n, d), dtype=torch.float32)
        for client_id in present:
            rows[client_id] = sent[client_id]
            mechanism.condition(rows[client_id])
        noise = None if noises is None else noises.of_round(round_id, d)
        released = release_round(
            mechanism,
            state,
            Unreleased(rows),
            sorted(present),
            noise,
            server_momentum=0.0,
            seed=experiment.training.seed,
        )
        state = advance(state, released.vector, rate(round_id), released.server_momentum)
    return state.theta.numpy()


def _with_certificates(experiment: Experiment, folder: Path) -> tuple[Experiment, Experiment]:
    """The server's copy of an experiment, and that of the clients."""
    made = CertificateFolder(folder)
    made.begin(2.0)
    made.make_server([], 1.0, renew=False)
    made.make_clients(range(experiment.federation.clients), 1.0, renew=False)

    def of(pair: tuple[Path, Path]) -> Experiment:
        tls = Tls(ca=made.authorities, certificate=str(pair[0]), key=str(pair[1]))
        return experiment.model_copy(update={"network": experiment.network.model_copy(update={"tls": tls})})

    return of(made.server), of(made.client("{id}"))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


class _Memory:
    """How much a process comes to need at most: its unique set size, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._process, self._over = psutil.Process(pid), threading.Event()
        self._first = self._most = self._process.memory_full_info().uss
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def grown(self) -> int:
        return self._most - self._first

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            try:
                self._most = max(self._most, self._process.memory_full_info().uss)
            except psutil.Error:
                return

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

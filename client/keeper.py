"""What a client process keeps of a run, and when it writes it down.

Before any momentum is sent: the run's planned cost, durably. At each new model: which one it was, without waiting for
the disk. Every ``client.persist_every`` rounds, and when the process ends in good order: the momenta, written by a
thread of its own, for which training never waits. When that happens depends on the number of rounds, never on data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from client.crew import momenta_of, restore
from client.lifetime import Charge, Limit
from client.memory import NEVER, Held, Outcome, RunTerms, Seen
from client.state import Contents, StateFile
from client.worker import Worker
from common.config import Experiment
from common.errors import PrivacyError, StoreProblem

__all__ = ["Keeper", "refuse_limit_without_state"]

log = logging.getLogger("byzuldp.client")

FINAL = ("completed", "budget_exhausted")
"""How a run ends that is never resumed."""


def refuse_limit_without_state(experiment: Experiment, state: Path | None) -> None:
    """A limit on all runs together needs a memory of them.

    Raises
    ------
    PrivacyError
        There is a limit, and no state.
    """
    if state is None and experiment.client.lifetime_epsilon is not None:
        raise PrivacyError(
            f"client.lifetime_epsilon = {experiment.client.lifetime_epsilon:g} limits all runs together, and this "
            "client keeps no record of them: name its state file with --state, the same one for every run"
        )


class Keeper:
    """The memory of a client process, in a state file. A context manager, which holds the file's lock.

    Parameters
    ----------
    path
        The state file.
    crew
        The identities held.
    server
        The parameter server's address as the user gave it: privacy is totalled under it.
    num_parameters
        d.

    Raises
    ------
    RunFolderInUse, StoreDamaged, StoreUnwritable
        See :class:`client.state.StateFile`.
    """

    def __init__(
        self, path: Path, crew: Mapping[int, Worker], experiment: Experiment, *, server: str, num_parameters: int
    ) -> None:
        self._crew, self._experiment, self._server, self._num_parameters = crew, experiment, server, num_parameters
        self._file = StateFile(path)
        self._kept = self._file.contents
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writing: Future[None] | None = None
        self._run_id = ""
        self._rounds = 0  # since the last write

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._file.close()

    async def joined(self, terms: RunTerms) -> Seen:
        """See :meth:`client.memory.Memory.joined`: reserves the run's cost, and restores its momenta."""
        if terms.run_id != self._run_id:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._admit, terms)
        else:
            self._kept.lifetime.reserve(self._charge(terms))  # refuses the same run in other terms
        return self._kept.seen.get(terms.run_id, NEVER)

    def saw(self, run_id: str, seen: Seen) -> None:
        """See :meth:`client.memory.Memory.saw`."""
        self._kept = replace(self._kept, seen={**self._kept.seen, run_id: seen})
        try:
            self._file.note(run_id, seen)
        except StoreProblem as problem:
            log.warning("%s", problem)

    def round_done(self) -> None:
        """See :meth:`client.memory.Memory.round_done`: begins to write when it is time and the last write is over."""
        self._rounds += 1
        busy = self._writing is not None and not self._writing.done()
        if self._rounds >= self._experiment.client.persist_every and not busy:
            self._rounds = 0
            self._writing = self._thread.submit(self._write_or_warn, self._now())

    async def finished(self, outcome: Outcome | None) -> None:
        """See :meth:`client.memory.Memory.finished`: settles the run if it is over for good, and writes a last time."""
        if not self._run_id:
            return
        if outcome is not None and outcome.status in FINAL:
            self._kept = replace(self._kept, lifetime=self._kept.lifetime.settle(self._run_id, outcome.releases))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_or_warn, self._now())
        if (seen := self._kept.seen.get(self._run_id)) is not None:
            log.info("last model seen: round %d, ledger head %s", seen.round_id, seen.head.hex())
        delta = self._experiment.client.lifetime_delta
        log.info(
            "all runs with the parameter server %s so far: epsilon = %.4g at delta = %g%s",
            self._server,
            self._kept.lifetime.epsilon(self._server, delta),
            delta,
            "" if self._is_settled() else ", with all that this run planned, since it can go on",
        )

    # ---------------------------------------------------------------- on the thread that writes

    def _admit(self, terms: RunTerms) -> None:
        client = self._experiment.client
        run = self._charge(terms)
        limit = None if client.lifetime_epsilon is None else Limit(client.lifetime_epsilon, client.lifetime_delta)
        lifetime = self._kept.lifetime.reserve(run, limit)
        momenta = self._usable_momenta(terms.run_id)
        kept = Contents(terms.run_id, momenta, self._kept.seen, lifetime)
        stored = self._file.contents
        if (kept.run_id, kept.lifetime) != (stored.run_id, stored.lifetime):
            self._file.write(kept)
        restore(self._crew, momenta)
        self._kept, self._run_id = replace(kept, momenta={}), terms.run_id  # the crew holds them now

    def _charge(self, terms: RunTerms) -> Charge:
        """What a run costs, as planned."""
        privacy = self._experiment.privacy
        secret = privacy.noise_seed is None  # a seed that is known takes the noise away again
        return Charge.planned(
            terms.run_id,
            self._server,
            terms.noise_multiplier if secret else 0.0,
            terms.rounds,
            discrete=privacy.noise == "discrete",
        )

    def _usable_momenta(self, run_id: str) -> dict[int, Held]:
        """Those of this run, model and crew; what is left aside is said."""
        kept = self._kept
        if kept.run_id != run_id:
            if kept.momenta:
                log.info(
                    "%s: its momenta are of run %s and are left aside, starting from zero in run %s; the privacy total "
                    "is kept",
                    self._file.path,
                    kept.run_id,
                    run_id,
                )
            return {}
        usable = {
            client_id: held
            for client_id, held in kept.momenta.items()
            if client_id in self._crew and held.momentum.size == self._num_parameters
        }
        if aside := sorted(kept.momenta.keys() - usable.keys()):
            log.info(
                "%s: the momenta of clients %s are left aside: this process holds clients %s, of %d parameters",
                self._file.path,
                ", ".join(map(str, aside)),
                ", ".join(map(str, self._crew)),
                self._num_parameters,
            )
        if usable:
            rounds = {held.round_id for held in usable.values()}
            log.info("going on with the momenta of round %s", "/".join(map(str, sorted(rounds))))
        return usable

    def _write_or_warn(self, contents: Contents) -> None:
        """Training does not end because a momentum could not be written: without one it may start from zero."""
        try:
            self._file.write(contents)
        except StoreProblem as problem:
            log.warning("%s", problem)

    # ---------------------------------------------------------------- what there is to write

    def _now(self) -> Contents:
        return replace(self._kept, momenta=momenta_of(self._crew))

    def _is_settled(self) -> bool:
        return any(charge.settled for charge in self._kept.lifetime.charges if charge.run_id == self._run_id)

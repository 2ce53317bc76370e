"""One round at the parameter server, from its momenta to a committed model.

:meth:`RoundMaker.compute` and :meth:`RoundMaker.commit` read from top to bottom as the server's half of Algorithm 1
(ByzULDP). The order aggregate → noise → commit is held here; publishing takes what only the store can make, so it comes
last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from common.errors import BudgetExhausted, RunFailed
from ps.faults import Fault, no_fault
from ps.privacy.ledger import Budget, Ledger, LedgerEntry
from ps.privacy.released import Unreleased
from ps.rounds import CloseRound
from ps.store import CommittedRound, PreparedRound, RunStore
from ps.timing import RoundTiming
from ps.update import Mechanism, ServerState, advance, release_round

if TYPE_CHECKING:
    from common.config import Experiment
    from common.noise import RoundNoise

__all__ = ["MadeRound", "RoundMaker", "Rows"]


class Rows(Protocol):
    """Where the momenta of a closed round are: see :class:`ps.inbox.Inbox`."""

    @property
    def num_parameters(self) -> int:
        """d."""

    @property
    def device(self) -> torch.device:
        """Where the matrix is, and the round is made."""

    def rows(self) -> Unreleased[Tensor]:
        """float32 (n, d), conditioned, zero where nobody answered."""


@dataclass(frozen=True)
class MadeRound:
    """A round that has been aggregated, noised and stepped, and is not yet durable: nobody may see its model.

    Attributes
    ----------
    prepared
        What the store commits.
    ledger
        The ledger with the round's row.
    state
        θ and R after the round, on the device.
    failure
        Why the round is the last one, though it is paid for.
    """

    prepared: PreparedRound
    ledger: Ledger
    state: ServerState
    failure: RunFailed | None = None


class RoundMaker:
    """Makes rounds, one after the other; used by one thread at a time.

    Parameters
    ----------
    store
        Where rounds are committed; the first one made follows its latest.
    ledger, budget
        What was spent, and what may be (None: no privacy was promised).
    mechanism, noise
        How an aggregate is released, and where its noise comes from (None exactly without DP).
    inbox
        Where the momenta are.
    fault
        A test's hook: see :mod:`ps.faults`.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        store: RunStore,
        ledger: Ledger,
        budget: Budget | None,
        mechanism: Mechanism,
        noise: RoundNoise | None,
        inbox: Rows,
        fault: Fault = no_fault,
    ) -> None:
        latest = store.latest()
        self.ledger, self.budget, self.mechanism = ledger, budget, mechanism
        self._store, self._noise, self._inbox, self._fault = store, noise, inbox, fault
        self._privacy, self._seed = experiment.privacy, experiment.training.seed
        self._waiting: MadeRound | None = None
        self._learning_rate = experiment.training.schedule_of("learning_rate")
        self._server_momentum = experiment.training.schedule_of("server_momentum")
        self._state = ServerState(
            latest.round_id,
            torch.from_numpy(latest.theta.copy()).to(inbox.device),
            torch.from_numpy(latest.server_momentum.copy()).to(inbox.device),
        )

    def foresee(self, round_id: int) -> None:
        """A round opened: begin drawing its noise while the clients compute."""
        if self._noise is not None:
            self._noise.start(round_id, self._inbox.num_parameters)

    def make(self, closing: CloseRound, timing: RoundTiming) -> CommittedRound:
        """Aggregate, add noise, step, commit; ``timing`` is told when each of them ends.

        Raises
        ------
        BudgetExhausted, RunFailed
            See :meth:`compute`.
        RunFailed, StoreProblem
            See :meth:`commit`.
        """
        return self.commit(self.compute(closing, timing), timing)

    @property
    def state(self) -> ServerState:
        """θ and R after the last round that was made, committed or not."""
        return self._state

    def compute(self, closing: CloseRound, timing: RoundTiming) -> MadeRound:
        """Aggregate, add noise, step; :meth:`commit` comes next, before another round is made.

        Raises
        ------
        BudgetExhausted
            The round would exceed the budget; nothing was released.
        RunFailed
            The model would be non-finite, and nothing was spent.
        RuntimeError
            The round before is not committed.
        """
        if self._waiting is not None:
            raise RuntimeError(
                f"the model of round {self._waiting.prepared.round_id} is not committed, so no other release is made"
            )
        timing.ends("close")
        round_id, mechanism = closing.round_id, self.mechanism
        self._refuse_beyond_budget(round_id)
        noise = None if self._noise is None else self._noise.of_round(round_id, self._inbox.num_parameters)
        self._fault("noise_taken")
        timing.ends("noise")
        rows = self._inbox.rows()
        timing.ends("transfer")
        released = release_round(
            mechanism,
            self._state,
            rows,
            closing.answered,
            noise,
            server_momentum=self._server_momentum(round_id),
            seed=self._seed,
        )
        self._fault("aggregated")
        timing.ends("aggregate")
        if noise is not None and noise.drawing is not None:
            timing.span("noise", None, *noise.drawing)
        failure: RunFailed | None = None
        try:
            state = advance(self._state, released.vector, self._learning_rate(round_id), released.server_momentum)
        except RunFailed as problem:
            if not mechanism.private:
                raise
            # That it failed is a function of Y, so it is paid for: the round is committed, with the model as it was.
            state, failure = replace(self._state, round_id=round_id + 1), problem
        theta, momentum = state.theta.cpu().numpy(), state.momentum.cpu().numpy()
        self._fault("stepped")
        timing.ends("step")
        entry = LedgerEntry(
            round_id=round_id,
            mechanism=self.ledger.genesis.mechanism,
            noise_multiplier=mechanism.noise_multiplier,
            sensitivity=released.sensitivity,
            sigma=released.sigma,
            num_clients=mechanism.num_clients,
            answers=len(closing.answered),
            num_byzantine=mechanism.num_byzantine,
            rule=mechanism.rule.name,
            premises=self.ledger.genesis.premises,
            at=time.time(),
        )
        prepared = PreparedRound(
            round_id=round_id + 1,
            theta=theta,
            server_momentum=momentum,
            ledger_json=entry.to_json(),
            answered=len(closing.answered),
            notes={"closed": closing.reason},
        )
        self._waiting = MadeRound(prepared, self.ledger.append(entry), state, failure)
        self._state = state
        return self._waiting

    def commit(self, made: MadeRound, timing: RoundTiming) -> CommittedRound:
        """Make a round durable; from then on its model may be seen.

        Raises
        ------
        StoreProblem
            It could not be made durable.
        RunFailed
            It was, and is the last one.
        """
        committed = self._store.commit(made.prepared)
        self.ledger, self._waiting = made.ledger, None
        timing.ends("commit")
        if made.failure is not None:
            raise made.failure
        return committed

    @property
    def releases(self) -> int:
        """How many rounds are in the ledger."""
        return len(self.ledger.entries)

    def epsilon_spent(self) -> float | None:
        """The odometer, recomputed from the ledger; None without DP."""
        if self.budget is None:
            return None
        return self.ledger.epsilon_spent(self._privacy.delta, self._privacy.calibration)

    def _refuse_beyond_budget(self, round_id: int) -> None:
        if self.budget is not None and not self.budget.admits(self.ledger, self.mechanism.noise_multiplier):
            raise BudgetExhausted(
                f"round {round_id} would exceed the budget of ε = {self.budget.epsilon:g}, δ = {self.budget.delta:g}; "
                "the last model and the ledger are kept"
            )

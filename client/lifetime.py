"""What a client has let out about its data over all runs with one parameter server, and whether one more run fits.

Every release of a run this client was on the roster of is charged, whether it was present or not: absence is covered
by the same guarantee, and so costs the same. Before a run all its planned releases are reserved; a reservation stands
until the run is over for good, so a crash can only make the total too large. A run that can still be resumed
(interrupted, without its quorum, failed) keeps its reservation: it may go on at any time, with this client or without.

Costs are Σ 1/z² in exact rationals, as in the parameter server's ledger. ε is computed by the exact conversion; once a
run used discrete noise, by Mironov's, which holds for every mechanism of zero-concentrated DP.

The total is that of the address by which the user reaches the parameter server. A run is charged once to each address
it was reached by. All identities in one state are charged alike: each was on the roster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from common.errors import PrivacyError
from common.privacy.conversions import Calibration, epsilon_of
from common.privacy.costs import cost_of, limit_of, mu_from

__all__ = ["Charge", "Lifetime", "Limit"]


@dataclass(frozen=True)
class Limit:
    """The (ε, δ) that all runs with one parameter server together may cost."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Charge:
    """What one run costs its clients.

    Attributes
    ----------
    servers
        The addresses by which it was reached.
    noise_multiplier
        z of every release; 0 where there is no noise, or none that is secret.
    rounds
        How many releases were planned.
    releases
        How many are charged: all that were planned, until the run is settled.
    discrete
        Whether the noise is a discrete Gaussian.
    settled
        The run is over for good.
    """

    run_id: str
    servers: tuple[str, ...]
    noise_multiplier: float
    rounds: int
    releases: int
    discrete: bool = False
    settled: bool = False

    @classmethod
    def planned(cls, run_id: str, server: str, noise_multiplier: float, rounds: int, *, discrete: bool) -> Charge:
        """The reservation of a whole run."""
        return cls(run_id, (server,), noise_multiplier, rounds, rounds, discrete)

    @property
    def cost(self) -> Fraction | None:
        """Σ 1/z² of the releases charged; None: no bound."""
        each = cost_of(self.noise_multiplier)
        return None if each is None else self.releases * each

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"servers": list(self.servers), "noise_multiplier": self.noise_multiplier.hex()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Charge:
        """The inverse of :meth:`to_json`.

        Raises
        ------
        KeyError, TypeError, ValueError
            It is none.
        """
        changes = {
            "servers": tuple(stored["servers"]),
            "noise_multiplier": float.fromhex(stored["noise_multiplier"]),
        }
        return cls(**dict(stored) | changes)


@dataclass(frozen=True)
class Lifetime:
    """All runs this client was on the roster of. Immutable: each change gives the next one, to be stored first."""

    charges: tuple[Charge, ...] = ()

    def spent(self, server: str) -> Fraction | None:
        """Σ 1/z² of all releases charged to an address; None: no bound."""
        costs = [charge.cost for charge in self._at(server)]
        return sum((cost for cost in costs if cost is not None), Fraction(0)) if None not in costs else None

    def epsilon(self, server: str, delta: float) -> float:
        """ε at ``delta`` of all releases charged to an address; ∞ if one of them had no noise."""
        return epsilon_of(mu_from(self.spent(server)), delta, self._conversion(server))

    def reserve(self, run: Charge, limit: Limit | None = None) -> Lifetime:
        """The total with all of a run's planned releases in it; a run that is there already is not added again.

        Raises
        ------
        PrivacyError
            The total would exceed the limit, the run has no noise and there is a limit, or the run is known by other
            terms.
        """
        (server,) = run.servers
        known = next((charge for charge in self.charges if charge.run_id == run.run_id), None)
        if known is not None:
            _refuse_other_terms(known, run)
            run = replace(run, servers=tuple(dict.fromkeys((*known.servers, server))))
        reserved = Lifetime((*(charge for charge in self.charges if charge is not known), run))
        if limit is not None:
            reserved._refuse_beyond(limit, server, run)
        return reserved

    def settle(self, run_id: str, releases: int | None) -> Lifetime:
        """The total once a run is over for good.

        Parameters
        ----------
        releases
            How many it made at most; None: perhaps all that were planned.
        """
        return Lifetime(
            tuple(_settled(charge, releases) if charge.run_id == run_id else charge for charge in self.charges)
        )

    def to_json(self) -> list[dict[str, Any]]:
        return [charge.to_json() for charge in self.charges]

    @classmethod
    def from_json(cls, stored: Iterable[Mapping[str, Any]]) -> Lifetime:
        """The inverse of :meth:`to_json`; see :meth:`Charge.from_json`."""
        return cls(tuple(Charge.from_json(charge) for charge in stored))

    def _at(self, server: str) -> list[Charge]:
        return [charge for charge in self.charges if server in charge.servers]

    def _conversion(self, server: str) -> Calibration:
        return "renyi" if any(charge.discrete for charge in self._at(server)) else "exact"

    def _refuse_beyond(self, limit: Limit, server: str, run: Charge) -> None:
        spent = self.spent(server)
        if spent is not None and spent <= limit_of(limit.epsilon, limit.delta, self._conversion(server)):
            return
        before = Lifetime(tuple(charge for charge in self.charges if charge.run_id != run.run_id))
        adds = Lifetime((run,)).epsilon(server, limit.delta)
        raise PrivacyError(
            f"run {run.run_id} is refused: client.lifetime_epsilon = {limit.epsilon:g} at delta = {limit.delta:g} is "
            f"for all runs with the parameter server {server} together. The other runs so far: epsilon = "
            f"{before.epsilon(server, limit.delta):.4g}; this run, {_described(run)}: {adds:.4g}; together "
            f"{self.epsilon(server, limit.delta):.4g}. Stay out of it, ask for a run with more noise or fewer rounds, "
            "or raise client.lifetime_epsilon"
        )


def _described(run: Charge) -> str:
    if run.noise_multiplier == 0:
        return f"{run.rounds} releases without secret noise"
    return f"{run.rounds} releases at noise multiplier {run.noise_multiplier:.6g}"


def _refuse_other_terms(known: Charge, run: Charge) -> None:
    def terms(charge: Charge) -> tuple[object, ...]:
        return charge.noise_multiplier, charge.rounds, charge.discrete

    if terms(known) != terms(run):
        raise PrivacyError(
            f"run {run.run_id} was joined before as {_described(known)}; now it is {_described(run)}. A run keeps its "
            "terms: ask the operator of the parameter server what has changed, and stay out until you know"
        )


def _settled(charge: Charge, releases: int | None) -> Charge:
    made = charge.rounds if releases is None else min(charge.rounds, releases)
    return replace(charge, releases=made, settled=True)

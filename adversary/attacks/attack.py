"""What an attack is: a function from what the adversaries know to what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from common.errors import AttackError

__all__ = ["Attack", "Collusion", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What every adversary knows of the experiment: its public configuration.

    Parameters
    ----------
    num_clients, num_byzantine
        n and f, how many Byzantine identities the server tolerates.
    num_adversaries
        k, how many identities attack; with k ≤ f the server's guarantee holds.
    clip_norm
        C, or None.
    seed
        Of the run.
    """

    num_clients: int
    num_byzantine: int
    num_adversaries: int
    clip_norm: float | None
    seed: int


@runtime_checkable
class Attack(Protocol):
    """Decides what the colluding identities send in a round.

    Attributes
    ----------
    name
        What a configuration calls it.
    needs_estimate
        Whether it needs to know, or to estimate, honest momenta.
    """

    name: str
    needs_estimate: bool

    def __call__(self, honest: Tensor, own: Tensor, round_id: int) -> Tensor:
        """The rows to send.

        Parameters
        ----------
        honest
            float32 (h, d), in the order of identities: the honest momenta if the adversaries are omniscient, their
            own honestly computed ones if they only collude, no rows if they know nothing.
        own
            float32 (k, d): the adversaries' own momenta, honestly computed from their own data.
        round_id
            The round, from 0.

        Returns
        -------
        Tensor
            float32 (k, d).

        Raises
        ------
        AttackError
            The attack needs an estimate and ``honest`` has no rows.
        """
        ...


class Collusion(ABC):
    """An attack in which all adversaries send the same vector, computed from the estimate of the honest momenta."""

    name: str
    needs_estimate = True

    def __call__(self, honest: Tensor, own: Tensor, round_id: int) -> Tensor:
        if honest.shape[0] == 0:
            raise AttackError(f"{self.name} needs an estimate of the honest momenta; given no rows in round {round_id}")
        return self.vector(honest).expand(own.shape[0], -1).clone()

    @abstractmethod
    def vector(self, honest: Tensor) -> Tensor:
        """What to send, float32 (d,), from (h, d) with h ≥ 1."""

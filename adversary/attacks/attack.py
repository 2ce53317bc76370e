"""What an attack is: a function from what the adversaries see of a round, and its own state, to what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from common.aggregation import Rule
from common.errors import AttackError
from common.learning.datasets import Dataset

__all__ = ["Attack", "Collusion", "Needs", "Setting", "Sight", "require_estimate", "rows_of"]

Needs = Literal["nothing", "its own data", "published models", "an estimate of honest momenta"]


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
    rule
        Makes another copy of the aggregation rule in use; None if the attack is not to know it.
    projects_rows
        Whether the server projects every row onto the ball of radius C, as it does under DP.
    learning_rate
        η of a round; None if the attack is not to know it.
    """

    num_clients: int
    num_byzantine: int
    num_adversaries: int
    clip_norm: float | None
    seed: int
    rule: Callable[[], Rule] | None = None
    projects_rows: bool = False
    learning_rate: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Sight:
    """What the adversaries see of a round when they decide what to send.

    Parameters
    ----------
    round_id
        The round, from 0. An attack may be asked again for the last round, and then its state stays as it is.
    honest
        float32 (h, d), in the order of identities: the honest momenta if the adversaries are omniscient, their own
        honestly computed ones if they only collude, no rows if they know nothing.
    own
        float32 (k, d): the adversaries' own momenta, computed from their own data (see :meth:`Attack.poison`).
    theta
        float32 (d,): the model published for this round, θ_t.
    """

    round_id: int
    honest: Tensor
    own: Tensor
    theta: Tensor


class Attack(ABC):
    """Decides what the colluding identities send in a round.

    A pure function of what is seen, and of its own state from the rounds before. It changes nothing of what it is
    given, and what it draws comes from public streams of the run's seed, so that a run can be repeated.

    Attributes
    ----------
    name
        What a configuration calls it.
    needs
        What it cannot do without, for a list of attacks.
    source
        Where it was published.
    needs_estimate
        Whether, with these parameters, it refuses to work without an estimate of honest momenta.
    """

    name: str
    needs: ClassVar[Needs] = "nothing"
    source: ClassVar[str] = ""
    needs_estimate: bool = False

    def poison(self, dataset: Dataset) -> Dataset:
        """The data set that the adversaries' identities train on in place of the honest one; by default that one."""
        return dataset

    @abstractmethod
    def __call__(self, sight: Sight) -> Tensor:
        """The rows to send, float32 (k, d).

        Raises
        ------
        AttackError
            The attack needs an estimate, and there is none.
        """


class Collusion(Attack):
    """An attack in which all adversaries send the same vector, computed from the estimate of the honest momenta."""

    needs: ClassVar[Needs] = "an estimate of honest momenta"
    needs_estimate = True

    def __call__(self, sight: Sight) -> Tensor:
        require_estimate(self.name, sight)
        return rows_of(self.vector(sight), sight)

    @abstractmethod
    def vector(self, sight: Sight) -> Tensor:
        """What to send, float32 (d,), from an estimate of at least one row."""


def rows_of(vector: Tensor, sight: Sight) -> Tensor:
    """The same vector for every adversary, float32 (k, d): rows of their own."""
    return vector.expand(sight.own.shape[0], -1).clone()


def require_estimate(name: str, sight: Sight) -> None:
    """Refuse to go on without an estimate.

    Raises
    ------
    AttackError
        It has no rows.
    """
    if sight.honest.shape[0] == 0:
        raise AttackError(f"{name} needs an estimate of the honest momenta; given no rows in round {sight.round_id}")

"""What a client remembers, seen from its protocol loop; and a client that remembers nothing.

The protocol loop tells its memory what happens and asks it one question, at each joining: was a model of this run seen
before? What is kept, and where, is the memory's own affair: see :mod:`client.keeper`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "Forgetful", "Held", "Memory", "Outcome", "RunTerms", "Seen", "Vector"]

Vector = npt.NDArray[np.float32]


class Held(NamedTuple):
    """A momentum m_i, float32 (d,), and the round it belongs to; round −1 is the zero momentum before round 0."""

    round_id: int
    momentum: Vector


class Seen(NamedTuple):
    """The latest model seen of a run: its round, and the ledger's head that came with it."""

    round_id: int
    head: bytes


NEVER = Seen(-1, b"")


@dataclass(frozen=True)
class RunTerms:
    """What joining a run means, as the parameter server says.

    Attributes
    ----------
    noise_multiplier
        z of every release; 0 for none.
    rounds
        How many releases are planned.
    """

    run_id: str
    noise_multiplier: float
    rounds: int


@dataclass(frozen=True)
class Outcome:
    """How the run ended, in the parameter server's words.

    Attributes
    ----------
    releases
        How many releases it made at most; None where the client cannot tell.
    """

    status: str
    message: str
    releases: int | None = field(default=None, compare=False)


class Memory(Protocol):
    """Told by the protocol loop what happens."""

    async def joined(self, terms: RunTerms, /) -> Seen:
        """All identities have joined a run, and nothing of their data has been sent yet.

        Returns
        -------
        Seen
            The latest model of this run that any life of this client has seen; :data:`NEVER` if none.

        Raises
        ------
        PrivacyError
            This client will not take part on these terms.
        StoreProblem
            It cannot write down that it does.
        """
        ...

    def saw(self, run_id: str, seen: Seen, /) -> None:
        """A model later than any before has arrived. Must not take long."""

    def round_done(self) -> None:
        """All momenta of a round are computed. Must not take long."""

    async def finished(self, outcome: Outcome | None, /) -> None:
        """The process ends; None: before the run's end."""


class Forgetful:
    """Keeps nothing: every life of such a client is its first."""

    async def joined(self, _terms: RunTerms) -> Seen:
        return NEVER

    def saw(self, _run_id: str, _seen: Seen) -> None:
        pass

    def round_done(self) -> None:
        pass

    async def finished(self, _outcome: Outcome | None) -> None:
        pass

"""One setting of the audit: which canary, in how many releases of how many servers, under which claim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from common.aggregation.step import grid_of
from common.config import Experiment, experiment_from
from common.privacy.conversions import epsilon_of, mu_of
from common.randomness import stream
from deploy.audit.canary import Canary, Cells
from deploy.audit.task import PAPER_SIZE, SMALL_SIZE

__all__ = ["CELL", "Claim", "Setting"]

CELL = 1.0
"""C: what the victim's momentum holds in a cell."""

_SIZES = {"paper_size": PAPER_SIZE, "small_size": SMALL_SIZE}


@dataclass(frozen=True)
class Claim:
    """What every trial of the audit is said to be: (ε, δ)-DP, because it is μ-GDP.

    Raises
    ------
    PrivacyError
        ε or δ is out of range.
    """

    epsilon: float
    delta: float

    @cached_property
    def mu(self) -> float:
        """The largest μ whose ε does not exceed the claimed one (``exact``)."""
        return mu_of(self.epsilon, self.delta, "exact")


@dataclass(frozen=True)
class Setting:
    """What is run, twice: once for each world.

    Parameters
    ----------
    name, reveals
        For the report: what it is called, and which faults it would show.
    canary
        What makes up a trial.
    rounds
        Releases observed of each start.
    starts
        ``one`` server; one that is killed and ``restarted``, each life of it being a start; or the servers of
        ``two runs``, forked from one process.
    clients, byzantine, server_momentum, form
        n, f, β, and ``training.server_momentum_form``.
    data
        A data set of :mod:`deploy.audit.task`.
    support
        How many coordinates hold a cell in a release; None is all. The clip norm is C √support, so a small support
        makes a concentrated canary.
    oversize
        The victim, and the others, send this many times what fits into the ball: the server has to project it.
    """

    name: str
    reveals: str
    canary: Canary
    rounds: int
    starts: Literal["one", "restarted", "two runs"] = "one"
    clients: int = 20
    byzantine: int = 4
    server_momentum: float = 0.9
    form: Literal["outside", "inside"] = "outside"
    data: Literal["paper_size", "small_size"] = "paper_size"
    support: int | None = None
    oversize: float = 1.0

    @property
    def num_parameters(self) -> int:
        return _SIZES[self.data]

    @property
    def cells_per_round(self) -> int:
        return self.num_parameters if self.support is None else self.support

    @property
    def shape(self) -> tuple[int, int, int]:
        """(starts, rounds, coordinates) of the cells."""
        return 1 if self.starts == "one" else 2, self.rounds, self.cells_per_round

    @property
    def rounds_of_trial(self) -> int:
        """How many releases one trial is made of: the T of its claim."""
        return self.canary.cells_per_trial if self.canary.across in ("rounds", "starts") else 1

    @property
    def rounds_of_run(self) -> int:
        """T of each run: a release is seen in the model after it, so there is one round more than is observed."""
        return (2 * self.rounds if self.starts == "restarted" else self.rounds) + 1

    @property
    def clip_norm(self) -> float:
        """C √cells, so that a whole row of cells is just inside the ball."""
        root = CELL * math.sqrt(self.cells_per_round)
        return root if Fraction(root) ** 2 >= Fraction(CELL) ** 2 * self.cells_per_round else math.nextafter(root, 9e9)

    def noise_multiplier(self, mu: float) -> float:
        """z for which a trial of k cells is exactly μ-GDP: in k cells the canary has √k / √cells of the clip norm."""
        return math.sqrt(self.canary.cells_per_trial / self.cells_per_round) / mu

    def sigma(self, mu: float) -> float:
        """z S of one coordinate of Y, as the claim has it: the audit's unit, which it does not ask the server for."""
        sensitivity = 2.0 * self.clip_norm / (self.clients - 2 * self.byzantine)
        return self.noise_multiplier(mu) * sensitivity

    @property
    def moved(self) -> float:
        """The aggregate in a cell is plus or minus this, and 0 elsewhere: of the n − 2f values kept all but one are 0.

        Momenta that are too large are projected onto the ball, where they are a row of cells again.
        """
        return CELL / (self.clients - 2 * self.byzantine)

    @property
    def grid(self) -> float:
        """What the noise of one coordinate of Y is a multiple of: noise on the sum, or on R = β R + (1 − β) Y."""
        divisor = 1.0 - self.server_momentum if self.form == "inside" else self.clients - 2 * self.byzantine
        return grid_of(self.clip_norm) / divisor

    @property
    def releases(self) -> int:
        """Of both worlds together."""
        starts, rounds, _ = self.shape
        return 2 * starts * rounds

    def experiment(self, claim: Claim) -> Experiment:
        """The run whose budget makes the server choose z.

        The budget is that of all its releases to a client that fills the ball, as any client may; so it is far larger
        than the claim of a trial, which lives in few cells.
        """
        rounds, z = self.rounds_of_run, self.noise_multiplier(claim.mu)
        return experiment_from(
            {
                "federation": {
                    "clients": self.clients,
                    "byzantine": self.byzantine,
                    "clients_per_process": self.clients,
                    "quorum": self.clients,
                },
                "training": {
                    "rounds": rounds,
                    "learning_rate": 1.0,
                    "clip_norm": self.clip_norm,
                    "client_momentum": 0.0,
                    "server_momentum": self.server_momentum,
                    "server_momentum_form": self.form,
                },
                "evaluation": {"every": rounds + 1},
                "aggregation": {"rule": "trimmed_mean"},
                "privacy": {"epsilon": epsilon_of(math.sqrt(rounds) / z, claim.delta, "exact"), "delta": claim.delta},
                "data": {"dataset": f"deploy.audit.task:{self.data}", "partition": "iid"},
                "model": {"name": "deploy.audit.task:numbers"},
                "network": {"leave_deadline_s": 2.0, "server_gone_s": 30.0, "liveness_s": 60.0},
                "monitoring": {"status": ""},
            },
            where=f"the audit's setting {self.name!r}",
        )

    def places(self) -> npt.NDArray[np.intp]:
        """Which coordinates hold the cells of each release, ``(starts, rounds, cells)``; public."""
        starts, rounds, cells = self.shape
        d = self.num_parameters
        if cells == d:
            return np.broadcast_to(np.arange(d), self.shape)
        order = stream(0, f"audit places {self.name}").permutation(d)
        turns = np.arange(starts * rounds * cells).reshape(self.shape)
        return order[turns % d]

    def signs(self) -> Cells:
        """u of every cell; public, and the same in both worlds."""
        return self.canary.signs(self.shape, stream(0, f"audit signs {self.name}"))

    def roles(self) -> npt.NDArray[np.intp]:
        """The identities in the order of their roles: the victim, f that hold −C u, f that hold +C u, the rest."""
        return stream(0, f"audit roles {self.name}").permutation(self.clients)

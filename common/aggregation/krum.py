"""Krum: the row whose neighbours are nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from common.aggregation.checks import choice
from common.aggregation.geometry import geometry_of
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.selection import NEIGHBOURS, krum_order, num_neighbours

__all__ = ["Krum"]


class Krum(Rule):
    """x_i of the lowest score Σ ‖x_i - x_j‖², over the nearest other rows x_j.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".

    Parameters
    ----------
    neighbours
        How many others a score counts: ``"n-f-2"``, the paper's, or ``"n-f-1"``, ByzFL's.

    Sensitivity
        2C, by projecting the output: the choice jumps. It does not fall with n, and without the projection it is more,
        for unbounded Byzantine rows.
    Robustness
        With n-f-1 neighbours (f, κ)-robust with κ = 6 (1 + f/(n - 2f)) (Allouah et al. 2023, "Fixing by Mixing").
    Complexity
        O(n² d) time for one float64 Gram matrix about a central row, so that distances are right for rows with a
        large common mean; O(n²) memory beside a block of columns.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 3                     RuleError; n-f-1 neighbours need 2f + 1
    n = 2f + 1                     only with n-f-1: f neighbours
    f = 0                          the row nearest all others
    ties                           the first in an order by content, not by client
    non-finite row                 the zero vector
    1e30 in a row                  far from the rest; squares fit float64
    all equal                      that vector
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "krum"
    equivariant = True

    def __init__(self, *, num_byzantine: int, neighbours: str = "n-f-2") -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.neighbours = choice(self.name, "neighbours", neighbours, NEIGHBOURS)

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + (3 if self.neighbours == "n-f-2" else 1)

    def kappa(self, num_clients: int) -> float | None:
        self.require(num_clients)
        if self.neighbours == "n-f-2":
            return None
        return 6.0 * (1.0 + self.num_byzantine / (num_clients - 2 * self.num_byzantine))

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        geometry = geometry_of(x)
        best = krum_order(geometry, num_neighbours(self.neighbours, x.shape[0], self.num_byzantine))[0]
        if not geometry.finite[best]:
            return torch.zeros_like(x[0])
        return x[int(geometry.order[best])] + 0.0  # a copy, without -0.0

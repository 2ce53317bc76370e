"""Multi-Krum: the mean of the rows with the lowest Krum scores."""

from __future__ import annotations

from torch import Tensor

from common.aggregation.checks import choice, count
from common.aggregation.geometry import geometry_of
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.selection import NEIGHBOURS, krum_order, num_neighbours, subset_mean_sensitivity
from common.errors import RuleError

__all__ = ["MultiKrum"]


class MultiKrum(Rule):
    """The mean of the m rows of lowest score Σ ‖x_i - x_j‖², over the nearest other rows x_j.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".

    Parameters
    ----------
    neighbours
        How many others a score counts: ``"n-f-2"``, the paper's, or ``"n-f-1"``, ByzFL's.
    selected
        m; default n - f.

    Sensitivity
        2C · min(m, n - m + 1)/m, for m = n - f that is 2C (f + 1)/(n - f), when all rows lie in the ball, absent ones
        as zero rows: whatever is chosen, at most n - m rows are exchanged, and one moves. Strict: 2C min(m, n - m + f
        + 1)/m.
    Complexity
        O(n² d) time for one float64 Gram matrix about a central row, so that distances are right for rows with a
        large common mean; O(n²) memory beside a block of columns.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    n < 2f + 3, n < m              RuleError; n-f-1 neighbours need 2f + 1
    n = 2f + 1                     only with n-f-1: f neighbours
    f = 0                          the mean, if m = n
    ties                           the first in an order by content, not by client
    non-finite row                 the zero vector
    1e30 in a row                  far from the rest; squares fit float64
    all equal                      that vector
    d = 1                          as any d
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "multi_krum"
    project_output = False
    equivariant = True

    def __init__(self, *, num_byzantine: int, neighbours: str = "n-f-2", selected: int | None = None) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.neighbours = choice(self.name, "neighbours", neighbours, NEIGHBOURS)
        self.selected = None if selected is None else count(self.name, "selected", selected)

    @property
    def minimum_clients(self) -> int:
        return 2 * self.num_byzantine + (3 if self.neighbours == "n-f-2" else 1)

    def require(self, num_clients: int) -> None:
        super().require(num_clients)
        if self.selected is not None and self.selected > num_clients:
            raise RuleError(f"{self.name}: selected = {self.selected} of {num_clients} rows: lower it")

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        self.require(num_clients)
        return subset_mean_sensitivity(num_clients, self._chosen_of(num_clients), clip_norm, changed)

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        n = x.shape[0]
        geometry = geometry_of(x)
        order = krum_order(geometry, num_neighbours(self.neighbours, n, self.num_byzantine))
        return geometry.mean_of(x, order[: self._chosen_of(n)])

    def _chosen_of(self, n: int) -> int:
        return n - self.num_byzantine if self.selected is None else self.selected

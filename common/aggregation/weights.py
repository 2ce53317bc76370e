"""Rules whose rows count by public weights of their identities."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.rows import combine
from common.aggregation.rule import RoundContext, Rule
from common.errors import RuleError

__all__ = ["WeightedRule"]


class WeightedRule(Rule):
    """A combination of the rows by a weight α_i per identity: public, from the configuration, fixed before round 0.

    Weights may be given as sample counts: they are divided by their sum once, over the whole roster. They are never
    renormalised over those who answered, which would leak who did, so a row that is absent or zero takes its weight
    out of the result. A round that aggregates fewer rows gives the weights of those rows in its
    :class:`RoundContext` (``RoundContext.of_rows`` picks them).
    """

    project_output = False
    lipschitz = True
    takes_weights = True

    def __init__(self, *, num_byzantine: int, weights: Sequence[float] | None = None) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.weights: NDArray[np.float64] | None = None if weights is None else self._normalised(weights)

    @abstractmethod
    def factors(self, x: Tensor, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 (n,): what the rows of the combination are multiplied by; ``weights`` (n,) are their α."""

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        return combine(x, self.factors(x, self.weights_of(x, context)))

    def __call__(self, x: Tensor, context: RoundContext | None = None) -> Tensor:
        self._check(x)  # as any rule; only that no pass of its own rounds the result
        x = x.detach()
        return combine(x, self.factors(x, self.weights_of(x, context)), dtype=torch.float32)

    def with_weights(self, weights: Sequence[float]) -> Self:
        weighted = copy.copy(self)
        weighted.weights = self._normalised(weights)
        return weighted

    def require(self, num_clients: int) -> None:
        super().require(num_clients)
        if self.weights is not None and num_clients > len(self.weights):
            raise RuleError(f"{self.name} has {len(self.weights)} weights for {num_clients} identities: one each")

    def largest_weights(self, num_clients: int, number: int) -> float:
        """The sum of the ``number`` largest weights on a roster of ``num_clients``; without weights all are 1/n.

        Raises
        ------
        RuleError
            There is not one weight per identity.
        """
        self.require(num_clients)
        if self.weights is None:
            return min(number, num_clients) / num_clients
        if len(self.weights) != num_clients:
            raise RuleError(f"{self.name} has {len(self.weights)} weights for {num_clients} identities: one each")
        return math.fsum(np.sort(self.weights)[::-1][:number].tolist())

    def weights_of(self, x: Tensor, context: RoundContext | None) -> NDArray[np.float64]:
        """float64 (n,): the weights of the rows of x.

        Raises
        ------
        RuleError
            The context's weights are not one per row, or larger than those whose sensitivity is stated.
        """
        n = x.shape[0]
        if context is not None and context.weights is not None:
            given = context.weights.detach().to("cpu").numpy().astype(np.float64)
            if given.shape != (n,) or not np.isfinite(given).all() or (given < 0.0).any():
                raise RuleError(f"{self.name}: the context's weights: expected {n} numbers of at least 0, one a row")
            if (np.sort(given)[::-1] > self._largest_allowed(n) * (1.0 + 1e-12)).any():
                raise RuleError(
                    f"{self.name}: the context's weights are larger than the rule's own, for which it states its "
                    f"sensitivity: give the rule those of the whole roster (with_weights)"
                )
            return given
        if self.weights is None:
            return np.full(n, 1.0 / n)
        if len(self.weights) != n:
            raise RuleError(f"{self.name} has {len(self.weights)} weights for {n} rows: pass the rows' in the context")
        return self.weights

    def _largest_allowed(self, num_rows: int) -> NDArray[np.float64]:
        """(n,), descending: what the largest, the second largest, … weight of a round may be."""
        return np.full(num_rows, 1.0 / num_rows) if self.weights is None else np.sort(self.weights)[::-1][:num_rows]

    def _normalised(self, weights: Sequence[float]) -> NDArray[np.float64]:
        values = np.asarray(weights, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0.0).any() or not values.sum() > 0.0:
            raise RuleError(f"{self.name}: weights = {weights!r}: expected numbers of at least 0, not all 0")
        return np.asarray(values / math.fsum(values.tolist()))

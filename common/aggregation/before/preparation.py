"""What a step before the rule is: a function from n rows to rows, with what it does to the rule's promises."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from common.aggregation.rule import RoundContext
from common.errors import RuleError

__all__ = ["FLOAT32_ROUNDING", "Preparation"]

FLOAT32_ROUNDING = 2.0**-22  # a share of a vector's norm, and more than a product in float32 can be off by


class Preparation(ABC):
    """A pre-aggregation step: float32 (n, d) to float32 (n', d), without changing its argument.

    Attributes
    ----------
    name
        What a configuration calls it.
    needs
        Fields of :class:`RoundContext` without which it refuses.
    equivariant
        As of a :class:`~common.aggregation.rule.Rule`: the step commutes with scaling and shifting all rows.
    keeps_identities
        Whether row i of the result stands for the client of row i, so that weights still belong to it.
    allowed_inside
        Whether it may stand before a rule that server momentum is inside of: not if it compares norms about 0.
    """

    name: str
    needs: frozenset[str] = frozenset()
    equivariant: bool = True
    keeps_identities: bool = False
    allowed_inside: bool = True

    def __init__(self, *, num_byzantine: int) -> None:
        if isinstance(num_byzantine, bool) or not isinstance(num_byzantine, int) or num_byzantine < 0:
            raise RuleError(f"num_byzantine = {num_byzantine!r}: expected an integer of at least 0")
        self.num_byzantine = num_byzantine

    @abstractmethod
    def apply(self, x: Tensor, context: RoundContext | None) -> Tensor:
        """The step itself."""

    @property
    def minimum_clients(self) -> int:
        """The smallest n the step is defined for."""
        return 1

    def rows_after(self, num_clients: int) -> int:
        """n'."""
        return num_clients

    def moved(self, num_clients: int, radius: float, bound: float) -> float | None:  # noqa: ARG002
        """If replacing one row, by at most 2 ``radius``, changes at most one row of the result: half of by how much.

        All rows lie in the ball of radius ``bound``. The rounding of the result to float32 is included. None if more
        than one row may change.
        """
        return None

    def bound_after(self, bound: float) -> float:
        """The radius of a ball that holds the rows of the result."""
        return bound

    def kappa_after(self, kappa: float, num_clients: int) -> float | None:  # noqa: ARG002
        """κ of a rule behind this step, from its own κ; None if unknown."""
        return None

    def context_after(self, context: RoundContext | None) -> RoundContext | None:
        """What the next step is told of the round."""
        return context

    def __call__(self, x: Tensor, context: RoundContext | None = None) -> Tensor:
        """Apply the step.

        Raises
        ------
        RuleError
            ``x`` is not float32 (n, d), has too few rows, or ``context`` lacks what the step needs.
        """
        if x.ndim != 2 or x.dtype != torch.float32:
            raise RuleError(f"{self.name} takes float32 (n, d); given {x.dtype} {tuple(x.shape)}")
        if x.shape[0] < self.minimum_clients:
            raise RuleError(f"{self.name} needs at least {self.minimum_clients} rows; given {x.shape[0]}")
        missing = sorted(field for field in self.needs if getattr(context, field, None) is None)
        if missing:
            raise RuleError(f"{self.name} needs a RoundContext with {', '.join(missing)}")
        return self.apply(x.detach(), context)

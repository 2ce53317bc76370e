"""What a step before the rule is: a function from n rows to rows, with what it does to the rule's promises."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.aggregation.rows import scale_rows, squared_norms
from common.aggregation.rule import RoundContext
from common.errors import RuleError

__all__ = ["FLOAT32_ROUNDING", "Preparation", "RowScaling", "clip_scales"]

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
        self.check(x, context)
        return self.apply(x.detach(), context)

    def check(self, x: Tensor, context: RoundContext | None) -> None:
        """Refuse what :meth:`__call__` refuses."""
        if x.ndim != 2 or x.dtype != torch.float32:
            raise RuleError(f"{self.name} takes float32 (n, d); given {x.dtype} {tuple(x.shape)}")
        if x.shape[0] < self.minimum_clients:
            raise RuleError(f"{self.name} needs at least {self.minimum_clients} rows; given {x.shape[0]}")
        missing = sorted(field for field in self.needs if getattr(context, field, None) is None)
        if missing:
            raise RuleError(f"{self.name} needs a RoundContext with {', '.join(missing)}")


class RowScaling(Preparation):
    """A step that multiplies each row by a factor in [0, 1] which depends on norms alone.

    A composition uses the factors where its rule takes them, instead of a scaled copy of all rows; see
    :class:`~common.aggregation.composed.Composed`.
    """

    equivariant = False
    keeps_identities = True
    allowed_inside = False

    @abstractmethod
    def scales(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 (n,): the factors, from norms (n,) that are not finite where the row is not; 0 for those."""

    def apply(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return scale_rows(x, self.scales(np.sqrt(squared_norms(x))))


def clip_scales(norms: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """What to multiply each row by, so that its norm is at most ``radius``; 0 for a row that is not finite."""
    scales = np.where(np.isfinite(norms), 1.0, 0.0)
    longer = np.isfinite(norms) & (norms > radius)
    scales[longer] = radius / norms[longer]
    return scales

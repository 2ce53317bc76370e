"""What an aggregation rule is: a function from n vectors to one, with what it promises stated beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.errors import RuleError

__all__ = ["RoundContext", "Rule", "SumRule"]


@dataclass(frozen=True)
class RoundContext:
    """What a rule may know of a round beside the vectors. Everything in it is public or was released.

    Parameters
    ----------
    round_id
        The round, from 0.
    weights
        (n,) float64, one public weight per identity.
    centre
        (d,) float32, 0 or the last *released* aggregate.
    generator
        A public random stream of this round.
    """

    round_id: int = 0
    weights: Tensor | None = None
    centre: Tensor | None = None
    generator: np.random.Generator | None = None

    def of_rows(self, indices: Tensor) -> RoundContext:
        """The context of a subset of the rows; weights are picked, never renormalised."""
        return self if self.weights is None else replace(self, weights=self.weights[indices])


class Rule(ABC):
    """A robust aggregation rule: a pure function of float32 (n, d) that does not depend on the order of rows.

    A rule gives ``name``, ``aggregate``, and whatever of the rest differs from the cautious values here.

    Attributes
    ----------
    name
        What a configuration calls it.
    needs
        Fields of :class:`RoundContext` without which the rule refuses.
    project_output
        Whether a private release projects the rule's output onto the ball of radius C. That makes 2C a valid
        sensitivity of any function whatever, which is what a rule without a proof of its own is charged.
    """

    name: str
    needs: frozenset[str] = frozenset()
    project_output: bool = True

    def __init__(self, *, num_byzantine: int) -> None:
        if isinstance(num_byzantine, bool) or not isinstance(num_byzantine, int) or num_byzantine < 0:
            raise RuleError(f"num_byzantine = {num_byzantine!r}: expected an integer of at least 0")
        self.num_byzantine = num_byzantine

    @abstractmethod
    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        """The rule itself, on checked input: float32 (n, d) to (d,)."""

    @property
    def minimum_clients(self) -> int:
        """The smallest n the rule is defined for."""
        return 1

    def __call__(self, x: Tensor, context: RoundContext | None = None) -> Tensor:
        """Aggregate.

        Parameters
        ----------
        x
            float32 (n, d), one row per client, on any device; not modified.
        context
            What else the rule needs to know, for the rules that need it.

        Returns
        -------
        Tensor
            float32 (d,), on the device of ``x``.

        Raises
        ------
        RuleError
            ``x`` has another shape or type, too few rows, or ``context`` lacks what the rule needs.
        """
        self._check(x)
        missing = sorted(field for field in self.needs if getattr(context, field, None) is None)
        if missing:
            raise RuleError(f"{self.name} needs a RoundContext with {', '.join(missing)}")
        return self.aggregate(x.detach(), context)

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:  # noqa: ARG002 - for rules that compile
        """Do now what a first call with (n, d) on ``device`` would otherwise do in the round.

        Raises
        ------
        RuleError
            The rule is not defined for n.
        """
        self.require(n)

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        """S: how far, in L2, the aggregate of the m_i moves when one client's row is replaced.

        All rows lie in the ball of radius ``clip_norm``. The value here, 2C, is that of projecting the output. A rule
        that states less, and is no :class:`SumRule`, includes twice the error its own arithmetic can make.

        Raises
        ------
        RuleError
            The rule is not defined for ``num_clients``.
        """
        self.require(num_clients)
        return 2.0 * clip_norm

    def require(self, num_clients: int) -> None:
        """Refuse an n the rule is not defined for.

        Raises
        ------
        RuleError
            ``num_clients`` is below :attr:`minimum_clients`.
        """
        if num_clients < self.minimum_clients:
            raise RuleError(
                f"{self.name} with num_byzantine = {self.num_byzantine} needs at least {self.minimum_clients} rows; "
                f"given {num_clients}: lower num_byzantine or have more clients answer"
            )

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.dtype != torch.float32:
            raise RuleError(f"{self.name} takes float32 (n, d); given {x.dtype} {tuple(x.shape)}")
        self.require(x.shape[0])


class SumRule(Rule):
    """A rule that is a sum of as many entries in every coordinate, over a constant.

    When all entries are multiples of a power of two g, at most 2^21 g in size, the float64 sum is exact, hence the
    same in any order. So a private release can add its noise to the sum, on the same grid, and the sensitivity needs
    no allowance for rounding. See :mod:`ps.update`.
    """

    project_output = False

    @abstractmethod
    def sum_of_kept(self, x: Tensor) -> Tensor:
        """float64 (d,): per coordinate, the sum of what the rule keeps."""

    @abstractmethod
    def divisor(self, num_clients: int) -> int:
        """How many entries are kept of ``num_clients``."""

    def kept_sum(self, x: Tensor) -> tuple[Tensor, int]:
        """The rule before its division: float64 (d,) and the divisor.

        Raises
        ------
        RuleError
            As a call would.
        """
        self._check(x)
        return self.sum_of_kept(x.detach()), self.divisor(x.shape[0])

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:  # noqa: ARG002 - needs none
        return self.sum_of_kept(x).div_(self.divisor(x.shape[0])).to(torch.float32)

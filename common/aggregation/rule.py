"""What an aggregation rule is: a function from n vectors to one, with what it promises stated beside it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.aggregation.kernels.passes import prepare_passes
from common.errors import RuleError

__all__ = ["RoundContext", "Rule", "SumRule", "require_shrinkage"]


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
    equivariant
        F(a x + b) = a F(x) + b for every number a > 0 and vector b. Then server momentum inside the rule and outside
        it are the same sequence.
    lipschitz
        Whether :meth:`proved_sensitivity` bounds how far the result moves when one row moves by at most twice
        ``clip_norm``, *wherever* the rows are. Such a bound survives a step before the rule.
    needs_clipping
        Whether the sensitivity rests on rows inside a ball; if not, it ignores ``clip_norm``.
    takes_weights
        Whether rows count by public weights of their identities, given once by :meth:`with_weights`.
    """

    name: str
    needs: frozenset[str] = frozenset()
    project_output: bool = True
    equivariant: bool = False
    lipschitz: bool = False
    needs_clipping: bool = True
    takes_weights: bool = False

    def __init__(self, *, num_byzantine: int) -> None:
        if isinstance(num_byzantine, bool) or not isinstance(num_byzantine, int) or num_byzantine < 0:
            raise RuleError(f"num_byzantine = {num_byzantine!r}: expected an integer of at least 0")
        self.num_byzantine = num_byzantine

    @abstractmethod
    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        """The rule itself, on checked input: float32 (n, d) to (d,), in float64 where the result is not exact."""

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
        return self._run(x, context).to(torch.float32)

    def evaluate(self, x: Tensor, context: RoundContext | None = None) -> Tensor:
        """float64 (d,): a call before it is rounded to float32, which a private release rounds to its grid instead.

        Raises
        ------
        RuleError
            As a call would.
        """
        return self._run(x, context).to(torch.float64)

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        """Do now what a first call with (n, d) on ``device`` would otherwise do in the round.

        Raises
        ------
        RuleError
            The rule is not defined for n.
        """
        self.require(n)
        prepare_passes(n, d, device)

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        """S: how far, in L2, the aggregate of the m_i moves when one client's row is replaced.

        All rows lie in the ball of radius ``clip_norm``. Without a proof it is 2C, that of projecting the output. A
        rule that states less, and is no :class:`SumRule`, includes twice the error its own arithmetic can make.

        Raises
        ------
        RuleError
            The rule is not defined for ``num_clients``.
        """
        return self._capped(num_clients, clip_norm, changed=1)

    def strict_sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        """As :meth:`sensitivity`, when adversaries may have read the replaced row: f rows besides it may change too.

        At most f + 1 steps of one row each, capped at 2C, which needs the output projected: :meth:`projects_output`.
        """
        return self._capped(num_clients, clip_norm, changed=self.num_byzantine + 1)

    def inside_sensitivity(
        self, *, num_clients: int, clip_norm: float, server_momentum: float, strict: bool = False
    ) -> float:
        """As :meth:`sensitivity`, of the rule on the paper's M_i = β R + (1 - β) m_i.

        The M_i lie in a ball of radius (1 - β) C about β R, which was released. So this is the sensitivity for that
        radius: (1 - β) S for an equivariant rule. Where the output is projected, it is onto *that* ball.

        Raises
        ------
        RuleError
            Nothing is proved for the inside form of this rule, or β is not in [0, 1).
        """
        self.require(num_clients)
        shrinkage = require_shrinkage(server_momentum)
        if not (self.project_output or self.lipschitz or self.equivariant):
            raise RuleError(
                f"{self.name} states no sensitivity for server momentum inside the rule: "
                f"use training.server_momentum_form = 'outside'"
            )
        changed = self.num_byzantine + 1 if strict else 1
        return self._capped(num_clients, shrinkage * clip_norm, changed=changed)

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:  # noqa: ARG002
        """A bound that needs no projection, when ``changed`` rows are replaced; infinite if none is proved."""
        self.require(num_clients)
        return math.inf

    def projects_output(self, *, num_clients: int, clip_norm: float, strict: bool = False) -> bool:
        """Whether the sensitivity stated holds only if the release projects the output onto the ball of radius C."""
        changed = self.num_byzantine + 1 if strict else 1
        proved = self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)
        return self.project_output or proved > 2.0 * clip_norm

    def kappa(self, num_clients: int) -> float | None:
        """κ such that ‖F(x) - x̄_S‖² ≤ κ/|S| Σ_{i ∈ S} ‖x_i - x̄_S‖² for every S of n - f rows; None if unknown."""
        self.require(num_clients)
        return None

    def with_weights(self, weights: Sequence[float]) -> Rule:  # noqa: ARG002
        """The rule with one public weight, or sample count, per identity of the roster.

        Raises
        ------
        RuleError
            Its rows count equally.
        """
        raise RuleError(f"{self.name} takes no weights: use weighted_mean or normalized_mean")

    def _capped(self, num_clients: int, clip_norm: float, *, changed: int) -> float:
        proved = self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)
        return min(2.0 * clip_norm, proved)

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

    def _run(self, x: Tensor, context: RoundContext | None) -> Tensor:
        self._check(x)
        missing = sorted(field for field in self.needs if getattr(context, field, None) is None)
        if missing:
            raise RuleError(f"{self.name} needs a RoundContext with {', '.join(missing)}")
        return self.aggregate(x.detach(), context)

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.dtype != torch.float32:
            raise RuleError(f"{self.name} takes float32 (n, d); given {x.dtype} {tuple(x.shape)}")
        self.require(x.shape[0])


class SumRule(Rule):
    """A rule that is a sum of as many entries in every coordinate, over a constant.

    When all entries are multiples of a power of two g, at most 2^21 g in size, the float64 sum is exact, hence the
    same in any order. So a private release can add its noise to the sum, on the same grid, and the sensitivity needs
    no allowance for rounding. See :mod:`ps.update`. What is kept depends on the order of the entries alone, so the
    rule is equivariant; and a coordinate moves by no more than its entry does, over the divisor.
    """

    project_output = False
    equivariant = True
    lipschitz = True

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
        return self.sum_of_kept(x).div_(self.divisor(x.shape[0]))

    def evaluate(self, x: Tensor, context: RoundContext | None = None) -> Tensor:  # noqa: ARG002 - needs none
        """float64 (d,): the kept sum over the divisor, not rounded to float32 first, as a call is.

        Raises
        ------
        RuleError
            As a call would.
        """
        total, divisor = self.kept_sum(x)
        return total.div_(divisor)

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        self.require(num_clients)
        return changed * 2.0 * clip_norm / self.divisor(num_clients)


def require_shrinkage(server_momentum: float) -> float:
    """1 - β.

    Raises
    ------
    RuleError
        β is not in [0, 1).
    """
    if not 0.0 <= server_momentum < 1.0:
        raise RuleError(f"server_momentum = {server_momentum!r}: expected a number in [0, 1)")
    return 1.0 - server_momentum

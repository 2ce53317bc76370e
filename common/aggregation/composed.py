"""A rule behind steps of pre-aggregation, which together are a rule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import count
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from common.aggregation.before.preparation import Preparation, RowScaling
from common.aggregation.rows import Vector, scale_rows, squared_norms
from common.aggregation.rule import RoundContext, Rule
from common.aggregation.scratch import Scratch
from common.errors import RuleError

__all__ = ["Composed"]

_MOST_CLIENTS = 1_000_000


@runtime_checkable
class _TakesScales(Protocol):
    """A rule that need not see scaled rows: the rows and their scales will do."""

    def aggregate_scaled(self, x: Tensor, scales: Vector, context: RoundContext | None) -> Tensor:
        """float64 (d,): the rule on scales_i x_i; a row of scale 0 counts as zero, whatever stands there."""


class Composed(Rule):
    """rule(step_k(… step_1(x))).

    Parameters
    ----------
    before
        The steps, the first of them first.
    rule
        The rule they lead to; both were made for the same f.

    Sensitivity
        That of the rule, for the number of rows and the radius it gets to see, when every step moves at most one row
        for one row moved (clipping, bucketing) and the rule's own sensitivity bounds how far it follows a row. Else
        2C, by projecting the output.
    Robustness
        Each step changes κ in its own way, from the last to the first.
    Memory
        Steps that only scale rows (clipping) leave no trace where the rule takes the scales in their place: the
        means. For other rules the scaled rows are in a buffer of n d float32, allocated when a row is first scaled and
        kept as long as this object, since fresh pages cost more time than the scaling. It is overwritten by the next
        round, and no result shares it, so a rule of your own must not keep its argument. Calls from several threads
        are safe: those that find the buffer taken allocate their own. Small matrices, and devices, have none.

    Raises
    ------
    RuleError
        A step mixes clients before a rule that weighs them, or f differs.
    """

    def __init__(self, before: Sequence[Preparation], rule: Rule) -> None:
        super().__init__(num_byzantine=rule.num_byzantine)
        self.before, self.rule = tuple(before), rule
        self.name = " + ".join([*(step.name for step in self.before), rule.name])
        for step in self.before:
            if step.num_byzantine != rule.num_byzantine:
                raise RuleError(
                    f"{step.name} was made for f = {step.num_byzantine}, {rule.name} for {rule.num_byzantine}"
                )
            if rule.takes_weights and not step.keeps_identities and self._weighs(rule):
                raise RuleError(
                    f"{step.name} mixes clients, so their weights mean nothing to {rule.name}: leave one of them out"
                )
        self.needs = frozenset().union(rule.needs, *(step.needs for step in self.before))
        self.equivariant = rule.equivariant and all(step.equivariant for step in self.before)
        self.needs_clipping = rule.needs_clipping
        self.weights = getattr(rule, "weights", None)
        self.takes_weights = rule.takes_weights and all(step.keeps_identities for step in self.before)
        follows = rule.lipschitz and all(step.moved(_MOST_CLIENTS, 1.0, 1.0) is not None for step in self.before)
        self.lipschitz, self.project_output = follows, not follows
        self._scratch = Scratch()

    @cached_property
    def _minimum_clients(self) -> int:
        for n in count(1):
            try:
                self._require_all(n)
            except RuleError:
                if n > _MOST_CLIENTS:
                    raise
            else:
                return n
        raise AssertionError

    @property
    def minimum_clients(self) -> int:
        return self._minimum_clients

    def require(self, num_clients: int) -> None:
        self._require_all(num_clients)

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        super().prepare(n, d, device)  # for the steps, which may see more rows than the rule does
        self.rule.prepare(self._seen(n, 1.0)[0], d, device)

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        self.require(num_clients)
        if not self.lipschitz:
            return float("inf")
        seen, radius = self._seen(num_clients, clip_norm)
        return self.rule.proved_sensitivity(num_clients=seen, clip_norm=radius, changed=changed)

    def inside_sensitivity(
        self, *, num_clients: int, clip_norm: float, server_momentum: float, strict: bool = False
    ) -> float:
        refused = [step.name for step in self.before if not step.allowed_inside]
        if refused:
            raise RuleError(
                f"{', '.join(refused)} cannot stand where server momentum is inside the rule, since it compares norms "
                f"about 0: use training.server_momentum_form = 'outside'"
            )
        return super().inside_sensitivity(
            num_clients=num_clients, clip_norm=clip_norm, server_momentum=server_momentum, strict=strict
        )

    def kappa(self, num_clients: int) -> float | None:
        self.require(num_clients)
        numbers = [num_clients]
        for step in self.before:
            numbers.append(step.rows_after(numbers[-1]))
        value = self.rule.kappa(numbers[-1])
        for step, number in zip(reversed(self.before), reversed(numbers[:-1]), strict=True):
            value = None if value is None else step.kappa_after(value, number)
        return value

    def with_weights(self, weights: Sequence[float]) -> Rule:
        if not self.takes_weights:
            return super().with_weights(weights)
        return Composed(self.before, self.rule.with_weights(weights))

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        norms, factors = np.zeros(0), None  # of the rows: what they are to be multiplied by, and their norms after it
        with ExitStack() as until_done:
            for step in self.before:
                if isinstance(step, RowScaling):
                    step.check(x, context)
                    if factors is None:
                        norms, factors = np.sqrt(squared_norms(x)), np.ones(x.shape[0])
                    scales = step.scales(norms)
                    factors *= scales
                    norms = np.multiply(norms, scales, where=np.isfinite(norms), out=norms)
                else:
                    x = step(self._scaled(x, factors, until_done), context)
                    factors = None
                context = step.context_after(context)
            if factors is not None and isinstance(self.rule, _TakesScales):
                return self.rule.aggregate_scaled(x, factors, context)
            return self.rule.evaluate(self._scaled(x, factors, until_done), context)

    def _scaled(self, x: Tensor, factors: Vector | None, until_done: ExitStack) -> Tensor:
        if factors is None or bool((factors == 1.0).all()):
            return x
        return scale_rows(x, factors, until_done.enter_context(self._scratch.like(x)))

    def _capped(self, num_clients: int, clip_norm: float, *, changed: int) -> float:
        if self.needs_clipping or not self.lipschitz:
            return super()._capped(num_clients, clip_norm, changed=changed)
        return self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)

    def projects_output(self, *, num_clients: int, clip_norm: float, strict: bool = False) -> bool:
        if self.needs_clipping or not self.lipschitz:
            return super().projects_output(num_clients=num_clients, clip_norm=clip_norm, strict=strict)
        return False

    def _seen(self, num_clients: int, radius: float) -> tuple[int, float]:
        """How many rows the rule sees, and how far they move for one moved by 2 ``radius``: twice the second."""
        bound = radius
        for step in self.before:
            moved = step.moved(num_clients, radius, bound)
            bound = step.bound_after(bound)
            num_clients, radius = step.rows_after(num_clients), radius if moved is None else moved
        return num_clients, radius

    def _require_all(self, num_clients: int) -> None:
        number = num_clients
        for step in self.before:
            if number < step.minimum_clients:
                raise RuleError(f"{self.name}: {step.name} needs at least {step.minimum_clients} rows; given {number}")
            number = step.rows_after(number)
        try:
            self.rule.require(number)
        except RuleError as problem:
            if number == num_clients:
                raise
            raise RuleError(f"{self.name}: of {num_clients} rows {number} are left: {problem}") from None

    @staticmethod
    def _weighs(rule: Rule) -> bool:
        return rule.name == "weighted_mean" or getattr(rule, "weights", None) is not None

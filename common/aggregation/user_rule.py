"""A user's own aggregation rule, ``module:name``, behind the interface of the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.aggregation.rule import RoundContext, Rule
from common.errors import RuleError
from common.parameters import check_parameters, taken_of
from common.plugins import load_plugin

__all__ = ["UserRule", "load_user_rule"]


class UserRule(Rule):
    """Wraps a callable from float32 (n, d) to (d,).

    What the callable states of ``minimum_clients``, ``needs``, ``prepare``, ``equivariant``, ``kappa`` and
    ``sensitivity`` is taken over. Without a ``sensitivity`` of its own it is charged 2C, and a private release projects
    its output onto the ball of radius C. With one, f rows more may change for (f + 1) times as much, at most 2C; and
    server momentum inside the rule is refused unless it is ``equivariant``.
    """

    def __init__(self, function: Callable[..., Tensor], *, name: str, num_byzantine: int) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.name = name
        self.needs = frozenset(getattr(function, "needs", ()))
        self.project_output = not hasattr(function, "sensitivity")
        self.equivariant = bool(getattr(function, "equivariant", False))
        self._function = function
        self._takes_context = "context" in inspect.signature(function).parameters

    @property
    def minimum_clients(self) -> int:
        return int(getattr(self._function, "minimum_clients", 1))

    def prepare(self, n: int, d: int, device: torch.device | str) -> None:
        super().prepare(n, d, device)
        if hasattr(self._function, "prepare"):
            self._function.prepare(n, d, device)

    def sensitivity(self, *, num_clients: int, clip_norm: float) -> float:
        if self.project_output:
            return super().sensitivity(num_clients=num_clients, clip_norm=clip_norm)
        return self.proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm)

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        if self.project_output:
            return super().proved_sensitivity(num_clients=num_clients, clip_norm=clip_norm, changed=changed)
        self.require(num_clients)
        stated = self._function.sensitivity(num_clients=num_clients, clip_norm=clip_norm)  # type: ignore[attr-defined]
        return changed * float(stated)

    def kappa(self, num_clients: int) -> float | None:
        self.require(num_clients)
        stated = getattr(self._function, "kappa", None)
        return None if stated is None else float(stated(num_clients))

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        x = x.clone()  # the rows are the inbox: what a user's code does to them must end with the call
        result = self._function(x, context=context) if self._takes_context else self._function(x)
        if not isinstance(result, Tensor) or result.shape != x.shape[1:]:
            given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise RuleError(
                f"{self.name} returned {given} for rows {tuple(x.shape)}: expected a torch tensor {tuple(x.shape[1:])}"
            )
        return result.detach().to(device=x.device, dtype=torch.float32)


def load_user_rule(spec: str, *, num_byzantine: int, folders: Sequence[Path], parameters: Mapping[str, Any]) -> Rule:
    """The rule that ``module:name`` names: a class is built, a function is called.

    Raises
    ------
    ConfigError
        There is no such object.
    RuleError
        It is neither a class nor a function, or its parameters are not those given.
    """
    found = load_plugin(spec, folders)
    if not callable(found):
        raise RuleError(f"{spec} is a {type(found).__name__}: expected a function of (n, d) rows, or a class")
    ours = taken_of(found, {"num_byzantine": num_byzantine})
    if inspect.isclass(found):
        check_parameters(spec, found, parameters, provided=ours, error=RuleError)
        rule = found(**ours, **parameters)
        if isinstance(rule, Rule):
            return rule
        if not callable(rule):
            raise RuleError(f"{spec}: its objects cannot be called: give the class a __call__(x)")
    else:
        rows = next(iter(inspect.signature(found).parameters), "")
        check_parameters(spec, found, parameters, provided={*ours, rows, "context"}, error=RuleError)
        rule = _bound(found, {**ours, **parameters})
    return UserRule(rule, name=spec, num_byzantine=num_byzantine)


def _bound(function: Callable[..., Tensor], keywords: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The function with its keywords filled in and its attributes (``sensitivity``, …) kept."""
    bound = partial(function, **keywords)
    bound.__dict__.update(vars(function) if hasattr(function, "__dict__") else {})
    return bound

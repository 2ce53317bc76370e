"""Attacks on the values: what adversaries send in place of their momenta. Pure functions of what they know.

A new attack is one file here and one line in ``ATTACKS``; a user's own is named ``module:name`` in the experiment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from adversary.attacks.adaptive import Adaptive
from adversary.attacks.alie import ALittleIsEnough
from adversary.attacks.attack import Attack, Collusion, Setting, Sight
from adversary.attacks.bit_flip import BitFlip
from adversary.attacks.gaussian import Gaussian
from adversary.attacks.inf import Infinity
from adversary.attacks.ipm import InnerProductManipulation
from adversary.attacks.label_flip import LabelFlip
from adversary.attacks.mimic import Mimic
from adversary.attacks.min_max import MinMax
from adversary.attacks.min_sum import MinSum
from adversary.attacks.none import NoAttack
from adversary.attacks.random_direction import RandomDirection
from adversary.attacks.same_value import SameValue
from adversary.attacks.sign_flip import SignFlip
from adversary.attacks.zero import Zero
from common.errors import AttackError, nearest
from common.learning.datasets import Dataset
from common.parameters import check_parameters, own_parameters
from common.plugins import load_plugin

__all__ = [
    "ATTACKS",
    "Attack",
    "Collusion",
    "Description",
    "Setting",
    "Sight",
    "describe_attacks",
    "make_attack",
]

ATTACKS: dict[str, type[Attack]] = {
    attack.name: attack
    for attack in (
        NoAttack,
        Adaptive,
        ALittleIsEnough,
        BitFlip,
        Gaussian,
        Infinity,
        InnerProductManipulation,
        LabelFlip,
        Mimic,
        MinMax,
        MinSum,
        RandomDirection,
        SameValue,
        SignFlip,
        Zero,
    )
}


@dataclass(frozen=True)
class Description:
    """An attack in a list.

    Attributes
    ----------
    name, line
        What a configuration calls it, and what it sends.
    needs
        What it cannot do without, with its default parameters.
    parameters
        Each with its default.
    source
        Where it was published.
    """

    name: str
    line: str
    needs: str
    parameters: Mapping[str, object]
    source: str


def describe_attacks() -> list[Description]:
    """All attacks that ship with the project, by name."""
    return [
        Description(
            name=name,
            line=inspect.cleandoc(attack.__doc__ or "").partition("\n")[0],
            needs=attack.needs,
            parameters=own_parameters(attack),
            source=attack.source,
        )
        for name, attack in sorted(ATTACKS.items())
    ]


def make_attack(
    name: str,
    setting: Setting,
    *,
    knowledge: str = "colluding",
    folders: Sequence[Path] = (),
    **parameters: Any,
) -> Attack:
    """The attack of that name.

    Parameters
    ----------
    name
        A key of ``ATTACKS``, or ``module:name`` of a user's own: a class built with a :class:`Setting` and
        ``parameters``, or a function that also takes ``parameters``. Called is the function, or the class's object,
        as ``attack(honest, own, round_id)``, with ``theta`` if it names that: see :class:`Sight`. The class may have a
        ``poison(dataset)``, see :meth:`Attack.poison`.
    setting
        The experiment's.
    knowledge
        "none" refuses attacks that need an estimate.
    folders
        Where else to look for a user's module.
    parameters
        The attack's own.

    Raises
    ------
    ConfigError
        There is no such module, or nothing of that name in it.
    AttackError
        The name is unknown; a parameter is unknown, missing or out of range; or the attack needs an estimate of the
        honest momenta and the adversaries know nothing.
    """
    if ":" in name:
        attack = _user_attack(name, setting, folders, parameters)
    elif name in ATTACKS:
        build: Callable[..., Attack] = ATTACKS[name]
        check_parameters(name, build, parameters, provided={"setting"}, error=AttackError)
        attack = build(setting, **parameters)
    else:
        raise AttackError(f"no attack {name!r}: {nearest(name, list(ATTACKS))} or your own as module:name")
    if knowledge == "none" and attack.needs_estimate:
        raise AttackError(
            f'{name} needs an estimate of the honest momenta: set attack.knowledge = "colluding" or "omniscient"'
        )
    return attack


class _UserAttack(Attack):
    """A user's callable as an attack; it is taken not to need an estimate unless it says so."""

    def __init__(self, name: str, function: Callable[..., Tensor], needs_estimate: bool) -> None:
        self.name, self.needs_estimate, self._function = name, needs_estimate, function
        self._sees_theta = "theta" in inspect.signature(function).parameters

    def poison(self, dataset: Dataset) -> Dataset:
        poison: Callable[[Dataset], Dataset] | None = getattr(self._function, "poison", None)
        return dataset if poison is None else poison(dataset)

    def __call__(self, sight: Sight) -> Tensor:
        published = {"theta": sight.theta} if self._sees_theta else {}
        rows = self._function(sight.honest, sight.own, sight.round_id, **published)
        if not isinstance(rows, Tensor) or rows.shape != sight.own.shape:
            given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise AttackError(f"{self.name} returned {given}: expected rows {tuple(sight.own.shape)}")
        return rows.to(sight.own)


def _user_attack(spec: str, setting: Setting, folders: Sequence[Path], parameters: dict[str, Any]) -> Attack:
    found = load_plugin(spec, folders)
    if not callable(found):
        raise AttackError(f"{spec} is a {type(found).__name__}: expected a function or a class")
    is_class = inspect.isclass(found)
    given_by_us = list(inspect.signature(found).parameters)[: 1 if is_class else 3]
    if not is_class:
        given_by_us.append("theta")
    check_parameters(spec, found, parameters, provided=given_by_us, error=AttackError)
    build: Callable[..., Any] = found
    try:
        function = build(setting, **parameters) if is_class else partial(build, **parameters)
    except TypeError as problem:
        raise AttackError(
            f"{spec}({type(setting).__name__}, …) failed: {problem}; its first argument is the setting"
        ) from None
    if not callable(function):
        raise AttackError(f"{spec}: its objects cannot be called: give the class a __call__(honest, own, round_id)")
    needs = getattr(function if is_class else found, "needs_estimate", False)
    return _UserAttack(spec, function, bool(needs))

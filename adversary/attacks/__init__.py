"""Attacks on the values: what adversaries send in place of their momenta. Pure functions of what they know.

A new attack is one file here and one line in ``ATTACKS``; a user's own is named ``module:name`` in the experiment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from adversary.attacks.alie import ALittleIsEnough
from adversary.attacks.attack import Attack, Collusion, Setting
from adversary.attacks.bit_flip import BitFlip
from adversary.attacks.ipm import InnerProductManipulation
from adversary.attacks.mimic import Mimic
from adversary.attacks.none import NoAttack
from common.errors import AttackError, nearest
from common.parameters import check_parameters
from common.plugins import load_plugin

__all__ = ["ATTACKS", "Attack", "Collusion", "Setting", "make_attack"]

ATTACKS: dict[str, Callable[..., Attack]] = {
    attack.name: attack for attack in (NoAttack, ALittleIsEnough, BitFlip, InnerProductManipulation, Mimic)
}


def make_attack(
    name: str,
    *,
    num_clients: int,
    num_byzantine: int,
    num_adversaries: int,
    clip_norm: float | None,
    seed: int,
    knowledge: str = "colluding",
    folders: Sequence[Path] = (),
    **parameters: Any,
) -> Attack:
    """The attack of that name.

    Parameters
    ----------
    name
        A key of ``ATTACKS``, or ``module:name`` of a user's own: a class built with a :class:`Setting` and
        ``parameters``, or a function ``attack(honest, own, round_id)`` that also takes ``parameters``.
    num_clients, num_byzantine, num_adversaries, clip_norm, seed
        See :class:`Setting`.
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
    setting = Setting(num_clients, num_byzantine, num_adversaries, clip_norm, seed)
    if ":" in name:
        attack = _user_attack(name, setting, folders, parameters)
    elif name in ATTACKS:
        check_parameters(name, ATTACKS[name], parameters, provided={"setting"}, error=AttackError)
        attack = ATTACKS[name](setting, **parameters)
    else:
        raise AttackError(f"no attack {name!r}: {nearest(name, list(ATTACKS))} or your own as module:name")
    if knowledge == "none" and attack.needs_estimate:
        raise AttackError(
            f'{name} needs an estimate of the honest momenta: set attack.knowledge = "colluding" or "omniscient"'
        )
    return attack


class _UserAttack:
    """A user's callable with the attributes of an attack; it is taken not to need an estimate unless it says so."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor, int], Tensor], needs_estimate: bool) -> None:
        self.name, self.needs_estimate, self._function = name, needs_estimate, function

    def __call__(self, honest: Tensor, own: Tensor, round_id: int) -> Tensor:
        rows = self._function(honest, own, round_id)
        if not isinstance(rows, Tensor) or rows.shape != own.shape:
            given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise AttackError(f"{self.name} returned {given}: expected rows {tuple(own.shape)}")
        return rows.to(own)


def _user_attack(spec: str, setting: Setting, folders: Sequence[Path], parameters: dict[str, Any]) -> Attack:
    found = load_plugin(spec, folders)
    if not callable(found):
        raise AttackError(f"{spec} is a {type(found).__name__}: expected a function or a class")
    given_by_us = list(inspect.signature(found).parameters)[: 1 if inspect.isclass(found) else 3]
    check_parameters(spec, found, parameters, provided=given_by_us, error=AttackError)
    build: Callable[..., Any] = found
    try:
        function = build(setting, **parameters) if inspect.isclass(found) else partial(build, **parameters)
    except TypeError as problem:
        raise AttackError(
            f"{spec}({type(setting).__name__}, …) failed: {problem}; its first argument is the setting"
        ) from None
    if not callable(function):
        raise AttackError(f"{spec}: its objects cannot be called: give the class a __call__(honest, own, round_id)")
    needs = getattr(function if inspect.isclass(found) else found, "needs_estimate", False)
    return _UserAttack(spec, function, bool(needs))

"""Robust aggregation rules: public knowledge, pure functions on float32 (n, d).

>>> import torch
>>> rule = make_rule("trimmed_mean", num_byzantine=1)
>>> rule(torch.tensor([[1.0, 2.0], [4.0, 5.0], [1e30, -1e30]]))
tensor([4., 2.])
>>> rule.minimum_clients, rule.sensitivity(num_clients=6, clip_norm=1.0)
(3, 0.5)

A new rule is one file here and one line in ``RULES``; a user's own is named ``module:name`` in the experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.aggregation.mean import Mean
from common.aggregation.rule import RoundContext, Rule, SumRule
from common.aggregation.trimmed_mean import TrimmedMean
from common.errors import RuleError, nearest
from common.parameters import check_parameters

__all__ = ["RULES", "RoundContext", "Rule", "SumRule", "make_rule"]

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Mean, TrimmedMean)}


def make_rule(name: str, *, num_byzantine: int, folders: Sequence[Path] = (), **parameters: Any) -> Rule:
    """The rule of that name.

    Parameters
    ----------
    name
        A key of ``RULES``, or ``module:name`` of a user's own: a function ``rule(x)`` from float32 (n, d) to (d,), or
        a class whose objects are such functions. Both are given ``num_byzantine`` if they take it, and
        ``parameters``; the function may take a :class:`RoundContext` as second argument.
    num_byzantine
        f, how many rows may be arbitrary. The number itself: n times a fraction often rounds to another.
    folders
        Where else to look for a user's module.
    parameters
        The rule's own.

    Raises
    ------
    ConfigError
        There is no such module, or nothing of that name in it.
    RuleError
        The name is unknown, or a parameter is unknown, missing or out of range.
    """
    if ":" in name:
        from common.aggregation.user_rule import load_user_rule  # most runs name no rule of their own

        return load_user_rule(name, num_byzantine=num_byzantine, folders=folders, parameters=parameters)
    if name not in RULES:
        raise RuleError(f"no aggregation rule {name!r}: {nearest(name, list(RULES))} or your own as module:name")
    check_parameters(name, RULES[name], parameters, provided={"num_byzantine"}, error=RuleError)
    return RULES[name](num_byzantine=num_byzantine, **parameters)

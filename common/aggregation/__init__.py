"""Robust aggregation rules: public knowledge, pure functions on float32 (n, d).

>>> import torch
>>> rule = make_rule("trimmed_mean", num_byzantine=1)
>>> rule(torch.tensor([[1.0, 2.0], [4.0, 5.0], [1e30, -1e30]]))
tensor([4., 2.])
>>> rule.minimum_clients, rule.sensitivity(num_clients=6, clip_norm=1.0)
(3, 0.5)

Steps of pre-aggregation go before any rule, and the two together are a rule:

>>> make_rule("median", num_byzantine=1, before=["adaptive_clipping", {"name": "bucketing", "size": 3}]).name
'adaptive_clipping + bucketing + median'

A new rule is one file here and one line in ``RULES``; a user's own is named ``module:name`` in the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.aggregation.before import BEFORE, Preparation
from common.aggregation.bulyan import Bulyan
from common.aggregation.centered_clipping import CenteredClipping
from common.aggregation.composed import Composed
from common.aggregation.covariance_filter import CovarianceFilter
from common.aggregation.geometric_median import GeometricMedian
from common.aggregation.krum import Krum
from common.aggregation.mca import MaximumCorrentropy
from common.aggregation.mda import MinimumDiameterAveraging
from common.aggregation.meamed import MeaMed
from common.aggregation.mean import Mean
from common.aggregation.median import Median
from common.aggregation.multi_krum import MultiKrum
from common.aggregation.normalized_mean import NormalizedMean
from common.aggregation.rule import RoundContext, Rule, SumRule
from common.aggregation.trimmed_mean import TrimmedMean
from common.aggregation.weighted_mean import WeightedMean
from common.errors import RuleError, nearest
from common.parameters import check_parameters

__all__ = ["BEFORE", "RULES", "Composed", "Preparation", "RoundContext", "Rule", "SumRule", "make_rule"]

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Bulyan,
        CenteredClipping,
        CovarianceFilter,
        GeometricMedian,
        Krum,
        MaximumCorrentropy,
        MeaMed,
        Mean,
        Median,
        MinimumDiameterAveraging,
        MultiKrum,
        NormalizedMean,
        TrimmedMean,
        WeightedMean,
    )
}


def make_rule(
    name: str,
    *,
    num_byzantine: int,
    before: Sequence[str | Mapping[str, Any]] = (),
    folders: Sequence[Path] = (),
    **parameters: Any,
) -> Rule:
    """The rule of that name.

    Parameters
    ----------
    name
        A key of ``RULES``, or ``module:name`` of a user's own: a function ``rule(x)`` from float32 (n, d) to (d,), or
        a class whose objects are such functions. Both are given ``num_byzantine`` if they take it, and
        ``parameters``; the function may take a :class:`RoundContext` as second argument.
    num_byzantine
        f, how many rows may be arbitrary. The number itself: n times a fraction often rounds to another.
    before
        Steps of pre-aggregation, the first of them first: keys of ``BEFORE``, or tables such as
        ``{"name": "bucketing", "size": 3}`` with a step's parameters.
    folders
        Where else to look for a user's module.
    parameters
        The rule's own.

    Raises
    ------
    ConfigError
        There is no such module, or nothing of that name in it.
    RuleError
        A name is unknown, or a parameter is unknown, missing or out of range, or a step cannot stand before the rule.
    """
    steps = [_make_step(step, num_byzantine) for step in _listed(before)]
    rule = _make_rule(name, num_byzantine, folders, parameters)
    return Composed(steps, rule) if steps else rule


def _make_rule(name: str, num_byzantine: int, folders: Sequence[Path], parameters: Mapping[str, Any]) -> Rule:
    if ":" in name:
        from common.aggregation.user_rule import load_user_rule  # most runs name no rule of their own

        return load_user_rule(name, num_byzantine=num_byzantine, folders=folders, parameters=parameters)
    if name not in RULES:
        hint = f"{name} goes before a rule: before = [{name!r}]" if name in BEFORE else nearest(name, list(RULES))
        raise RuleError(f"no aggregation rule {name!r}: {hint} or your own as module:name")
    check_parameters(name, RULES[name], parameters, provided={"num_byzantine"}, error=RuleError)
    return RULES[name](num_byzantine=num_byzantine, **parameters)


def _listed(before: object) -> Sequence[object]:
    if isinstance(before, str | Mapping) or not isinstance(before, Sequence):
        raise RuleError(f"before = {before!r}: expected a list of steps, such as ['bucketing']")
    return before


def _make_step(step: object, num_byzantine: int) -> Preparation:
    parameters = dict(step) if isinstance(step, Mapping) else {"name": step}
    name = parameters.pop("name", None)
    if not isinstance(name, str) or name not in BEFORE:
        hint = nearest(name, list(BEFORE)) if isinstance(name, str) else "expected a name, or a table with one"
        raise RuleError(f"before: no pre-aggregation {name!r}: {hint}")
    check_parameters(name, BEFORE[name], parameters, provided={"num_byzantine"}, error=RuleError)
    return BEFORE[name](num_byzantine=num_byzantine, **parameters)

"""The parameters a configuration gives to something it names: checked against what that thing takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from common.errors import UsageProblem, nearest

__all__ = ["check_parameters", "finite_number", "own_parameters", "taken_of"]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_parameters(
    owner: str,
    target: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    provided: Iterable[str] = (),
    error: type[UsageProblem],
) -> None:
    """Refuse a parameter that ``target`` does not take, or the lack of one it cannot do without.

    Parameters
    ----------
    owner
        What the message calls the target.
    given
        What the configuration gives.
    provided
        Parameters that the project gives, not the configuration.
    error
        The leaf to raise.
    """
    parameters = inspect.signature(target).parameters.values()
    own = {item.name: item for item in parameters if item.kind in _NAMED and item.name not in set(provided)}
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
    for name in given:
        if name not in own and not takes_any:
            hint = nearest(name, list(own)) if own else "it has none"
            raise error(f"{owner} has no parameter {name!r}: {hint}")
    missing = [name for name, item in own.items() if item.default is inspect.Parameter.empty and name not in given]
    if missing:
        raise error(f"{owner} needs {', '.join(missing)}")


def taken_of(target: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``available`` that ``target`` names, or all of them if it takes any keyword."""
    parameters = inspect.signature(target).parameters.values()
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters):
        return dict(available)
    names = {item.name for item in parameters if item.kind in _NAMED}
    return {name: value for name, value in available.items() if name in names}


def own_parameters(target: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters, which a configuration gives, and their defaults; ``Parameter.empty`` for none."""
    taken = inspect.signature(target).parameters.values()
    return {item.name: item.default for item in taken if item.kind is inspect.Parameter.KEYWORD_ONLY}


def finite_number(owner: str, name: str, value: object, *, error: type[UsageProblem]) -> float:
    """``value`` as a float, refused unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise error(f"{owner}: {name} = {value!r}: expected a finite number")
    return float(value)

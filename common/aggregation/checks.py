"""The parameters of rules: refused with what was expected of them."""

from __future__ import annotations

from common.errors import RuleError
from common.parameters import finite_number

__all__ = ["choice", "count", "positive"]


def positive(owner: str, name: str, value: object) -> float:
    number = finite_number(owner, name, value, error=RuleError)
    if number <= 0.0:
        raise RuleError(f"{owner}: {name} = {value!r}: expected a number above 0")
    return number


def count(owner: str, name: str, value: object, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RuleError(f"{owner}: {name} = {value!r}: expected an integer of at least {least}")
    return value


def choice(owner: str, name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise RuleError(f"{owner}: {name} = {value!r}: expected one of {', '.join(map(repr, known))}")
    return value

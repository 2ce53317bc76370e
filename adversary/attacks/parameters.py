"""The parameters of attacks: refused with what was expected of them."""

from __future__ import annotations

from adversary.attacks.attack import Setting
from common.errors import AttackError
from common.parameters import finite_number

__all__ = ["OPTIMISED", "choice", "count", "factor", "flag", "length", "non_negative", "number"]

OPTIMISED = "optimised"


def number(owner: str, name: str, value: object) -> float:
    return finite_number(owner, name, value, error=AttackError)


def non_negative(owner: str, name: str, value: object) -> float:
    given = number(owner, name, value)
    if given < 0.0:
        raise AttackError(f"{owner}: {name} = {value!r}: expected a number of at least 0")
    return given


def factor(owner: str, name: str, value: object) -> float | None:
    """A number; None where it is to be searched for."""
    if value == OPTIMISED:
        return None
    if isinstance(value, str):
        raise AttackError(f"{owner}: {name} = {value!r}: expected a finite number, or {OPTIMISED!r}")
    return number(owner, name, value)


def flag(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise AttackError(f"{owner}: {name} = {value!r}: expected true or false")
    return value


def choice(owner: str, name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise AttackError(f"{owner}: {name} = {value!r}: expected one of {', '.join(map(repr, known))}")
    return value


def count(owner: str, name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AttackError(f"{owner}: {name} = {value!r}: expected an integer of at least {least}")
    return value


def length(owner: str, name: str, value: object, setting: Setting) -> float:
    """A norm above 0; None is the clip norm."""
    if value is None:
        if setting.clip_norm is None:
            raise AttackError(f"{owner}: set attack.{name}: its default is training.clip_norm, and that is 'none'")
        return setting.clip_norm
    given = number(owner, name, value)
    if given <= 0.0:
        raise AttackError(f"{owner}: {name} = {value!r}: expected a number above 0")
    return given

"""Schedules: a value per round, fixed before round 0.

The learning rate and both momenta may change over the rounds, but only as public functions of the round number;
otherwise the privacy accounting would not hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic_core import core_schema

__all__ = ["Schedule", "parse_schedule"]

Kind = Literal["constant", "inverse_sqrt", "power", "list"]

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "inverse_sqrt": ("a", "b", "c"),
    "power": ("a", "c", "p"),
}

BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Schedule:
    """A value per round.

    ==============  =====================  ===========================================================
    kind            parameters             value in round t
    ==============  =====================  ===========================================================
    constant        value                  value
    inverse_sqrt    a, b, c                a / (b √(c t + 1))   (Fed-NGA, section 4)
    power           a, c, p                a / (t + c)^p        (the theory's decaying steps)
    list            the values             the t-th; the last one from there on
    ==============  =====================  ===========================================================
    """

    kind: Kind
    values: tuple[float, ...]
    clamp: bool = False

    def __call__(self, round_id: int) -> float:
        """The value in round ``round_id`` (0 is the first)."""
        value = self._raw(round_id)
        return min(max(value, 0.0), BELOW_ONE) if self.clamp else value

    def _raw(self, round_id: int) -> float:
        match self.kind:
            case "constant":
                return self.values[0]
            case "inverse_sqrt":
                a, b, c = self.values
                return a / (b * math.sqrt(c * round_id + 1))
            case "power":
                a, c, p = self.values
                return float(a / (round_id + c) ** p)
            case "list":
                return self.values[min(round_id, len(self.values) - 1)]

    def clamped(self) -> Schedule:
        """The same, held inside [0, 1), as a momentum must be."""
        return replace(self, clamp=True)

    def clamps_in(self, rounds: int) -> int:
        """In how many of the first ``rounds`` rounds clamping changes the value."""
        return sum(self(t) != self._raw(t) for t in range(rounds)) if self.clamp else 0

    def as_json(self) -> Any:
        if self.kind == "constant":
            return self.values[0]
        if self.kind == "list":
            return list(self.values)
        return {"kind": self.kind, **dict(zip(_PARAMETERS[self.kind], self.values, strict=True))}

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(cls.as_json)
        )


def parse_schedule(given: Any) -> Schedule:
    """A schedule from its configuration: a number, a list, or a table with ``kind`` and that kind's parameters.

    Raises
    ------
    ValueError
        Unknown kind, missing or unknown parameters, a value that is not finite, or one not defined in some round.
    """
    if isinstance(given, Schedule):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float | list | tuple | dict):
        raise ValueError("expected a number, a list of numbers, or a table such as {kind = 'inverse_sqrt', a = 1, …}")
    if isinstance(given, int | float):
        return Schedule("constant", (_number(given, "value"),))
    if isinstance(given, list | tuple):
        if not given:
            raise ValueError("expected at least one value in the list")
        return Schedule("list", tuple(_number(item, f"item {index}") for index, item in enumerate(given)))
    kind = given.get("kind")
    if kind not in _PARAMETERS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(_PARAMETERS)}, or a list of values")
    wanted = _PARAMETERS[kind]
    if set(given) != {"kind", *wanted}:
        raise ValueError(f"{kind} takes {', '.join(wanted)}; given: {', '.join(k for k in given if k != 'kind')}")
    values = tuple(_number(given[name], name) for name in wanted)
    if kind == "inverse_sqrt" and (values[1] == 0 or values[2] < 0):
        raise ValueError("inverse_sqrt needs b ≠ 0 and c ≥ 0")
    if kind == "power" and values[1] <= 0:
        raise ValueError("power needs c > 0, or round 0 has no value")
    return Schedule(kind, values)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r}: expected a finite number")
    return float(value)

"""Faults at random: the whole timeline is drawn before the run, from a seed, so that it can be had again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.config import Positive
from common.errors import ConfigError, nearest
from deploy.chaos.faults import KINDS, Fault, LinkFault, On
from deploy.chaos.moments import Moment, Span
from deploy.chaos.targets import links, processes

__all__ = ["Punisher", "drawn"]

_SHORTEST_S = 0.05


def _known_faults(value: Any) -> Any:
    for name in value if isinstance(value, list | tuple) else ():
        if name not in SEVERITY:
            raise ValueError(f"{name!r}: {nearest(str(name), list(SEVERITY))}")
    return value


class Punisher(BaseModel):
    """``[punisher]``: what may happen, how often, to whom.

    Attributes
    ----------
    mean_time_between_failures_s
        Of all failures together: the times between two are drawn from an exponential distribution with this mean.
    mean_time_to_repair_s
        How long a fault holds, drawn likewise.
    until_s
        No fault begins later; seconds after the first round, as all seconds of a timeline.
    faults
        Each is drawn with the same probability.
    on
        Each process that it names is drawn with the same probability. One that suffers already is spared meanwhile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seed: int = Field(default=0, ge=0)
    mean_time_between_failures_s: Positive = 5.0
    mean_time_to_repair_s: Positive = 2.0
    until_s: Positive = 60.0
    faults: Annotated[tuple[str, ...], BeforeValidator(_known_faults), Field(min_length=1)] = (
        "kill",
        "stop",
        "partition",
        "reset",
        "delay",
    )
    on: On = ("clients",)

    def scaled(self, seconds: float) -> Punisher:
        """The same for a run whose seconds are ``seconds`` as long."""
        return self.model_copy(
            update={
                name: getattr(self, name) * seconds
                for name in ("mean_time_between_failures_s", "mean_time_to_repair_s", "until_s")
            }
        )


# How bad a drawn fault is. Kinds whose effect nobody would notice, or that need preparations, are not drawn.
SEVERITY: dict[str, Callable[[random.Random], dict[str, float]]] = {
    "kill": lambda _: {},
    "restart": lambda _: {},
    "stop": lambda _: {},
    "partition": lambda _: {},
    "refuse": lambda _: {},
    "reset": lambda _: {},
    "squeeze": lambda draw: {"share": round(draw.uniform(0.05, 0.5), 2)},
    "delay": lambda draw: {"delay_ms": float(draw.randrange(20, 200)), "jitter_ms": float(draw.randrange(0, 20))},
    "rate": lambda draw: {"bytes_per_s": float(draw.randrange(10_000, 200_000))},
    "loss": lambda draw: {"fraction": round(draw.uniform(0.005, 0.1), 3)},
    "duplication": lambda draw: {"fraction": round(draw.uniform(0.005, 0.1), 3)},
    "reordering": lambda draw: {"fraction": round(draw.uniform(0.005, 0.1), 3)},
}


def drawn(punisher: Punisher, names: Sequence[str]) -> list[Fault]:
    """The timeline: the same for the same punisher and the same processes.

    Parameters
    ----------
    names
        All processes of the run.

    Raises
    ------
    ConfigError
        ``on`` names nobody, or the parameter server with nothing but faults of links.
    """
    draw = random.Random(punisher.seed)
    able = {kind: _targets(kind, punisher.on, names) for kind in punisher.faults}
    if not any(able.values()):
        raise ConfigError("[punisher]: none of its faults can be done to any of its processes")
    found: list[Fault] = []
    busy_until: dict[str, float] = {}
    now = draw.expovariate(1 / punisher.mean_time_between_failures_s)
    while now < punisher.until_s:
        kind = draw.choice(punisher.faults)
        lasting = max(_SHORTEST_S, draw.expovariate(1 / punisher.mean_time_to_repair_s))
        severity = SEVERITY[kind](draw)
        if free := [name for name in able[kind] if busy_until.get(name, 0.0) <= now]:
            name = draw.choice(free)
            busy_until[name] = now + lasting
            found.append(_fault(kind, name, now, lasting, severity))
        now += draw.expovariate(1 / punisher.mean_time_between_failures_s)
    return found


def _targets(kind: str, on: Sequence[str], names: Sequence[str]) -> list[str]:
    if issubclass(KINDS[kind], LinkFault):
        return list(dict.fromkeys(peer for peer, _ in links(on, names)))
    return list(processes(on, names))


def _fault(kind: str, name: str, at_s: float, lasting_s: float, severity: dict[str, float]) -> Fault:
    cls = KINDS[kind]
    length = {} if cls.momentary else {"for": Span("s", round(lasting_s, 3))}
    return cls.model_validate({"do": kind, "at": Moment("s", round(at_s, 3)), "on": name, **severity, **length})

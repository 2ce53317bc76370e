"""The faults that a scenario may name, as what stands in its file.

A fault of a *link* is a state of it, and becomes :class:`~deploy.chaos.backend.Conditions`; a fault of a *process* is
done to the process itself, wherever it runs.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.config import Number, Positive
from deploy.chaos.backend import Conditions
from deploy.chaos.moments import Moment, Span, parse_moment, parse_span

__all__ = [
    "KINDS",
    "AnyFault",
    "Clock",
    "DiskFull",
    "Fault",
    "Kill",
    "LinkFault",
    "ProcessFault",
    "Restart",
    "Squeeze",
    "Stop",
]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


At = Annotated[
    tuple[Annotated[Moment, BeforeValidator(parse_moment)], ...], BeforeValidator(_listed), Field(min_length=1)
]
On = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed), Field(min_length=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000)]


class Fault(BaseModel):
    """What all faults have.

    Attributes
    ----------
    at
        When; several moments are several faults.
    on
        Whom; see :mod:`deploy.chaos.targets`.
    lasting
        ``for`` in the file: how long, None to the run's end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    momentary: ClassVar[bool] = False

    do: str
    at: At
    on: On
    lasting: Annotated[Span | None, BeforeValidator(parse_span)] = Field(default=None, alias="for")

    def detail(self) -> str:
        """Its own parameters in words, for a timeline."""
        known = set(Fault.model_fields)
        return ", ".join(f"{key} = {value:g}" for key, value in self if key not in known and value)

    def scaled(self, rounds: float, seconds: float) -> Fault:
        """The same fault of a shorter run."""
        return self.model_copy(
            update={
                "at": tuple(moment.scaled(rounds, seconds) for moment in self.at),
                "lasting": None if self.lasting is None else self.lasting.scaled(rounds, seconds),
            }
        )

    @model_validator(mode="after")
    def _a_moment_has_no_length(self) -> Fault:
        if self.momentary and self.lasting is not None:
            raise ValueError(f"do = {self.do!r} happens at once: leave out 'for'")
        return self


class LinkFault(Fault):
    """A fault of links."""

    def conditions(self) -> Conditions:
        """What it does to a direction; nothing if it is momentary."""
        return Conditions()

    def needs(self) -> frozenset[str]:
        """The capabilities that a backend needs for it."""
        return self.conditions().needs()


class Delay(LinkFault):
    """Everything takes longer; by ``delay_ms ± jitter_ms`` in each direction that is named."""

    do: Literal["delay"]
    delay_ms: Milliseconds
    jitter_ms: Milliseconds = 0.0

    def conditions(self) -> Conditions:
        return Conditions(delay_s=self.delay_ms / 1000, jitter_s=self.jitter_ms / 1000)


class Loss(LinkFault):
    """Packets vanish."""

    do: Literal["loss"]
    fraction: Fraction

    def conditions(self) -> Conditions:
        return Conditions(loss=self.fraction)


class Duplication(LinkFault):
    """Packets arrive twice."""

    do: Literal["duplication"]
    fraction: Fraction

    def conditions(self) -> Conditions:
        return Conditions(duplication=self.fraction)


class Reordering(LinkFault):
    """Packets overtake those before them; there must be a delay to overtake."""

    do: Literal["reordering"]
    fraction: Fraction

    def conditions(self) -> Conditions:
        return Conditions(reordering=self.fraction)


class Rate(LinkFault):
    """A narrow line."""

    do: Literal["rate"]
    bytes_per_s: Positive

    def conditions(self) -> Conditions:
        return Conditions(rate_bytes_s=self.bytes_per_s)


class Partition(LinkFault):
    """Nothing passes, and nobody is told."""

    do: Literal["partition"]

    def conditions(self) -> Conditions:
        return Conditions(cut=True)


class Refuse(LinkFault):
    """New connections are refused."""

    do: Literal["refuse"]

    def conditions(self) -> Conditions:
        return Conditions(refuse=True)


class Reset(LinkFault):
    """The connections that exist are reset."""

    momentary: ClassVar[bool] = True
    do: Literal["reset"]

    def needs(self) -> frozenset[str]:
        return frozenset({"reset"})


class ProcessFault(Fault):
    """A fault of processes."""


class _OfTheLiving(ProcessFault):
    @model_validator(mode="after")
    def _needs_a_process(self) -> _OfTheLiving:
        if any(moment.unit == "start" for moment in self.at):
            raise ValueError(f'do = {self.do!r} needs a process that runs: at = "start" is before there is one')
        return self


class Kill(_OfTheLiving):
    """SIGKILL; with ``for`` it is started again after so long, from what it had written down."""

    do: Literal["kill"]


class Restart(_OfTheLiving):
    """SIGKILL, and started again at once."""

    momentary: ClassVar[bool] = True
    do: Literal["restart"]


class Stop(_OfTheLiving):
    """SIGSTOP; SIGCONT after ``for``."""

    do: Literal["stop"]


class Squeeze(ProcessFault):
    """Less of the processor: ``share`` of one core by a control group, or where that is not allowed nice 19."""

    do: Literal["squeeze"]
    share: Fraction


class Clock(ProcessFault):
    """The wall clock of these processes jumps by ``jump_s`` (and back after ``for``); no other clock does."""

    do: Literal["clock"]
    jump_s: Number


class DiskFull(_OfTheLiving):
    """The file system that holds the run folder is full: the parameter server's and the clients' states with it."""

    do: Literal["disk_full"]

    @model_validator(mode="after")
    def _of_the_run_folder(self) -> DiskFull:
        if self.on != ("ps",):
            raise ValueError('do = "disk_full" is of the run folder: on = "ps"')
        return self


AnyFault: TypeAlias = Annotated[
    Delay
    | Loss
    | Duplication
    | Reordering
    | Rate
    | Partition
    | Refuse
    | Reset
    | Kill
    | Restart
    | Stop
    | Squeeze
    | Clock
    | DiskFull,
    Field(discriminator="do"),
]

KINDS: dict[str, type[Fault]] = {
    kind.model_fields["do"].annotation.__args__[0]: kind  # type: ignore[union-attr]
    for kind in (
        Delay,
        Loss,
        Duplication,
        Reordering,
        Rate,
        Partition,
        Refuse,
        Reset,
        Kill,
        Restart,
        Stop,
        Squeeze,
        Clock,
        DiskFull,
    )
}
"""Every fault by its name in a scenario."""

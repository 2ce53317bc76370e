"""A scenario: an experiment, and what is done to it.

A scenario is a TOML file. ``[scenario]`` names an experiment and what must hold at the end, each ``[[fault]]`` is a
fault with its moment, ``[punisher]`` draws more at random, ``[quick]`` says how the same is done in seconds. It is
checked like an experiment: an unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config import Experiment, Positive, load_experiment
from common.errors import ConfigError, exit_code_of, nearest
from deploy.chaos.faults import KINDS, AnyFault, Fault
from deploy.chaos.punisher import Punisher, drawn

__all__ = ["Loaded", "Scenario", "load_scenario", "ready_scenarios"]

QUICK = (
    "data.dataset=deploy.chaos.toy:clouds",
    "data.partition=iid",
    "model.name=logistic",
    "training.batch_size=8",
    "evaluation.every=10",
)
"""What ``--quick`` makes of any experiment: a small model on data that need no file."""
QUICK_DEADLINE_S = 120.0


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Terms(_Section):
    """``[scenario]``: what is run, and when it has passed."""

    experiment: str = Field(min_length=1, description="a ready experiment, or a TOML file (beside the scenario)")
    set: tuple[str, ...] = Field(default=(), description="section.key=value, applied to the experiment")
    status: tuple[str, ...] = Field(default=("completed",), min_length=1, description="final statuses that pass")
    accuracy_within: float = Field(
        default=0.05, ge=0, le=1, description="how far the final accuracy may lie below the undisturbed run's"
    )
    deadline_s: Positive = Field(default=1800.0, description="each of the two runs has ended after so long")
    disk_mb: int = Field(default=64, ge=8, le=1 << 20, description="size of the run folder's own file system")


class Quick(_Section):
    """``[quick]``: the scenario in seconds."""

    rounds: int = Field(ge=1, description="T; rounds in the timeline shrink alike")
    seconds: float = Field(default=0.1, gt=0, le=1, description="seconds in the timeline are multiplied by this")
    set: tuple[str, ...] = ()


class Scenario(_Section):
    """The file."""

    scenario: Terms
    fault: tuple[AnyFault, ...] = ()
    punisher: Punisher | None = None
    quick: Quick | None = None


class Loaded(_Section):
    """A scenario ready to be played.

    Attributes
    ----------
    name, about
        Of the file: its stem, and its first line.
    faults
        Those of the file; the punisher's come with :meth:`faults_of`, once it is known who takes part.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: str
    about: str
    quick: bool
    experiment: Experiment
    terms: Terms
    faults: tuple[Fault, ...]
    punisher: Punisher | None

    def faults_of(self, names: Sequence[str]) -> tuple[Fault, ...]:
        """All faults of a run with these processes."""
        return (*self.faults, *(drawn(self.punisher, names) if self.punisher is not None else ()))


def ready_scenarios() -> dict[str, Path]:
    """The scenarios that ship with the project, by name."""
    folder = resources.files("deploy") / "chaos" / "scenarios"
    return {Path(str(item)).stem: Path(str(item)) for item in folder.iterdir() if str(item).endswith(".toml")}


def load_scenario(
    source: str, *, quick: bool = False, overrides: Iterable[str] = (), seed: int | None = None
) -> Loaded:
    """Read a scenario from a TOML file, or by the name of a ready one.

    Parameters
    ----------
    quick
        Play it in seconds, with a small model.
    overrides
        ``section.key=value`` assignments to the experiment; they come last.
    seed
        Another seed of the punisher.

    Raises
    ------
    ConfigError
        The file is missing or not TOML, a key is unknown, a value is out of range, or the experiment will not do.
    """
    path = _path_of(source)
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid TOML: {problem}") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None
    try:
        read = Scenario.model_validate(tree)
    except ValidationError as problem:
        raise ConfigError(f"{path}:\n" + "\n".join(f"  {_explain(item, tree)}" for item in problem.errors())) from None
    for status in read.scenario.status:
        _refuse_unknown(status, path)
    terms, faults, punisher, assignments = read.scenario, read.fault, read.punisher, list(read.scenario.set)
    if seed is not None:
        if punisher is None:
            raise ConfigError(f"--seed {seed}: {path} has no [punisher], so nothing in it is drawn")
        punisher = punisher.model_copy(update={"seed": seed})
    if not quick:
        experiment = load_experiment(_beside(path, terms.experiment), [*assignments, *overrides])
        shrunk: tuple[Fault, ...] = faults
    else:
        if read.quick is None:
            raise ConfigError(f"--quick: {path} has no [quick] section; add one with rounds = 30, for instance")
        planned = load_experiment(_beside(path, terms.experiment), assignments).training.rounds
        short = [f"training.rounds={read.quick.rounds}", *read.quick.set]
        experiment = load_experiment(_beside(path, terms.experiment), [*assignments, *QUICK, *short, *overrides])
        ratio = read.quick.rounds / planned
        shrunk = tuple(fault.scaled(ratio, read.quick.seconds) for fault in faults)
        punisher = None if punisher is None else punisher.scaled(read.quick.seconds)
        terms = terms.model_copy(update={"deadline_s": max(QUICK_DEADLINE_S, terms.deadline_s * read.quick.seconds)})
    return Loaded(
        name=path.stem,
        about=next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), ""),
        quick=quick,
        experiment=experiment,
        terms=terms,
        faults=shrunk,
        punisher=punisher,
    )


def _path_of(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    known = ready_scenarios()
    if source not in known:
        raise ConfigError(f"no scenario {source!r}: give a TOML file's path or one of {', '.join(sorted(known))}")
    return known[source]


def _beside(path: Path, experiment: str) -> str | Path:
    near = path.parent / experiment
    return near if near.is_file() else experiment


def _refuse_unknown(status: str, path: Path) -> None:
    try:
        exit_code_of(status)
    except KeyError:
        statuses = ["completed", "budget_exhausted", "quorum_lost", "failed"]
        raise ConfigError(f"{path}: scenario.status = {status!r}: {nearest(status, statuses)}") from None


# ---------------------------------------------------------------- saying what is wrong


_SECTIONS: Mapping[str, type[BaseModel]] = {"scenario": Terms, "punisher": Punisher, "quick": Quick}


def _explain(item: Any, tree: Mapping[str, Any]) -> str:
    """One problem that pydantic found, in the words of the file."""
    location = [part for part in item["loc"] if part not in KINDS]  # it names the fault's kind among the keys
    where = _where(location)
    match item["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key; {nearest(str(location[-1]), _known(location, tree))}"
        case "missing":
            return f"{where}: missing"
        case "union_tag_not_found":
            return f"{where}: missing do; one of {', '.join(KINDS)}"
        case "union_tag_invalid":
            given = item["ctx"]["tag"]
            return f"{where}: do = {given!r}: {nearest(str(given), list(KINDS))}"
    message = item["msg"].removeprefix("Value error, ")
    given = item["input"]
    return f"{where}: {message}" if isinstance(given, dict) else f"{where} = {given!r}: {message}"


def _where(location: Sequence[str | int]) -> str:
    """``fault 2: jitter_ms``: people count from one."""
    if location[:1] == ["fault"] and len(location) > 1:
        rest = ".".join(str(part) for part in location[2:])
        return f"fault {int(location[1]) + 1}" + (f": {rest}" if rest else "")
    return ".".join(str(part) for part in location)


def _known(location: Sequence[str | int], tree: Mapping[str, Any]) -> list[str]:
    section: type[BaseModel] | None = Scenario
    if location[0] == "fault":
        section = KINDS.get(tree["fault"][location[1]].get("do", ""))
    elif len(location) > 1:
        section = _SECTIONS.get(str(location[0]))
    return [field.alias or name for name, field in section.model_fields.items()] if section is not None else []

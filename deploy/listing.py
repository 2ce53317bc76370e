"""``byzuldp list``: everything that an experiment can name, one line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

__all__ = ["Item", "items_of", "list_"]


@dataclass(frozen=True)
class Item:
    """Something that a configuration can name.

    Attributes
    ----------
    about
        One sentence.
    parameters
        Its own keys and their defaults; ``"required"`` where there is none.
    facts
        What else there is to know, by name.
    """

    name: str
    about: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def line(self, width: int) -> str:
        """For people."""
        given = ", ".join(
            name if value == "required" else f"{name}={value!r}" for name, value in self.parameters.items()
        )
        rest = [*([f"parameters: {given}"] if given else []), *(f"{name}: {fact}" for name, fact in self.facts.items())]
        return f"{self.name:<{width}}  {self.about}" + (f"  [{'; '.join(rest)}]" if rest else "")


def list_(
    kind: Annotated[str | None, typer.Argument(help="What to list; without it, the kinds are named.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List what an experiment can name: attacks, misbehaviours, rules, models, datasets, experiments, scenarios."""
    import json

    if kind is None:
        typer.echo("\n".join(_KINDS))
        return
    items = items_of(kind)
    if as_json:
        typer.echo(json.dumps([vars(item) for item in items], indent=2, default=str))
        return
    width = max(len(item.name) for item in items)
    for item in items:
        typer.echo(item.line(width))


def items_of(kind: str) -> list[Item]:
    """What there is of a kind, in the order of the names.

    Raises
    ------
    ConfigError
        There is no such kind.
    """
    from common.errors import ConfigError, nearest

    if kind not in _KINDS:
        raise ConfigError(f"byzuldp list {kind}: {nearest(kind, list(_KINDS))}")
    return _KINDS[kind]()


def _attacks() -> list[Item]:
    from adversary.attacks import describe_attacks

    return [
        Item(attack.name, attack.line, attack.parameters, {"needs": attack.needs, "source": attack.source})
        for attack in describe_attacks()
    ]


def _misbehaviours() -> list[Item]:
    from adversary.misbehaviour import MISBEHAVIOURS

    return [Item(name, _sentence(kind), _parameters(kind)) for name, kind in sorted(MISBEHAVIOURS.items())]


def _rules() -> list[Item]:
    from common.aggregation import BEFORE, RULES

    rules = [Item(name, _sentence(rule), _parameters(rule)) for name, rule in sorted(RULES.items())]
    steps = [
        Item(name, _sentence(step), _parameters(step), {"goes": "before a rule"})
        for name, step in sorted(BEFORE.items())
    ]
    return rules + steps


def _models() -> list[Item]:
    from common.learning.models import MODELS

    return [Item(name, _sentence(builder)) for name, builder in sorted(MODELS.items())]


def _datasets() -> list[Item]:
    from common.learning.readers import DATASETS

    return [Item(name, about) for name, about in DATASETS.items()]


def _experiments() -> list[Item]:
    from common.config import ready_experiments

    return _files(ready_experiments())


def _scenarios() -> list[Item]:
    from deploy.chaos.scenario import ready_scenarios

    return _files(ready_scenarios())


_KINDS: dict[str, Callable[[], list[Item]]] = {
    "attacks": _attacks,
    "misbehaviours": _misbehaviours,
    "rules": _rules,
    "models": _models,
    "datasets": _datasets,
    "experiments": _experiments,
    "scenarios": _scenarios,
}


_GIVEN_BY_US = ("num_byzantine", "weights")
"""From ``[federation]``, not from the section of what is listed."""


def _files(known: Mapping[str, Any]) -> list[Item]:
    """TOML files say what they are in their first comment."""
    lines = {name: path.read_text(encoding="utf-8").splitlines() for name, path in known.items()}
    return [
        Item(name, next((line.lstrip("# ") for line in lines[name] if line.startswith("#")), ""))
        for name in sorted(lines)
    ]


def _sentence(target: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(target) or "").split("\n\n")[0].split())


def _parameters(target: Callable[..., Any]) -> dict[str, Any]:
    """Those that a configuration gives, and their defaults."""
    from common.parameters import own_parameters

    return {
        name: "required" if default is inspect.Parameter.empty else default
        for name, default in own_parameters(target).items()
        if name not in _GIVEN_BY_US
    }

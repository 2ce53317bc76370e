"""The runs of a sweep: a base experiment, and every way its grid changes it."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from common.config import Experiment, experiment_from
from common.errors import ConfigError

__all__ = ["Axis", "Point", "key_of", "points_of", "shown"]

_ELSEWHERE = ("folder", "network", "client", "monitoring")
_ITS_OWN = {"data": ("root",), "federation": ("clients_per_process",)}


@dataclass(frozen=True)
class Axis:
    """What varies together: each choice gives every one of the keys a value.

    Attributes
    ----------
    keys
        Dotted configuration keys, or names of whole sections.
    choices
        One tuple of values per choice.
    """

    keys: tuple[str, ...]
    choices: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes
    ----------
    index
        Its place in the whole grid, from 0.
    key
        16 hex digits of the SHA-256 of its effective configuration: see :func:`key_of`.
    values
        What the grid set, by key.
    experiment
        The effective configuration.
    """

    index: int
    key: str
    values: Mapping[str, Any]
    experiment: Experiment = field(repr=False)

    @property
    def name(self) -> str:
        """For people: what was set."""
        return ", ".join(f"{key.rpartition('.')[2]}={shown(value)}" for key, value in self.values.items()) or "base"


def key_of(experiment: Experiment) -> str:
    """What two runs have in common exactly when they are the same simulation, wherever and by whom it is run.

    So neither paths of a machine, nor anything about processes and the network, are part of it.
    """
    tree = experiment.model_dump(mode="json", exclude=set(_ELSEWHERE))
    for section, names in _ITS_OWN.items():
        for name in names:
            tree[section].pop(name, None)
    return sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def points_of(base: Mapping[str, Any], axes: Sequence[Axis], *, where: str) -> list[Point]:
    """All runs, the last axis varying fastest.

    Parameters
    ----------
    base
        The base experiment as a tree.
    where
        The sweep file, for messages.

    Raises
    ------
    ConfigError
        A run's configuration is invalid, or two runs are the same.
    """
    points: list[Point] = []
    by_key: dict[str, Point] = {}
    for index, values in enumerate(_combinations(axes)):
        tree = copy.deepcopy(dict(base))
        for key, value in values.items():
            _set(tree, key, value, where)
        described = ", ".join(f"{key} = {shown(value)}" for key, value in values.items()) or "the base experiment"
        experiment = experiment_from(tree, where=f"{where}: run {index} ({described})")
        point = Point(index, key_of(experiment), values, experiment)
        if (same := by_key.get(point.key)) is not None:
            raise ConfigError(
                f"{where}: runs {same.index} ({same.name}) and {index} ({point.name}) are the same experiment: what "
                "differs between them has no effect; leave one of the values out"
            )
        by_key[point.key] = point
        points.append(point)
    return points


def shown(value: Any) -> str:
    """A value as a cell of a table: text as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _combinations(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*(axis.choices for axis in axes)):
        yield {
            key: value
            for axis, values in zip(axes, chosen, strict=True)
            for key, value in zip(axis.keys, values, strict=True)
        }


def _set(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """A value, or a whole section, in place."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{where}: {key}: {section} is a value, not a section")
    tree[name] = copy.deepcopy(value)

"""``SWEEP.toml``: which runs, what to choose among them, and what to draw.

::

    experiment = "mnist"                       # a ready experiment, or a TOML file beside this one

    [set]                                      # for every run
    "training.rounds" = 50

    [grid]                                     # every combination
    "aggregation.rule" = ["mean", "trimmed_mean"]
    "attack" = [{ name = "none" }, { name = "alie", knowledge = "omniscient" }]   # or a whole section
    "training.learning_rate" = [0.1, 0.3, 1.0]
    "training.seed" = [0, 1, 2]

    [[zip]]                                    # together: the first of each, the second of each, …
    "training.client_momentum" = [0.0, 0.9]
    "training.server_momentum" = [0.9, 0.0]

    [select]                                   # the best over a part of the grid, on average over seeds
    over = ["training.learning_rate"]
    by = "accuracy_last"

    [plot]
    x = "training.learning_rate"
    y = "accuracy_last"
    lines = ["aggregation.rule"]
    panels = ["attack"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from common.config import load_experiment, named_toml, with_overrides
from common.errors import ConfigError, nearest
from deploy.sweep.points import Axis, Point, points_of, shown
from deploy.sweep.results import MEASURES

__all__ = ["Plan", "Plot", "Select", "load_plan", "ready_sweeps"]

SEEDS = ("training.seed", "privacy.noise_seed")
_TOP = ("experiment", "set", "grid", "zip", "select", "plot")
LARGEST = 100_000


@dataclass(frozen=True)
class Select:
    """The best over some keys, on average over the seeds, for each combination of the others."""

    over: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class Plot:
    """One curve per combination of ``lines``, one picture per combination of ``panels``, over everything else."""

    x: str
    y: str
    lines: tuple[str, ...]
    panels: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A sweep as it was asked for.

    Attributes
    ----------
    name
        The file's.
    keys
        What varies, in the order of the file: columns of the table.
    """

    name: str
    source: Path
    keys: tuple[str, ...]
    points: tuple[Point, ...]
    select: Select | None
    plot: Plot | None

    @property
    def seeds(self) -> tuple[str, ...]:
        """The keys that are averaged over."""
        return tuple(key for key in self.keys if key in SEEDS)


def ready_sweeps() -> dict[str, Path]:
    """The sweeps that ship with the project, by name."""
    root = Path(str(resources.files("deploy") / "sweeps"))
    return {path.stem: path for path in sorted(root.glob("*.toml"))}


def load_plan(source: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Read a sweep from a TOML file, or by the name of a ready one.

    Parameters
    ----------
    overrides
        ``section.key=value`` assignments for every run, over the file's own ``[set]``.

    Raises
    ------
    ConfigError
        The file is missing or not TOML; a key is unknown, a list empty or with a value twice; a run's configuration is
        invalid; or what is chosen or drawn is not in the grid.
    """
    path, tree = named_toml("sweep", source, ready_sweeps)
    where = str(path)
    _refuse_unknown(tree, _TOP, where, "")
    axes = _axes(tree, where)
    number = 1
    for axis in axes:
        number *= len(axis.choices)
    if number > LARGEST:
        raise ConfigError(f"{where}: {number:,} runs: expected at most {LARGEST:,}; split the sweep")
    keys = tuple(key for axis in axes for key in axis.keys)
    points = points_of(_base(tree, path, overrides, keys, where), axes, where=where)
    return Plan(
        name=path.stem,
        source=path,
        keys=keys,
        points=tuple(points),
        select=_select(tree, keys, where),
        plot=_plot(tree, keys, points, where),
    )


def _base(
    tree: Mapping[str, Any], path: Path, overrides: Sequence[str], keys: Sequence[str], where: str
) -> dict[str, Any]:
    """The base experiment with ``[set]`` and the overrides, not yet validated with the grid's values."""
    named = tree.get("experiment")
    if not isinstance(named, str) or not named:
        raise ConfigError(f'{where}: experiment is missing: name a ready one or a TOML file, as experiment = "mnist"')
    beside = path.parent / named
    settings = _flat(_table(tree, "set", where))
    for key in settings:
        if clash := [swept for swept in keys if swept == key or swept.startswith(f"{key}.")]:
            raise ConfigError(f"{where}: {clash[0]} is in [set] and varies too: leave it in one place")
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in keys:
            raise ConfigError(f"--set {override}: {key} varies in {where}; change the file, or take it out of the grid")
    experiment = load_experiment(beside if beside.is_file() else named)
    base = experiment.model_dump(mode="json", exclude_unset=True)
    for key, value in settings.items():
        *sections, name = key.split(".")
        inside = base
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return with_overrides(base, overrides)


def _axes(tree: Mapping[str, Any], where: str) -> list[Axis]:
    axes, seen = [], set[str]()
    groups: list[tuple[str, Mapping[str, Any], bool]] = [("grid", _table(tree, "grid", where), False)]
    zipped = tree.get("zip", [])
    if not isinstance(zipped, list) or not all(isinstance(group, dict) for group in zipped):
        raise ConfigError(f"{where}: zip: expected tables headed [[zip]], each a group of lists of one length")
    groups += [(f"zip {number}", group, True) for number, group in enumerate(zipped, start=1)]
    for name, group, together in groups:
        lists = _lists(_flat(group), f"{where}: {name}")
        for key in lists:
            if key in seen:
                raise ConfigError(f"{where}: {key} varies in two places: leave it in one")
            seen.add(key)
        if not together:
            axes += [Axis((key,), tuple((value,) for value in values)) for key, values in lists.items()]
            continue
        lengths = {key: len(values) for key, values in lists.items()}
        if len(set(lengths.values())) != 1 or len(lists) < 2:
            told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise ConfigError(
                f"{where}: {name}: expected two lists or more, all of one length; {told or 'there are none'}"
            )
        axes.append(Axis(tuple(lists), tuple(zip(*lists.values(), strict=True))))
    if not axes:
        raise ConfigError(f'{where}: nothing varies: give [grid] a key with a list, as "training.seed" = [0, 1, 2]')
    for key in seen:
        if inside := [other for other in seen if other.startswith(f"{key}.")]:
            raise ConfigError(f"{where}: {key} is a whole section, and {inside[0]} in it varies too: leave one of them")
    return axes


def _lists(group: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
    for key, values in group.items():
        if not isinstance(values, list):
            raise ConfigError(
                f"{where}: {key} = {shown(values)}: expected a list of values; what is the same for all runs goes to "
                "[set]"
            )
        if not values:
            raise ConfigError(f"{where}: {key} = []: expected at least one value, or leave the key out")
        texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
        if twice := [text for number, text in enumerate(texts) if text in texts[:number]]:
            raise ConfigError(f"{where}: {key} lists {twice[0]} twice: leave one of them out")
    return dict(group)


def _flat(group: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"training": {"seed": […]}}``, as TOML gives an unquoted dotted key, and ``{"training.seed": […]}`` alike."""
    flat: dict[str, Any] = {}
    for key, value in group.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _select(tree: Mapping[str, Any], keys: Sequence[str], where: str) -> Select | None:
    if "select" not in tree:
        return None
    given = _table(tree, "select", where)
    _refuse_unknown(given, ("over", "by"), where, "select.")
    over = _names(given.get("over"), "select.over", keys, where)
    if not over:
        raise ConfigError(f"{where}: select.over is missing: the keys whose best value is wanted, of {', '.join(keys)}")
    if seeds := [key for key in over if key in SEEDS]:
        raise ConfigError(f"{where}: select.over = {seeds[0]}: seeds are averaged over, not chosen among")
    return Select(over, _measure(given.get("by", "accuracy_last"), "select.by", where))


def _plot(tree: Mapping[str, Any], keys: Sequence[str], points: Sequence[Point], where: str) -> Plot | None:
    given = _table(tree, "plot", where)
    _refuse_unknown(given, ("x", "y", "lines", "panels"), where, "plot.")
    y = _measure(given.get("y", "accuracy_last"), "plot.y", where)
    varying = [key for key in keys if key not in SEEDS]
    if "x" in given:
        (x,) = _names([given["x"]], "plot.x", keys, where)
    else:
        numeric = [key for key in varying if len({shown(p.values[key]) for p in points}) > 1 and _numbers(points, key)]
        if not numeric:
            return None
        x = numeric[0]
    rest = tuple(key for key in varying if key != x)
    panels = _names(given.get("panels", []), "plot.panels", keys, where)
    lines = _names(given["lines"], "plot.lines", keys, where) if "lines" in given else None
    lines = tuple(key for key in rest if key not in panels) if lines is None else lines
    return Plot(x, y, lines, panels)


def _numbers(points: Sequence[Point], key: str) -> bool:
    return all(isinstance(point.values[key], int | float) for point in points)


def _names(given: Any, what: str, keys: Sequence[str], where: str) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{where}: {what} = {shown(given)}: expected a list of keys that vary")
    for name in given:
        if name not in keys:
            raise ConfigError(f"{where}: {what}: {name!r} does not vary; {nearest(name, list(keys))}")
    return tuple(given)


def _measure(given: Any, what: str, where: str) -> str:
    if given not in MEASURES:
        raise ConfigError(f"{where}: {what} = {given!r}; {nearest(str(given), list(MEASURES))}")
    return str(given)


def _table(tree: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = tree.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {name} = {shown(found)}: expected a table, [{name}]")
    return found


def _refuse_unknown(tree: Mapping[str, Any], known: Sequence[str], where: str, prefix: str) -> None:
    for key in tree:
        if key not in known:
            raise ConfigError(f"{where}: {prefix}{key}: unknown key; {nearest(key, list(known))}")

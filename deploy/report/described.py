"""What was run: the command that starts the same run, and how configurations differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.config import Experiment, load_experiment, ready_experiments
from common.errors import ByzULDPError
from deploy.toml import to_toml

__all__ = ["MACHINE", "command_of", "differences", "flat", "shown_publicly"]

MACHINE = (
    "network",
    "client",
    "monitoring",
    "folder",
    "data.root",
    "model.init_from",
    "training.device",
    "privacy.previous",
)
"""What belongs to somebody's machine, as sections or keys: not for the public."""

_MOST_CHANGES = 12
_UNSET = object()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``section.key`` to JSON value."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            values[prefix + key] = value
    return values


def shown_publicly(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration without what belongs to a machine."""
    return {key: value for key, value in configuration.items() if _public(key)}


def command_of(experiment: Experiment, *, public: bool = False) -> tuple[str, str]:
    """A command that starts a run of this experiment, and the TOML file it names ("" where it names none).

    The nearest ready experiment with a few changes where that is the same configuration, else the configuration as a
    file. In public, settings of a machine are left out of both.
    """
    shows = _public if public else _everything
    wanted = {key: value for key, value in _tree(experiment).items() if shows(key)}
    best: tuple[int, str] | None = None
    for name in ready_experiments():
        changes = _changes(name, wanted, shows)
        if changes is not None and (best is None or len(changes) < best[0]):
            words = ["byzuldp", "run", name, *(word for change in changes for word in ("--set", change))]
            best = len(changes), shlex.join(words)
    if best is not None:
        return best[1], ""
    return "byzuldp run experiment.toml", to_toml(_nested(wanted))


def differences(configurations: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys that do not have the same value everywhere, and their values; None where a key is missing."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    return {
        key: [configuration.get(key) for configuration in configurations]
        for key in keys
        if any(configuration.get(key, _UNSET) != configurations[0].get(key, _UNSET) for configuration in configurations)
    }


def _public(key: str) -> bool:
    return not any(key == name or key.startswith(f"{name}.") for name in MACHINE)


def _everything(_key: str) -> bool:
    return True


def _tree(experiment: Experiment) -> dict[str, Any]:
    tree = experiment.model_dump(mode="json")
    del tree["folder"]  # where an experiment's file lies is not part of what it says
    return flat(tree)


def _changes(name: str, wanted: Mapping[str, Any], shows: Callable[[str], bool]) -> list[str] | None:
    """``section.key=value`` assignments that make a ready experiment this one, as far as it shows; None: there are
    none, or too many."""
    try:
        ready = _tree(load_experiment(name))
        changes = [
            f"{key}={_assigned(value)}"
            for key, value in wanted.items()
            if value is not None and ready.get(key, _UNSET) != value
        ]
        if len(changes) > _MOST_CHANGES:
            return None
        made = _tree(load_experiment(name, changes))
    except ByzULDPError:
        return None
    return changes if {key: value for key, value in made.items() if shows(key)} == wanted else None


def _assigned(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_assigned, value))}]"
    return json.dumps(value, ensure_ascii=False)  # TOML writes these alike


def _nested(configuration: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in configuration.items():
        if value is None:
            continue
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree

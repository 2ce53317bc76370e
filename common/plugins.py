"""A user's own rule, attack, model or data set, named ``module:name`` in the configuration.

The experiment's folder and the working directory are *appended* to the import path, so nothing there can shadow a
module that is installed. Specifications come from the user's own configuration, never from the wire.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError, nearest

__all__ = ["is_plugin", "load_plugin"]

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SPEC = re.compile(rf"({_DOTTED}):({_DOTTED})")


def is_plugin(name: str) -> bool:
    """Whether a configured name is ``module:name``, rather than the name of something that ships with the project."""
    return ":" in name


def load_plugin(spec: str, folders: Sequence[Path] = ()) -> Any:
    """The object that ``module:name`` names.

    Parameters
    ----------
    spec
        ``module:name``; both may be dotted.
    folders
        Where to look when no installed module has that name, first to last (the experiment file's folder); the
        working directory comes after them.

    Raises
    ------
    ConfigError
        The specification is malformed, the module is not found or fails on import, or it has no such name.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ConfigError(f"{spec!r}: expected module:name, for instance my_models:small_net")
    module_name, attributes = match.groups()
    looked_in = _append_to_path(folders)
    module = _import(module_name, spec, looked_in)
    found: Any = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(
                f"{spec!r}: {_where(module)} has no {attribute!r}; {nearest(attribute, public)} "
                f"If this is not your file, rename yours: installed modules come first."
            )
        found = getattr(found, attribute)
    return found


def _append_to_path(folders: Sequence[Path]) -> list[str]:
    wanted = [str(Path(folder).resolve()) for folder in (*folders, Path.cwd())]
    for folder in wanted:
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()  # a file written a moment ago counts
    return list(dict.fromkeys(wanted))


def _import(module_name: str, spec: str, looked_in: list[str]) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        missing = problem.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"{spec!r}: no module {missing!r}, neither installed nor in {', '.join(looked_in)}; "
                f"put {module_name.replace('.', '/')}.py beside the experiment file"
            ) from None
        raise ConfigError(f"{spec!r}: importing {module_name} needs {missing!r}, which is not installed") from problem
    except Exception as problem:  # whatever a user's file does on import is the user's to read
        raise ConfigError(f"{spec!r}: importing {module_name} failed: {type(problem).__name__}: {problem}") from problem


def _where(module: ModuleType) -> str:
    return f"module {module.__name__} ({getattr(module, '__file__', None) or 'built in'})"

"""Are the packages that would be imported the ones of this distribution?

``common``, ``ps``, ``client``, ``adversary`` and ``deploy`` are generic names: a folder ``common`` on PYTHONPATH, or in
the folder ``python -m`` is started from, would be imported in place of ours. Entry points ask here first, before
anything else of ours is imported, so that the user reads which file is in the way instead of a strange ImportError.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PACKAGES", "shadowed"]

PACKAGES = ("common", "ps", "client", "adversary", "deploy")

_ROOT = Path(__file__).resolve().parent.parent


def shadowed(packages: Sequence[str] = PACKAGES, root: Path = _ROOT) -> list[str]:
    """One sentence per package that would come from elsewhere; empty when all is well.

    Parameters
    ----------
    packages
        Top-level names; none of them is imported.
    root
        The folder all of them must lie in; by default the one this module was imported from.
    """
    problems = []
    for name in packages:
        found = _location(name)
        expected = root / name / "__init__.py"
        if found is None:
            problems.append(f"package {name!r} of byzuldp is missing: expected {expected}; install byzuldp again")
        elif found != expected:
            problems.append(
                f"package {name!r} would come from {found}, not from byzuldp's {expected}: rename that file, start "
                "from another folder, or take its folder off PYTHONPATH"
            )
    return problems


def _location(name: str) -> Path | None:
    """The file or folder that ``import name`` would read."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module put into sys.modules by hand, without a spec
        return None
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or [])  # a folder without __init__.py
    return Path(folders[0]).resolve() if folders else None

"""Writing an experiment as TOML (the standard library only reads it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["string", "to_toml"]


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML of nested dictionaries with JSON values; None, which TOML does not have, is left out.

    Parameters
    ----------
    tree
        Plain values and sections; inside a section plain values, lists and tables.
    """
    sections = {name: content for name, content in tree.items() if isinstance(content, dict)}
    plain = {key: value for key, value in tree.items() if key not in sections}
    lines = _assignments(plain)
    for name, content in sections.items():
        if inside := _assignments(content):
            lines += ["", f"[{_key(name)}]", *inside]
    return "\n".join(lines).strip() + "\n"


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None and value != {}]


def _value(value: Any) -> str:
    match value:
        case dict():
            return f"{{{', '.join(_assignments(value))}}}"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case str():
            return string(value)
        case _:
            return json.dumps(value)  # numbers and booleans are written alike


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else string(name)


def string(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

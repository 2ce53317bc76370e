"""The join tokens of ``operator/join_tokens.json``, as a client's process is given them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError

__all__ = ["tokens_of"]


def tokens_of(path: Path, ids: Iterable[int]) -> dict[int, str]:
    """The join tokens of these identities.

    Raises
    ------
    ConfigError
        The file cannot be read, is not a JSON object of strings, or lacks one.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--tokens {path}: cannot be read ({problem}); expected a JSON file") from None
    if not isinstance(stored, dict) or not all(isinstance(value, str) for value in stored.values()):
        raise ConfigError(f'--tokens {path}: expected {{"0": "token", …}}')
    wanted = list(ids)
    if missing := [str(client_id) for client_id in wanted if str(client_id) not in stored]:
        raise ConfigError(f"--tokens {path}: no token of {', '.join(missing[:10])}{' …' if missing[10:] else ''}")
    return {client_id: stored[str(client_id)] for client_id in wanted}

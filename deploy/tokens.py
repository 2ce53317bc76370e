"""The join tokens of ``operator/join_tokens.json``, as a client's process is given them, and what they say of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError
from ps.tokens import TOKENS

__all__ = ["refuse_others_clients", "tokens_of"]


def refuse_others_clients(run_dir: Path) -> None:
    """A run whose clients are elsewhere must not go on with others made here: they would spend its budget.

    Raises
    ------
    ConfigError
        The run was started by ``byzuldp ps``, which hands its join tokens out.
    """
    if (run_dir / "operator" / TOKENS).exists():
        raise ConfigError(
            f"{run_dir}: started by `byzuldp ps`, so its clients are elsewhere: go on with `byzuldp ps --resume "
            f"--run-dir {run_dir}`"
        )


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

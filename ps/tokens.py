"""Join tokens: one secret per identity, of which the parameter server keeps the hash."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from common.errors import StoreDamaged
from ps.durable import explaining

__all__ = ["TOKENS", "issue_tokens", "load_hashes", "save_hashes"]

HASHES, TOKENS = "join_token_hashes.json", "join_tokens.json"


def issue_tokens(folder: Path, identities: Iterable[int]) -> dict[int, bytes]:
    """Make a token for each identity, write them to ``folder`` (mode 0600), and return their hashes."""
    tokens = {client_id: secrets.token_urlsafe(24) for client_id in identities}
    _write_secret(folder / TOKENS, tokens)
    return {client_id: sha256(token.encode()).digest() for client_id, token in tokens.items()}


def save_hashes(folder: Path, hashes: Mapping[int, bytes]) -> None:
    """Keep the hashes with the run, so that clients can join again after a restart."""
    _write_secret(folder / HASHES, {client_id: value.hex() for client_id, value in hashes.items()})


def load_hashes(folder: Path) -> dict[int, bytes] | None:
    """The hashes a run was started with; None if there are none (it was killed just after it began).

    Raises
    ------
    StoreDamaged
        The file is not what :func:`save_hashes` wrote.
    """
    path = folder / HASHES
    try:
        stored = json.loads(path.read_text())
        return {int(client_id): bytes.fromhex(value) for client_id, value in stored.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        raise StoreDamaged(
            f"{path}: the join tokens' hashes cannot be read ({problem}); restore the file, or delete it: --resume "
            "then makes new tokens, which the clients have to be given"
        ) from None


def _write_secret(path: Path, content: Mapping[int, str]) -> None:
    text = json.dumps({str(key): value for key, value in content.items()}, indent=0)
    new = path.with_suffix(".new")
    with explaining(path, "write the join tokens"):
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        new.replace(path)  # whole, or not at all

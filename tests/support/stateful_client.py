"""A client process that keeps its state, as the launcher and ``byzuldp client --state`` start one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from federations import Child

from client.state import Contents, decode
from common.config import Experiment

__all__ = ["contents_of", "stateful_client"]


def stateful_client(
    folder: Path,
    experiment: Experiment,
    address: str,
    tokens: Mapping[int, str],
    state: Path | None,
    *,
    name: str = "client",
) -> Child:
    """Honest clients: exit code 0 once the run has ended, whatever its status."""
    return Child(folder, name, _take_part, experiment, address, dict(tokens), state)


def contents_of(state: Path) -> Contents:
    """What a state file holds now, its lock aside; empty before there is one."""
    try:
        return decode(state.read_bytes())
    except FileNotFoundError:
        return Contents()


def _take_part(
    say: Callable[..., None], experiment: Experiment, address: str, tokens: Mapping[int, str], state: Path | None
) -> None:
    from client.main import run_client

    outcome = run_client(experiment, address=address, tokens=tokens, state=state)
    say({"event": "outcome", "status": outcome.status, "message": outcome.message})

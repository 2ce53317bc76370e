"""One run of one setting: a parameter server, client processes, and the record that the server keeps anyway."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from common.config import Experiment
from common.errors import RunFailed
from deploy.bench.asked import Setting
from deploy.bench.links import Links
from deploy.bench.load import write_load
from deploy.bench.result import Run
from deploy.chaos.backend import choose_backend
from deploy.chaos.conductor import Conductor
from deploy.chaos.plan import Plan, names_of
from deploy.children import ROLES
from deploy.local import run_locally
from deploy.processes import child_context
from ps.reader import RunReader

__all__ = ["measure", "rounds_of", "warning_of"]

ENTRIES = {**ROLES, "client": "deploy.bench.load:take_part"}
DEADLINE_S = 6 * 3600.0

Say = Callable[[str], None]


def warning_of(event: dict[str, Any]) -> str | None:
    """What of an event should be said; that nothing will be learned is known."""
    if event["event"] not in ("warning", "client_error", "suspended") or "not expected to learn" in event["message"]:
        return None
    return f"warning: {event['message']}"


class _Onlooker:
    """Passes on what might spoil a measurement."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def show(self, event: dict[str, Any]) -> None:
        if (warning := warning_of(event)) is not None:
            self._say(warning)

    def tick(self) -> None:
        pass


def measure(setting: Setting, links: Links, say: Say, *, keep: Path | None = None) -> Run:
    """Run a setting on this machine.

    Parameters
    ----------
    keep
        A new folder for the run; None: it goes to a temporary one.

    Raises
    ------
    RunFailed
        It did not complete, or a momentum was missing: the rounds would not be those that were asked for.
    """
    holding: AbstractContextManager[Any]
    holding = tempfile.TemporaryDirectory(prefix="byzuldp-bench-") if keep is None else nullcontext(keep)
    with holding as folder:
        run_dir = Path(folder).absolute() / "run"
        run_dir.mkdir(parents=True)
        write_load(run_dir, setting.load)
        experiment = setting.experiment()
        if links.backend is None:
            ending = run_locally(experiment, run_dir, _Onlooker(say), entries=ENTRIES)
            status, message = ending.status, ending.message
        else:
            status, message = _over_links(experiment, links, run_dir, say)
        if status != "completed":
            raise RunFailed(f"{setting.title()}: the run ended as {status}: {message}")
        return rounds_of(run_dir, setting)


def _over_links(experiment: Experiment, links: Links, run_dir: Path, say: Say) -> tuple[str, str]:
    backend = choose_backend(links.backend or "auto", links.conditions.needs()).backend
    plan = Plan(names_of(experiment), faults=(), left_out=())
    try:
        backend.open(plan.peers)
        context = child_context("forkserver")  # after open(), so that it is born where the network is
        for peer in plan.peers:
            backend.shape(peer, links.conditions, links.conditions)
        played = Conductor(
            experiment, run_dir, plan, _Onlooker(say), context, backend, deadline_s=DEADLINE_S, entries=ENTRIES
        ).play()
    finally:
        backend.close()
    return played.status, played.message


def rounds_of(run_dir: Path, setting: Setting) -> Run:
    """The rounds that count, as the parameter server recorded them.

    Raises
    ------
    RunFailed
        Some of them are not there.
    """
    reader = RunReader(run_dir)
    counted = reader.rounds()[setting.warm_up :]
    if len(counted) != setting.rounds:
        raise RunFailed(f"{setting.title()}: {len(counted)} rounds were recorded, expected {setting.rounds}")
    return Run(counted, [reader.spans(one.round_id) for one in counted])

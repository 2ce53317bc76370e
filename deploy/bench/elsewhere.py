"""Clients on other hosts: the parameter server runs here, and says how to start them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import RunFailed, StoreUnwritable
from deploy.bench.asked import Setting
from deploy.bench.measuring import rounds_of, warning_of
from deploy.bench.result import Run
from deploy.local import new_run_dir
from deploy.toml import to_toml
from ps.tokens import TOKENS

__all__ = ["EXPERIMENT_FILE", "commands", "measure_elsewhere"]

EXPERIMENT_FILE = "bench.toml"

Say = Callable[[str], None]


def commands(setting: Setting, address: str, *, insecure: bool) -> list[str]:
    """One for each client process; the files they name are the two that have to be brought there."""
    lines = []
    for first in range(0, setting.clients, setting.per_process):
        last = min(first + setting.per_process, setting.clients) - 1
        ids = str(first) if first == last else f"{first}-{last}"
        words = ["byzuldp", "bench", "client", EXPERIMENT_FILE, "--address", address, "--tokens", TOKENS, "--ids", ids]
        if setting.load.compute_s:
            words += ["--compute-s", f"{setting.load.compute_s:g}"]
        words += ["--seed", str(setting.load.seed), *(["--insecure"] if insecure else [])]
        lines.append(shlex.join(words))
    return lines


def measure_elsewhere(setting: Setting, listen: str, say: Say, *, run_dir: Path | None, insecure: bool) -> Run:
    """Be the parameter server of a run whose clients are started by hand.

    Raises
    ------
    ByzULDPError
        The address cannot be had, or the run did not complete.
    """
    from ps.main import run_parameter_server

    folder = new_run_dir("bench") if run_dir is None else run_dir
    experiment = setting.experiment({"address": listen, "insecure": insecure})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EXPERIMENT_FILE).write_text(to_toml(experiment.model_dump(mode="json", exclude={"folder"})))
    except OSError as problem:
        raise StoreUnwritable(f"{folder}: cannot be written ({problem}); name another --run-dir") from None

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            files = f"{folder / EXPERIMENT_FILE} and {folder / 'operator' / TOKENS}"
            say(f"bring {files} to the clients' hosts, and start there within network.join_deadline_s:")
            for line in commands(setting, event["address"], insecure=insecure):
                say(f"  {line}")
        elif (warning := warning_of(event)) is not None:
            say(warning)

    summary = run_parameter_server(experiment, folder, report=report)
    if summary["status"] != "completed":
        raise RunFailed(f"{setting.title()}: the run ended as {summary['status']}: {summary['message']}")
    return rounds_of(folder, setting)

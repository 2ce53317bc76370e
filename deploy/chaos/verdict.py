"""The outcome of a scenario: the checks, both runs beside each other, and the timeline of what was done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from deploy.chaos.backend import PS
from deploy.chaos.conductor import Played
from deploy.chaos.invariants import Check

__all__ = ["FILE", "Run", "Verdict", "measured", "run_of_earlier"]

FILE = "verdict.json"


@dataclass(frozen=True)
class Run:
    """A run in figures; None where it left none.

    Attributes
    ----------
    rounds, planned
        Models released, and T.
    begun_again
        Rounds that were open when the parameter server died, so that their momenta were asked for once more.
    incomplete
        Rounds that closed without all identities.
    """

    status: str
    message: str
    run_dir: str
    seconds: float
    planned: int
    rounds: int | None
    accuracy: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_max_s: float | None
    begun_again: int
    incomplete: int | None
    restarts: Mapping[str, int]

    @property
    def lost(self) -> int | None:
        """Rounds of the plan without a model."""
        return None if self.rounds is None else self.planned - self.rounds


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes
    ----------
    fingerprint
        Of the experiment; an undisturbed run can stand for another of the same.
    """

    scenario: str
    about: str
    quick: bool
    fingerprint: str
    backend: str
    passed_over: Mapping[str, str]
    facts: Mapping[str, str]
    left_out: tuple[str, ...]
    accuracy_within: float
    undisturbed: Run
    disturbed: Run
    checks: tuple[Check, ...]
    timeline: tuple[Mapping[str, Any], ...]

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "about": self.about,
            "quick": self.quick,
            "fingerprint": self.fingerprint,
            "verdict": "pass" if self.passed else "fail",
            "backend": self.backend,
            "passed_over": dict(self.passed_over),
            "facts": dict(self.facts),
            "left_out": list(self.left_out),
            "accuracy_within": self.accuracy_within,
            "checks": [vars(check) for check in self.checks],
            "undisturbed": _run_json(self.undisturbed),
            "disturbed": _run_json(self.disturbed),
            "timeline": list(self.timeline),
        }

    def write(self, folder: Path) -> None:
        """``verdict.json``, for the operator: it says who did not answer when."""
        with os.fdopen(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(self.as_json(), indent=2) + "\n")


def _run_json(run: Run) -> dict[str, Any]:
    return {**vars(run), "restarts": dict(run.restarts), "lost": run.lost}


def measured(played: Played, planned: int) -> Run:
    """A run's figures, from its folder.

    Parameters
    ----------
    planned
        T.
    """
    from common.errors import StoreProblem
    from ps.reader import RunReader

    try:
        summary = json.loads((played.run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    latency = summary.get("round_latency_s") or {}
    rounds, incomplete = summary.get("rounds"), None
    try:
        reader = RunReader(played.run_dir)
        rounds = reader.status().round_id
        incomplete = sum(1 for record in reader.rounds() if record.missing)
    except StoreProblem:
        pass
    return Run(
        status=played.status,
        message=played.message,
        run_dir=str(played.run_dir),
        seconds=played.seconds,
        planned=planned,
        rounds=rounds,
        accuracy=summary.get("final_accuracy"),
        latency_p50_s=latency.get("p50"),
        latency_p95_s=latency.get("p95"),
        latency_max_s=latency.get("max"),
        begun_again=played.restarts.get(PS, 0),
        incomplete=incomplete,
        restarts=played.restarts,
    )


def run_of_earlier(folder: Path, fingerprint: str, backend: str) -> Run:
    """The undisturbed run of an earlier verdict, to be compared with once more.

    Raises
    ------
    ConfigError
        There is no verdict in the folder, or it is of another experiment or backend: their times do not compare.
    """
    path = folder / FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        run = {name: value for name, value in tree["undisturbed"].items() if name != "lost"}
        found, stored, network = Run(**run), str(tree["fingerprint"]), str(tree["backend"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"--undisturbed {folder}: {path.name} cannot be read ({problem!r})") from None
    if stored != fingerprint:
        raise ConfigError(
            f"--undisturbed {folder}: its experiment is another one (fingerprint {stored[:12]}…, here "
            f"{fingerprint[:12]}…); leave the option out"
        )
    if network != backend:
        raise ConfigError(
            f"--undisturbed {folder}: it went over the backend {network}, here it is {backend}; "
            f"use --backend {network}, or leave the option out"
        )
    return found

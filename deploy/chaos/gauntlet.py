"""All ready scenarios, one after the other, on every backend that works here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from deploy.chaos.backend import BACKENDS
from deploy.chaos.play import Shown, choose, play
from deploy.chaos.scenario import load_scenario, ready_scenarios
from deploy.chaos.tabulate import table
from deploy.chaos.verdict import Verdict, run_of_earlier

__all__ = ["Passage", "run_gauntlet", "write_table"]


@dataclass(frozen=True)
class Passage:
    """One scenario on one backend: its verdict, or why it could not be played there."""

    scenario: str
    backend: str
    outcome: Verdict | str


def run_gauntlet(
    folder: Path,
    shown: Callable[[str, int], Shown],
    *,
    backend: str = "auto",
    quick: bool = False,
    overrides: Sequence[str] = (),
) -> Iterator[Passage]:
    """Play them; one that fails does not stop the others.

    Parameters
    ----------
    folder
        Gets a folder for each scenario and backend.
    shown
        Given a scenario's name and its number of rounds, what opens the display of its runs.
    backend
        One of them only; default every one that works here and can do what the scenario needs.

    Raises
    ------
    ConfigError
        There is no such backend.
    RunFailed, Interrupted
        See :func:`deploy.chaos.play.play`.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigError(f"--backend {backend}: expected auto or one of {', '.join(BACKENDS)}")
    undisturbed: dict[tuple[str, str], Path] = {}  # runs that stand for others of the same experiment and network
    for network in BACKENDS if backend == "auto" else (backend,):
        for name in sorted(ready_scenarios()):
            loaded = load_scenario(name, quick=quick, overrides=overrides)
            try:
                plan, choice = choose(loaded, backend=network)
            except ConfigError as problem:
                yield Passage(name, network, str(problem))
                continue
            place, key = folder / f"{name}-{network}", (network, loaded.experiment.fingerprint())
            before = run_of_earlier(undisturbed[key], key[1], network) if key in undisturbed else None
            verdict = play(
                loaded, plan, choice, place, shown(name, loaded.experiment.training.rounds), undisturbed=before
            )
            undisturbed.setdefault(key, place)
            yield Passage(name, network, verdict)


def write_table(folder: Path, passages: Sequence[Passage]) -> Path:
    """The verdicts as a Markdown table, in ``folder/table.md``."""
    verdicts = [passage.outcome.as_json() for passage in passages if isinstance(passage.outcome, Verdict)]
    path = folder / "table.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(table(verdicts), encoding="utf-8")
    return path

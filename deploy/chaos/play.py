"""A whole scenario: the experiment left alone, then disturbed, then judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from common.errors import RunFailed
from deploy.chaos.backend import Choice, choose_backend
from deploy.chaos.conductor import Conductor, Played
from deploy.chaos.invariants import check_all
from deploy.chaos.plan import Plan, planned
from deploy.chaos.roles import LAB_ROLES
from deploy.chaos.scenario import Loaded
from deploy.chaos.verdict import Run, Verdict, measured
from deploy.processes import child_context
from deploy.supervisor import Onlooker

__all__ = ["DISTURBED", "UNDISTURBED", "choose", "play"]

UNDISTURBED, DISTURBED = "undisturbed", "disturbed"

Shown = Callable[[str], AbstractContextManager[Onlooker]]


def choose(loaded: Loaded, *, backend: str, leave_out: Collection[str] = ()) -> tuple[Plan, Choice]:
    """Everything that can refuse a scenario, before anything is started.

    Raises
    ------
    ConfigError
        It cannot be played as it is, here or on this backend.
    """
    plan = planned(loaded, leave_out=leave_out)
    return plan, choose_backend(backend, plan.needs)


def play(
    loaded: Loaded,
    plan: Plan,
    choice: Choice,
    folder: Path,
    shown: Shown,
    *,
    undisturbed: Run | None = None,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    entries: Mapping[str, str] = LAB_ROLES,
) -> Verdict:
    """Play a scenario to its verdict, which is also in ``folder/verdict.json``.

    Parameters
    ----------
    folder
        Gets the run folders ``undisturbed`` and ``disturbed``, and what clients recorded beside them.
    shown
        Given the name of a run, opens what shows it.
    undisturbed
        An earlier undisturbed run of this experiment, to be compared with instead of a new one.

    Raises
    ------
    RunFailed
        The network could not be made or disturbed, or the undisturbed run did not complete: nothing can be said of
        the scenario.
    Interrupted
        A signal asked for the end.
    """
    backend = choice.backend
    try:
        backend.open(plan.peers)
        facts = dict(backend.facts())
        context = child_context(start_method)  # after open(), so that it is born where the network is

        def run(name: str, faults: Plan, *, check: bool) -> Played:
            with shown(name) as onlooker:
                return Conductor(
                    loaded.experiment,
                    folder / name,
                    faults,
                    onlooker,
                    context,
                    backend,
                    deadline_s=loaded.terms.deadline_s,
                    disk_mb=loaded.terms.disk_mb,
                    check=check,
                    entries=entries,
                ).play()

        rounds = loaded.experiment.training.rounds
        before = undisturbed
        if before is None:
            before = _fit(measured(run(UNDISTURBED, replace(plan, faults=()), check=True), rounds))
        disturbed = run(DISTURBED, plan, check=undisturbed is not None)
    finally:
        backend.close()
    after = measured(disturbed, rounds)
    verdict = Verdict(
        scenario=loaded.name,
        about=loaded.about,
        quick=loaded.quick,
        fingerprint=loaded.experiment.fingerprint(),
        backend=backend.name,
        passed_over=choice.passed_over,
        facts=facts,
        left_out=plan.left_out,
        accuracy_within=loaded.terms.accuracy_within,
        undisturbed=before,
        disturbed=after,
        checks=tuple(
            check_all(
                disturbed,
                statuses=loaded.terms.status,
                accuracy_within=loaded.terms.accuracy_within,
                undisturbed=before.accuracy,
                accuracy=after.accuracy,
            )
        ),
        timeline=tuple(item.as_json() for item in disturbed.timeline),
    )
    verdict.write(folder)
    return verdict


def _fit(run: Run) -> Run:
    """An undisturbed run that something can be compared with.

    Raises
    ------
    RunFailed
        It did not come to its end: whatever is wrong, the faults are not to blame.
    """
    if run.status not in ("completed", "budget_exhausted"):
        raise RunFailed(f"the undisturbed run ended {run.status}: {run.message}; see {run.run_dir}")
    return run

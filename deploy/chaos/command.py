"""``byzuldp chaos``: a federation on a network that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.listing import list_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.chaos.backend import Choice
    from deploy.chaos.plan import Plan
    from deploy.chaos.play import Shown
    from deploy.chaos.scenario import Loaded

__all__ = ["chaos"]


def chaos(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A TOML file, or the name of a ready scenario; without it, they are listed."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="How links are disturbed: auto, proxy, netns or netem.")
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="In seconds, with a small model and few rounds.")] = False,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", metavar="FAULT", help="Do without a kind of fault; may be repeated."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of the experiment; may be repeated."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Another seed of the punisher.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where both runs go; default runs/chaos-NAME-TIME.", show_default=False),
    ] = None,
    undisturbed: Annotated[
        Path | None,
        typer.Option("--undisturbed", metavar="FOLDER", help="Compare with the undisturbed run of an earlier verdict."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All ready scenarios, on every backend that works here, and a table of them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no table.")] = False,
) -> None:
    """Play a fault scenario: run its experiment undisturbed and disturbed, check the invariants, give a verdict.

    The exit code is 0 only if every invariant holds.
    """
    import json

    from common.errors import RunFailed
    from deploy.chaos.play import choose, play
    from deploy.chaos.report import render_plan, render_verdict
    from deploy.chaos.scenario import load_scenario
    from deploy.chaos.verdict import run_of_earlier
    from deploy.display import open_display
    from deploy.local import new_run_dir

    if every:
        _all(backend, set_ or (), run_dir, quick=quick, quiet=quiet)
        return
    if scenario is None:
        list_("scenarios")
        return
    loaded = load_scenario(scenario, quick=quick, overrides=set_ or (), seed=seed)
    plan, choice = choose(loaded, backend=backend, leave_out=leave_out or ())
    if dry_run:
        typer.echo(_dry(loaded, plan, choice) if as_json else render_plan(plan, choice), nl=as_json)
        return
    before = None
    if undisturbed is not None:
        before = run_of_earlier(undisturbed, loaded.experiment.fingerprint(), choice.backend.name)
    folder = new_run_dir(f"chaos-{loaded.name}") if run_dir is None else run_dir
    rounds = loaded.experiment.training.rounds
    verdict = play(
        loaded,
        plan,
        choice,
        folder,
        lambda name: open_display(f"{loaded.name}, {name}", rounds, quiet=quiet),
        undisturbed=before,
    )
    if as_json:
        typer.echo(json.dumps(verdict.as_json(), indent=2))
    elif not quiet:
        from rich.console import Console

        Console().print(render_verdict(verdict))
    if not verdict.passed:
        wrong = "; ".join(f"{check.name}: {check.found}" for check in verdict.checks if not check.holds)
        raise RunFailed(f"{loaded.name}: the verdict is fail: {wrong}; see {folder}")


def _all(backend: str, overrides: Sequence[str], run_dir: Path | None, *, quick: bool, quiet: bool) -> None:
    from common.errors import RunFailed
    from deploy.chaos.gauntlet import run_gauntlet, write_table
    from deploy.display import open_display
    from deploy.local import new_run_dir

    def shown(scenario: str, rounds: int) -> Shown:
        return lambda run: open_display(f"{scenario}, {run}", rounds, quiet=quiet)

    folder = new_run_dir("chaos") if run_dir is None else run_dir
    passages = []
    for passage in run_gauntlet(folder, shown, backend=backend, quick=quick, overrides=overrides):
        passages.append(passage)
        outcome = passage.outcome
        said = outcome if isinstance(outcome, str) else "pass" if outcome.passed else "FAIL"
        typer.echo(f"{passage.scenario} on {passage.backend}: {said}", err=True)
    typer.echo(write_table(folder, passages).read_text(encoding="utf-8"))
    verdicts = [passage.outcome for passage in passages if not isinstance(passage.outcome, str)]
    failed = [verdict.scenario + " on " + verdict.backend for verdict in verdicts if not verdict.passed]
    if failed or not verdicts:
        raise RunFailed(f"{', '.join(failed) or 'every scenario'}: failed or could not be played here; see {folder}")


def _dry(loaded: Loaded, plan: Plan, choice: Choice) -> str:
    import json

    from deploy.chaos.timeline import Timeline

    return json.dumps(
        {
            "scenario": loaded.name,
            "backend": choice.backend.name,
            "passed_over": dict(choice.passed_over),
            "left_out": list(plan.left_out),
            "processes": list(plan.names),
            "timeline": [item.as_json() for item in Timeline(plan.faults).occurrences],
        },
        indent=2,
    )

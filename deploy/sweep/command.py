"""``byzuldp sweep``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.sweep.conduct import Sweep
    from deploy.sweep.results import Row

__all__ = ["sweep"]


def sweep(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP", help="A TOML file, or the name of a ready sweep; none lists these.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Default sweeps/NAME.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of every run; may be repeated."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; default one a core.", show_default=False)
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run those again that gave nothing.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Run nothing: make the tables and pictures again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run nothing: list what would be run.")] = False,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: its address, auto, or local."),
    ] = None,
    slurm: Annotated[
        Path | None,
        typer.Option("--slurm", metavar="FILE", help="Run nothing: write a SLURM job array of what is missing."),
    ] = None,
    only: Annotated[
        int | None, typer.Option("--only", metavar="INDEX", help="Run this one of the grid: a job array's task.")
    ] = None,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep every run's folder, in DIR/runs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Simulate a whole grid of experiments, and tabulate what comes out. What was run before is not run again."""
    from common.errors import ConfigError, Interrupted
    from deploy.sweep.conduct import Sweep, described, values_of
    from deploy.sweep.plan import load_plan, ready_sweeps

    if source is None:
        for name, path in ready_sweeps().items():
            first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            typer.echo(f"{name:<20}  {first}")
        return
    if sum((ray is not None, slurm is not None, only is not None, table, dry_run)) > 1:
        raise ConfigError("--ray, --slurm, --only, --table and --dry-run: give one of them")
    overrides = set_ or []
    plan = load_plan(source, overrides)
    folder = Path("sweeps") / plan.name if out is None else out

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    conducted = Sweep(plan, folder, say, keep_runs)
    if dry_run or slurm is not None:
        missing = conducted.missing(retry_failed=retry_failed)
        if dry_run:
            typer.echo("\n".join(f"{point.index:5}  {point.key}  {values_of(point)}" for point in missing))
            typer.echo(f"{len(missing)} of {len(plan.points)} runs to make", err=True)
        elif not missing:
            say("nothing is missing: no script was written")
        else:
            _write_slurm(slurm, plan.name, [point.index for point in missing], source, folder, overrides, jobs)
            say(f"{slurm}: {len(missing)} runs; give it to sbatch, and afterwards make the tables with --table")
        return
    try:
        if table:
            rows, _ = conducted.outcomes()
            conducted.write(rows)
        elif only is not None:
            from deploy.sweep.backends import InThisProcess

            row = conducted.run_one(only, InThisProcess())
            raise typer.Exit(row.exit_code)
        else:
            rows = _with_signals(conducted, jobs, ray, retry_failed)
    except KeyboardInterrupt:
        say(f"what has ended is in {folder}; the same command goes on from there")
        raise Interrupted("stopped by Ctrl-C or SIGTERM") from None
    if failures := conducted.failures(rows):
        typer.echo(described(failures), err=True)
    typer.echo(str(folder / "table.csv"))
    if not quiet:
        typer.echo((folder / "summary.md").read_text(encoding="utf-8"), err=True)
    raise typer.Exit(1 if failures else 0)


def _with_signals(conducted: Sweep, jobs: int | None, ray: str | None, retry_failed: bool) -> dict[str, Row]:
    """Run, with SIGTERM as Ctrl-C."""
    import signal

    from deploy.sweep.backends import Backend
    from deploy.sweep.pool import Pool, cores

    backend: Backend
    if ray is None:
        backend = Pool(jobs or cores())
    else:
        from deploy.sweep.on_ray import OnRay

        backend = OnRay(ray)

    def terminated(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        return conducted.run(backend, retry_failed=retry_failed)
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_slurm(
    script: Path | None,
    name: str,
    indices: list[int],
    source: str,
    out: Path,
    overrides: list[str],
    jobs: int | None,
) -> None:
    from deploy.sweep.slurm import slurm_script
    from deploy.sweep.table import write_text

    assert script is not None  # noqa: S101 - asked for
    given = str(Path(source).absolute()) if Path(source).is_file() else source
    command = [sys.argv[0], "sweep", given, "--out", str(out.absolute())]
    for override in overrides:
        command += ["--set", override]
    write_text(script, slurm_script(name, indices, command, out.absolute(), at_once=jobs))

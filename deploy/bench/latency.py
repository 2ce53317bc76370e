"""``byzuldp bench latency``: the rounds of real processes, with clients that compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.bench.asked import Setting
    from deploy.bench.links import Links
    from deploy.bench.result import Point

__all__ = ["latency"]


def latency(
    clients: Annotated[str, typer.Option("--clients", metavar="N,…", help="Numbers of clients.")] = "4,20",
    dimension: Annotated[
        str, typer.Option("--dimension", metavar="D,…", help="Numbers of model parameters; 1e6 is as good.")
    ] = "26010",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count, of each point and run.")] = 100,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Rounds before them that do not count.")] = 5,
    rule: Annotated[
        str, typer.Option("--rule", help="The aggregation rule; see `byzuldp list rules`.")
    ] = "trimmed_mean",
    byzantine: Annotated[
        int | None, typer.Option("--byzantine", min=0, help="f of the rule; default a fifth of n.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float, typer.Option("--epsilon", help="Of the whole run; decides how much noise is added.")
    ] = 10.0,
    delta: Annotated[float, typer.Option("--delta", help="Of the whole run.")] = 1e-5,
    no_noise: Annotated[bool, typer.Option("--no-noise", help="Without privacy, so without noise.")] = False,
    compute_s: Annotated[
        float, typer.Option("--compute-s", help="Every client waits for so long before it answers.")
    ] = 0.0,
    runs: Annotated[
        int, typer.Option("--runs", min=1, help="Runs of each point, the points in turn; `compare` then knows more.")
    ] = 1,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=1, help="Client processes; default one a client, 20 at most.", show_default=False
        ),
    ] = None,
    delay_ms: Annotated[float, typer.Option("--delay-ms", help="Of every client's link, each way.")] = 0.0,
    jitter_ms: Annotated[float, typer.Option("--jitter-ms", help="The delay varies by so much, either way.")] = 0.0,
    rate_mbit: Annotated[
        float | None, typer.Option("--rate-mbit", help="Of every client's link, each way.", show_default=False)
    ] = None,
    loss: Annotated[float, typer.Option("--loss", help="Fraction of packets lost (netns and netem only).")] = 0.0,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Who emulates the links: auto, proxy, netns, netem.", show_default=False),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Start no clients: wait for those of other hosts, and print how to start them.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With --listen: allow an address beyond this machine without encryption.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of the experiment; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what the clients send.")] = 1,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Keep the run folders here; default: none is kept.", show_default=False),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no table.")] = False,
) -> None:
    """Measure rounds of a parameter server and clients that compute nothing, for every n with every d.

    Each is a run of real processes over gRPC: models go down, momenta come up, the rule, noise, a durable commit. The
    clients run the honest client's own protocol code, each identity over a connection of its own.
    """
    import os
    import sys
    import time

    from deploy.bench.asked import Load, grid, refuse_too_large
    from deploy.bench.links import links_of
    from deploy.bench.machine import machine
    from deploy.bench.result import Measurement, write

    began, started, load_before = time.time(), time.monotonic(), os.getloadavg()[0]
    links = links_of(delay_ms=delay_ms, jitter_ms=jitter_ms, rate_mbit=rate_mbit, loss=loss, backend=backend)
    settings = grid(
        clients,
        dimension,
        byzantine=byzantine,
        rounds=rounds,
        warm_up=warm_up,
        processes=processes,
        rule=rule,
        epsilon=None if no_noise else epsilon,
        delta=delta,
        load=Load(compute_s, seed),
        overrides=set_ or (),
    )
    if listen is None:
        for setting in settings:
            refuse_too_large(setting)
        points, network = _here(settings, links, runs, run_dir, quiet=quiet), str(links)
    else:
        points, network = _elsewhere(settings, links, runs, listen, run_dir, insecure=insecure), f"real, at {listen}"
    measurement = Measurement(
        began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        seconds=time.monotonic() - started,
        command=["byzuldp", *sys.argv[1:]],
        network=network,
        seed=seed,
        machine=machine(),
        load_average=[load_before, os.getloadavg()[0]],
        points=points,
    )
    if json_ is not None:
        write(json_, measurement)
    if not quiet:
        from rich.console import Console

        from deploy.bench.tables import render_measurement

        Console().print(render_measurement(measurement), highlight=False)


def _here(settings: Sequence[Setting], links: Links, runs: int, run_dir: Path | None, *, quiet: bool) -> list[Point]:
    """All points in turn, as many times as there are runs: what changes with time falls on all of them alike."""
    from deploy.bench.measuring import measure
    from deploy.bench.result import Run, point_of

    found: dict[Setting, list[Run]] = {setting: [] for setting in settings}
    for number in range(1, runs + 1):
        for setting in settings:
            if not quiet:
                of = f"run {number} of {runs}: " if runs > 1 else ""
                total = setting.warm_up + setting.rounds
                typer.echo(f"{of}{setting.title()}: {total} rounds over {links}", err=True)
            keep = run_dir and run_dir / f"n{setting.clients}-d{setting.dimension}-{number}"
            found[setting].append(measure(setting, links, _say, keep=keep))
    return [point_of(setting, of_it, processes=setting.processes) for setting, of_it in found.items()]


def _elsewhere(
    settings: Sequence[Setting], links: Links, runs: int, listen: str, run_dir: Path | None, *, insecure: bool
) -> list[Point]:
    from common.errors import ConfigError
    from deploy.bench.elsewhere import measure_elsewhere
    from deploy.bench.result import point_of

    if len(settings) > 1 or runs > 1:
        raise ConfigError("--listen measures one point in one run: give one --clients, one --dimension, no --runs")
    if links.backend is not None:
        raise ConfigError("--listen: the links are what they are; leave out --delay-ms, --rate-mbit and --backend")
    run = measure_elsewhere(settings[0], listen, _say, run_dir=run_dir, insecure=insecure)
    return [point_of(settings[0], [run], processes=None)]


def _say(text: str) -> None:
    typer.echo(text, err=True)

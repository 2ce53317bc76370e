"""The ``byzuldp`` command.

Imports of ours and of anything slow happen inside the commands: `byzuldp --help` has to be quick, and the packages'
origin is checked before the first of them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from deploy.bench import app as bench_app
from deploy.certs.command import certs
from deploy.chaos.command import chaos
from deploy.doctor import doctor
from deploy.listing import list_
from deploy.origin import shadowed
from deploy.privacy import app as privacy_app
from deploy.report.command import report
from deploy.sweep.command import sweep

if TYPE_CHECKING:
    from client.exchange import Outcome
    from common.config import Experiment
    from deploy.local import Ending

__all__ = ["app", "main"]

app = typer.Typer(
    name="byzuldp",
    help="Train a model with clients you cannot trust, privately for every client, over a real network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(privacy_app)
app.add_typer(bench_app)

ExperimentArgument = Annotated[
    str, typer.Argument(help="A TOML file, or the name of a ready experiment.", show_default=False)
]
ResumableArgument = Annotated[
    str | None,
    typer.Argument(
        help="A TOML file, or the name of a ready experiment; not needed with --resume.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of the experiment; may be repeated."),
]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="The run folder; default runs/NAME-TIME.", show_default=False)
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --run-dir, under the configuration stored there.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else, on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Show no progress and no table.")]
NoReportOption = Annotated[
    bool, typer.Option("--no-report", help="Write no report at the end; `byzuldp report RUN` does it later.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Allow an address beyond this machine without encryption.")
]
AddressOption = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Where the parameter server is.")]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        help="JSON file with the join token of each id (operator/join_tokens.json); not needed with TLS.",
        show_default=False,
    ),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="PEM: authorities whose certificates count.", show_default=False),
]
TlsCertOption = Annotated[
    str | None,
    typer.Option("--tls-cert", metavar="FILE", help="PEM: the certificate; {id} is the client's.", show_default=False),
]
TlsKeyOption = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", help="PEM: its private key; {id} is the client's.", show_default=False),
]
TlsNameOption = Annotated[
    str | None,
    typer.Option("--tls-name", help="The name in the server's certificate, if not its address's.", show_default=False),
]


def main() -> None:
    """The console script: errors of the tree become one message and their exit code."""
    if problems := shadowed():
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        sys.exit(10)
    from common.errors import ByzULDPError

    try:
        app()
    except ByzULDPError as problem:
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(problem.exit_code)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


# -------------------------------------------------------------------- running


@app.command()
def run(
    experiment: ResumableArgument = None,
    set_: SetOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    no_report: NoReportOption = False,
) -> None:
    """Run an experiment on this machine: parameter server, clients and adversaries as separate processes."""
    from deploy.display import open_display
    from deploy.local import run_locally

    configuration, folder = _asked_for(experiment, set_, run_dir, resume)
    name, rounds, budget = _name(experiment, folder), configuration.training.rounds, configuration.privacy.epsilon
    with open_display(name, rounds, budget=budget, quiet=quiet, stays=True) as display:
        ending = run_locally(configuration, folder, display, resume=resume)
    _conclude(ending, as_json=as_json, quiet=quiet, with_report=not no_report)


@app.command()
def simulate(
    experiment: ResumableArgument = None,
    set_: SetOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    no_report: NoReportOption = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="One client after the other, by the clients' own code; slower.")
    ] = False,
) -> None:
    """Run an experiment in this process, without the network: same algorithm, same run folder, many times as fast."""
    from deploy.display import open_display
    from deploy.local import Ending
    from deploy.logs import forward_warnings

    configuration, folder = _asked_for(experiment, set_, run_dir, resume)
    with open_display(_name(experiment, folder), configuration.training.rounds, quiet=quiet) as display:
        forward_warnings(display.show)
        display.show({"event": "note", "message": "loading PyTorch"})
        from deploy.simulate.run import run_simulation
        from deploy.simulate.stopping import stopped_by_signals

        with _interruptible(), stopped_by_signals() as stop:
            summary = run_simulation(configuration, folder, resume=resume, report=display.show, exact=exact, stop=stop)
    ending = Ending(summary["status"], summary["message"], folder, summary)
    _conclude(ending, as_json=as_json, quiet=quiet, with_report=not no_report, command="simulate")


@app.command()
def ps(
    experiment: ResumableArgument = None,
    set_: SetOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    no_report: NoReportOption = False,
    insecure: InsecureOption = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="HOST:PORT", help="Where to listen.", show_default=False)
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_roster: Annotated[
        Path | None, typer.Option("--tls-roster", metavar="FILE", help="TOML: who may join.", show_default=False)
    ] = None,
    tls_revoked: Annotated[
        Path | None,
        typer.Option("--tls-revoked", metavar="FILE", help="Serial numbers that count no more.", show_default=False),
    ] = None,
) -> None:
    """Start the parameter server alone; join tokens are written to operator/join_tokens.json in the run folder."""
    from deploy.display import open_display
    from deploy.local import Ending
    from deploy.logs import forward_warnings

    tls = _tls(ca=tls_ca, certificate=tls_cert, key=tls_key, roster=tls_roster, revoked=tls_revoked)
    overrides = [*(set_ or ()), *tls, *([f'network.address="{address}"'] if address is not None else ())]
    configuration, folder = _asked_for(experiment, overrides, run_dir, resume, insecure=insecure)
    name = _name(experiment, folder)
    with open_display(name, configuration.training.rounds, quiet=quiet, style="lines") as display:
        forward_warnings(display.show)
        display.show({"event": "note", "message": "loading PyTorch"})
        from ps.main import run_parameter_server

        with _interruptible():
            summary = run_parameter_server(configuration, folder, resume=resume, report=display.show)
    ending = Ending(summary["status"], summary["message"], folder, summary)
    _conclude(ending, as_json=as_json, quiet=quiet, with_report=not no_report, command="ps")


@app.command()
def client(
    experiment: ExperimentArgument,
    address: AddressOption,
    ids: Annotated[str, typer.Option("--ids", help="Identities this process holds, for instance 0-29,31.")],
    tokens: TokensOption = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="Keep momenta and the privacy total here, from one life of this client to the next.",
            show_default=False,
        ),
    ] = None,
    set_: SetOption = None,
    insecure: InsecureOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_name: TlsNameOption = None,
) -> None:
    """Take part in a run as one or several honest clients."""
    tls = _tls(ca=tls_ca, certificate=tls_cert, key=tls_key, server_name=tls_name)
    configuration = _configuration(experiment, [*(set_ or ()), *tls], insecure=insecure)
    held = _credentials(configuration, tokens, _ids(ids, configuration.federation.clients))

    def take_part() -> Outcome:
        from client.main import run_client

        return run_client(configuration, address=address, tokens=held, state=state)

    _take_part(take_part)


@app.command()
def adversary(
    experiment: ExperimentArgument,
    address: AddressOption,
    tokens: TokensOption = None,
    ids: Annotated[
        str | None, typer.Option("--ids", help="Identities it holds; default those of the experiment.")
    ] = None,
    wiretap: Annotated[
        str | None,
        typer.Option("--wiretap", metavar="HOST:PORT", help="The wiretap, as the parameter server prints it."),
    ] = None,
    set_: SetOption = None,
    insecure: InsecureOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_name: TlsNameOption = None,
) -> None:
    """Attack a run as its Byzantine clients."""
    from common.errors import AttackError

    tls = _tls(ca=tls_ca, certificate=tls_cert, key=tls_key, server_name=tls_name)
    configuration = _configuration(experiment, [*(set_ or ()), *tls], insecure=insecure)
    if not configuration.num_adversaries:
        raise AttackError(f"{experiment} has no adversaries: attack, misbehaviour and attack.adversaries say who")
    chosen = list(configuration.adversary_ids) if ids is None else _ids(ids, configuration.federation.clients)
    held = _credentials(configuration, tokens, chosen)

    def take_part() -> Outcome:
        from adversary.main import run_adversary

        return run_adversary(configuration, address=address, tokens=held, wiretap_address=wiretap)

    _take_part(take_part)


# -------------------------------------------------------------------- looking


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="mnist, fashion_mnist, or another data set that is in the folder.")],
    root: Annotated[Path, typer.Option("--root", help="The data folder.")] = Path("data"),
    again: Annotated[bool, typer.Option("--again", help="Prepare it once more, and replace what is there.")] = False,
) -> None:
    """Fetch a data set where that is possible, check it, and prepare it for training."""
    from common.learning.prepared import prepare_dataset

    with _interruptible():
        prepare_dataset(name, root, typer.echo, again=again)


@app.command()
def experiments() -> None:
    """List the experiments that are ready to run."""
    list_("experiments")


@app.command()
def show(
    experiment: ExperimentArgument,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print an experiment's whole configuration, defaults included, as TOML that can be run again."""
    import json

    from deploy.toml import to_toml

    tree = _configuration(experiment, set_).model_dump(mode="json")
    if not Path(experiment).is_file():
        del tree["folder"]  # where the ready experiments lie is nothing to rely on
    typer.echo(json.dumps(tree, indent=2) if as_json else to_toml(tree), nl=as_json)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"byzuldp {version('byzuldp')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(certs)
app.command()(doctor)
app.command()(chaos)
app.command()(report)
app.command()(sweep)
app.command(name="list")(list_)


# -------------------------------------------------------------------- what the commands share


def _configuration(source: str, overrides: list[str] | None, *, insecure: bool = False) -> Experiment:
    from common.config import load_experiment

    return load_experiment(source, _overrides(overrides, insecure))


def _overrides(given: list[str] | None, insecure: bool) -> list[str]:
    return [*(given or ()), *(["network.insecure=true"] if insecure else ())]


def _asked_for(
    source: str | None, overrides: list[str] | None, run_dir: Path | None, resume: bool, *, insecure: bool = False
) -> tuple[Experiment, Path]:
    """The configuration to run, and its folder.

    A resumed run has its own configuration; an experiment named beside it is only compared.
    """
    if source is None and not resume:
        raise typer.BadParameter(
            "missing; a TOML file, or a name that `byzuldp experiments` lists", param_hint="EXPERIMENT"
        )
    folder = _run_dir(source or "", run_dir, resume)
    if not resume:
        return _configuration(source or "", overrides, insecure=insecure), folder
    if source is None:
        from common.config import experiment_from, with_overrides
        from deploy.local import stored_experiment

        tree = stored_experiment(folder).model_dump(mode="json")
        given = experiment_from(with_overrides(tree, _overrides(overrides, insecure)))
    else:
        given = _configuration(source, overrides, insecure=insecure)
    return _stored(given, folder), folder


def _name(source: str | None, folder: Path) -> str:
    return folder.name if source is None else Path(source).stem


def _run_dir(source: str, given: Path | None, resume: bool) -> Path:
    from common.errors import ConfigError
    from deploy.local import new_run_dir

    if given is None and resume:
        raise ConfigError("--resume needs --run-dir: name the folder of the run to go on with, for instance runs/…")
    return new_run_dir(Path(source).stem) if given is None else given


def _stored(given: Experiment, folder: Path) -> Experiment:
    """The configuration a run is resumed under: as stored, but for what is asked for in ``[network]`` and
    ``[monitoring]``.

    Raises
    ------
    ConfigError
        Something else was asked for: what a run promised before round 0 does not change.
    """
    from common.errors import ConfigError
    from deploy.local import stored_experiment

    stored = stored_experiment(folder)
    if different := given.differences(stored.public()):
        text = "; ".join(line.replace("at the parameter server", "in the run folder") for line in different)
        raise ConfigError(
            f"a resumed run keeps its configuration, but another was asked for: {text}; leave that out (--resume "
            "--run-dir is enough), or start another run in another --run-dir"
        )
    changed = {}
    for name in ("network", "monitoring"):
        asked = {key: getattr(getattr(given, name), key) for key in getattr(given, name).model_fields_set}
        changed[name] = getattr(stored, name).model_copy(update=asked)
    return stored.model_copy(update=changed)


def _ids(text: str, clients: int) -> list[int]:
    """``0-29,31`` as a sorted list; see :func:`deploy.ids.parse_ids`."""
    from deploy.ids import parse_ids

    return parse_ids(text, clients)


def _tls(**given: Path | str | None) -> list[str]:
    """What was asked for of TLS, as assignments."""
    import json

    return [f"network.tls.{key}={json.dumps(str(value))}" for key, value in given.items() if value is not None]


def _credentials(configuration: Experiment, tokens: Path | None, ids: list[int]) -> dict[int, str]:
    """The join token of each identity; none is needed where there are certificates.

    Raises
    ------
    ConfigError
        There are neither, or see :func:`deploy.tokens.tokens_of`.
    """
    from common.errors import ConfigError
    from deploy.tokens import tokens_of

    if tokens is not None:
        return tokens_of(tokens, ids)
    if not configuration.network.tls.enabled:
        raise ConfigError("--tokens is missing: without TLS a client shows its join token")
    return dict.fromkeys(ids, "")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM are endings with a status of their own, also before the work has handlers for them."""
    import signal

    from common.errors import Interrupted

    def terminated(*_: object) -> NoReturn:
        raise Interrupted("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _take_part(take_part: Callable[[], Outcome]) -> None:
    from common.errors import exit_code_of
    from deploy.logs import log_to_stderr

    log_to_stderr()
    with _interruptible():
        outcome = take_part()
    typer.echo(f"the run has ended: {outcome.status}: {outcome.message}", err=True)
    raise typer.Exit(exit_code_of(outcome.status))


def _conclude(
    ending: Ending, *, as_json: bool, quiet: bool, with_report: bool, command: Literal["run", "ps", "simulate"] = "run"
) -> None:
    """Print what came out, write the report, and exit with the status's code."""
    import json

    from common.errors import exit_code_of

    if as_json:
        facts = {"status": ending.status, "message": ending.message, "run_dir": str(ending.run_dir)}
        typer.echo(json.dumps(facts if ending.summary is None else ending.summary, indent=2))
    elif ending.summary is not None and not quiet:
        from rich.console import Console

        from deploy.results import render_summary

        Console().print(render_summary(ending.summary))
    if ending.status != "completed":
        typer.echo(f"error: {ending.status}: {ending.message}", err=True)
        if ending.status in ("interrupted", "quorum_lost", "failed") and (ending.run_dir / "run.sqlite").exists():
            program = shlex.join([sys.argv[0], command, "--resume", "--run-dir", str(ending.run_dir)])
            typer.echo(f"go on with: {program}", err=True)
    if with_report:
        # Last, since it takes seconds: everything else has been said.
        _report_at_end(ending.run_dir, "forkserver" if command == "run" else "spawn", as_json=as_json, quiet=quiet)
    raise typer.Exit(exit_code_of(ending.status))


def _report_at_end(run_dir: Path, start_method: Literal["forkserver", "spawn"], *, as_json: bool, quiet: bool) -> None:
    """Write the report and say where it is; whatever is wrong with it is a warning. Ctrl-C leaves it out."""
    from common.errors import Interrupted
    from deploy.final_report import report_at_end

    try:
        with _interruptible():
            path, problem = report_at_end(run_dir, start_method=start_method)
    except Interrupted as stopped:
        path, problem = None, str(stopped)
    if problem:
        typer.echo(f"warning: no report was written: {problem}; `byzuldp report {run_dir}` tries again", err=True)
    elif path is not None and not quiet:
        typer.echo(f"report: {path}", err=as_json)


if __name__ == "__main__":
    main()

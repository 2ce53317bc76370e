"""One machine, separate processes: one parameter server, the clients' processes, one of all adversaries.

The launcher imports neither torch nor gRPC. Its children are forked from a server that has imported both and used
neither (:mod:`deploy.preload`), so that a dozen of them start in about the time of one.

Who does what when things go wrong: a client process that dies is shown, and the run goes on, since that is what the
system is for; one that cannot start because of what was asked for ends the run with its error. The parameter server's
death ends the run. Ctrl-C and SIGTERM reach the launcher alone, which asks the parameter server to end in good order;
a second Ctrl-C kills. The launcher's own death, by SIGKILL too, ends every child.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from common.config import Experiment, experiment_from
from common.errors import ConfigError, RunFolderExists, StoreDamaged
from common.rpc.addresses import parse_address, refuse_insecure
from deploy.children import ROLES, Assignment
from deploy.processes import child_context
from deploy.supervisor import Onlooker, Supervisor
from deploy.tokens import refuse_others_clients

__all__ = ["Ending", "assign", "new_run_dir", "run_locally", "stored_experiment"]


@dataclass(frozen=True)
class Ending:
    """How a run ended; ``summary`` is None when the parameter server wrote none."""

    status: str
    message: str
    run_dir: Path
    summary: Mapping[str, Any] | None = None


def run_locally(
    experiment: Experiment,
    run_dir: Path,
    onlooker: Onlooker,
    *,
    resume: bool = False,
    entries: Mapping[str, str] = ROLES,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
) -> Ending:
    """Run an experiment in processes of this machine, until it has ended and they are all gone.

    Parameters
    ----------
    run_dir
        A new folder; with ``resume`` that of the run to go on with, under the configuration stored there.
    onlooker
        Shown the parameter server's events, and ``note`` and ``warning`` events beside them.
    entries
        ``module:function`` of each role, see :class:`deploy.children.Assignment`.

    Raises
    ------
    ConfigError, NetworkProblem, StoreProblem
        Nothing was started. Whatever is found later is the ending's status.
    """
    if resume:
        experiment = stored_experiment(run_dir).model_copy(update={"monitoring": experiment.monitoring})
        refuse_others_clients(run_dir)
    elif (run_dir / "experiment.json").exists() or (run_dir / "run.sqlite").exists():
        raise RunFolderExists(f"{run_dir}: holds a run already; continue it with --resume, or choose another --run-dir")
    if experiment.network.tls.enabled:
        raise ConfigError(
            "network.tls is set, and everything that `byzuldp run` starts talks without it on this machine: leave it "
            "out, or start `byzuldp ps` and `byzuldp client` with their own certificates"
        )
    refuse_insecure(parse_address(experiment.network.address), insecure=experiment.network.insecure)
    began_at = time.monotonic()
    context = child_context(start_method)  # as early as possible: it imports while we go on
    try:
        (run_dir / "operator" / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "clients").mkdir(exist_ok=True)  # their own states, momenta among them
        for private in ("operator", "clients"):
            (run_dir / private).chmod(0o700)
    except OSError as problem:
        raise StoreDamaged(f"{run_dir}: cannot be created ({problem}); choose another --run-dir") from None
    supervisor = Supervisor(
        assign(experiment, run_dir, resume=resume, entries=entries),
        run_dir,
        onlooker,
        context,
        leave_deadline_s=experiment.network.leave_deadline_s,
    )
    status, message = supervisor.run()
    summary = None
    if supervisor.summed_up:
        known = {"startup_s": supervisor.startup_s, "seconds": time.monotonic() - began_at}
        summary = _final_summary(run_dir, {"status": status, "message": message, **known})
    return Ending(status, message, run_dir, summary)


def new_run_dir(name: str) -> Path:
    """``runs/<name>-<time>``, UTC; a number is added when there is one of the same second."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{k}" for k in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def stored_experiment(run_dir: Path) -> Experiment:
    """The configuration a run was started with.

    Raises
    ------
    StoreDamaged
        There is none, or it cannot be read.
    """
    path = run_dir / "experiment.json"
    try:
        if not path.exists() and (run_dir / "run.sqlite").exists():  # the readable copy was deleted
            from ps.reader import RunReader

            tree = dict(RunReader(run_dir).run.configuration)
        else:
            tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise StoreDamaged(f"{path}: cannot be read ({problem}); --run-dir must name the folder of a run") from None
    return experiment_from(tree, where=str(path))


def assign(
    experiment: Experiment, run_dir: Path, *, resume: bool = False, entries: Mapping[str, str] = ROLES
) -> list[Assignment]:
    """Who does what: a check, the parameter server, the clients in the order of their ids, one adversary process.

    Every identity gets a fresh random token. The parameter server is given only the tokens' hashes, and each process
    only the tokens of its own identities.
    """
    tokens = {client_id: secrets.token_urlsafe(24) for client_id in range(experiment.federation.clients)}
    hashes = {client_id: sha256(token.encode()).digest() for client_id, token in tokens.items()}
    tree = experiment.model_dump(mode="json")
    run_dir = run_dir.absolute()

    def part(role: str, number: int = 0, ids: Sequence[int] = ()) -> Assignment:
        return Assignment(
            role=role,
            number=number,
            entry=entries[role],
            experiment=tree,
            run_dir=run_dir,
            resume=resume,
            ids=tuple(ids),
            tokens={client_id: tokens[client_id] for client_id in ids},
            token_hashes=hashes if role == "ps" else {},
        )

    honest, held = experiment.honest_ids, experiment.federation.clients_per_process
    parts = [part("check"), part("ps")]
    parts += [part("client", k, honest[k * held : (k + 1) * held]) for k in range(math.ceil(len(honest) / held))]
    if experiment.num_adversaries:
        parts.append(part("adversary", 0, experiment.adversary_ids))
    return parts


def _final_summary(run_dir: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter server's summary, with what the launcher knows better: how long it all took, and why a run ended
    that the launcher ended."""
    from ps.summary import write_summary

    path = run_dir / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise StoreDamaged(f"{path}: cannot be read ({problem})") from None
    summary |= known
    with contextlib.suppress(OSError):
        write_summary(run_dir, summary)
    return summary

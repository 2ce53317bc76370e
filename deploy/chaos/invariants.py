"""What must hold after a disturbed run, whatever was done to it.

Each check reads what is left: the run folder, what clients wrote down of the models they were sent, and how every
process ended. None believes what another part of the run says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.errors import ByzULDPError, Interrupted, ServerUnreachable
from deploy.chaos.backend import PS
from deploy.chaos.conductor import End, Played
from deploy.chaos.recorder import Sighting, recorded
from deploy.chaos.timeline import Occurrence

__all__ = ["Check", "check_accuracy", "check_all", "check_ending", "check_faults", "check_models", "check_processes"]

# How a peer may end: it heard the run's end, or it gave up on a parameter server that it could not reach for long.
_FAIR = (ServerUnreachable.status, Interrupted.status)
_SHOWN = 5


@dataclass(frozen=True)
class Check:
    """One invariant. ``found`` says what was found, or what is wrong."""

    name: str
    holds: bool
    found: str


def check_all(
    played: Played,
    *,
    statuses: Collection[str],
    accuracy_within: float,
    undisturbed: float | None,
    accuracy: float | None,
) -> list[Check]:
    """All invariants of a run that is over.

    Parameters
    ----------
    statuses
        Final statuses that are as they should be.
    accuracy_within
        How far the accuracy may lie below the undisturbed run's.
    """
    run_dir = played.run_dir
    return [
        check_ending(played.status, played.message, statuses),
        check_faults(played.timeline),
        check_processes(played.ends),
        _surely("ledger", lambda: _check_ledger(run_dir)),
        _surely("models", lambda: _check_stored_models(run_dir)),
        check_accuracy(accuracy, undisturbed, accuracy_within),
    ]


def check_ending(status: str, message: str, statuses: Collection[str]) -> Check:
    """The run reached a final status, and one that was expected."""
    holds = status in statuses
    expected = "" if holds else f"; expected {' or '.join(statuses)}"
    return Check("ending", holds, f"{status}: {message}{expected}")


def check_faults(timeline: Sequence[Occurrence]) -> Check:
    """What was to happen has happened: a run that was over before its faults came has not been tried by them."""
    missed = [f"{item.fault.do} at {item.at}" for item in timeline if item.began_s is None]
    if missed:
        return Check("faults", False, f"the run was over before {_some(missed)}; make it longer, or the fault earlier")
    return Check("faults", True, f"{len(timeline)} of {len(timeline)} were done")


def check_processes(ends: Sequence[End]) -> Check:
    """No process ended but by the lab's hand, by the run's end, or because it could not reach the server for long."""
    wrong = [
        end.description
        for end in ends
        if not end.by_lab and (end.how in ("died", "crashed") or (end.how == "failed" and not _is_fair(end)))
    ]
    if wrong:
        return Check("processes", False, "; ".join(wrong[:_SHOWN]))
    gave_up = sum(1 for end in ends if end.status == ServerUnreachable.status)
    killed = sum(1 for end in ends if end.by_lab)
    found = f"{len(ends)} lives, {killed} ended by the lab, none by a defect"
    return Check("processes", True, found + (f"; {gave_up} gave up on the server" if gave_up else ""))


def _is_fair(end: End) -> bool:
    # The parameter server may say that it cannot write: what became of that is judged by the run's end.
    return end.status in _FAIR or end.name == PS


def check_accuracy(accuracy: float | None, undisturbed: float | None, within: float) -> Check:
    """The model is about as good as without faults."""
    if accuracy is None or undisturbed is None:
        return Check("accuracy", False, "not known: a run left no summary")
    found = f"{100 * accuracy:.2f}%, undisturbed {100 * undisturbed:.2f}%, allowed {100 * within:g} points below"
    return Check("accuracy", accuracy >= undisturbed - within - 1e-12, found)


def check_models(sightings: dict[str, list[Sighting]], heads: Sequence[str], kept: dict[int, str]) -> Check:
    """Every model that a client was sent is in the ledger, and is the only one of its round.

    Parameters
    ----------
    sightings
        What each process recorded.
    heads
        The ledger's head after each row, hex; row t pays for the model of round t.
    kept
        SHA-256 of the parameters of models that the run folder still has, by round.
    """
    wrong: list[str] = []
    first: dict[int, tuple[str, str]] = {}
    for name, seen in sightings.items():
        latest = -1
        for model in seen:
            if model.round_id >= len(heads):
                wrong.append(f"{name} was sent a model of round {model.round_id}, which is not in the ledger")
            elif heads[model.round_id] != model.head:
                wrong.append(f"{name} was sent a model of round {model.round_id} with another ledger's head")
            if model.round_id < latest:
                wrong.append(f"{name} was sent round {model.round_id} after round {latest}")
            latest = max(latest, model.round_id)
            known, whose = first.setdefault(model.round_id, (model.sha256, name))
            if known != model.sha256:
                wrong.append(f"round {model.round_id} was published twice: {whose} and {name} have different models")
    wrong += [
        f"the model of round {round_id} in the run folder is not the one that was sent"
        for round_id, digest in kept.items()
        if round_id in first and first[round_id][0] != digest
    ]
    if not first:
        wrong.append("no client recorded any model")
    if wrong:
        return Check("models", False, _some(wrong))
    count = sum(map(len, sightings.values()))
    return Check("models", True, f"{count} sightings of {len(first)} models by {len(sightings)} clients: one a round")


def _check_stored_models(run_dir: Path) -> Check:
    from safetensors.numpy import load_file

    from ps.reader import RunReader

    heads = [head.hex() for _, _, head in RunReader(run_dir).ledger_rows()]
    kept = {
        int(path.stem.rpartition("-")[2]): sha256(load_file(path)["theta"].tobytes()).hexdigest()
        for path in (run_dir / "models").glob("model-*.safetensors")
    }
    return check_models(recorded(run_dir), heads, kept)


def _check_ledger(run_dir: Path) -> Check:
    from ps.verification import verify_run

    verification = verify_run(run_dir)
    wrong = [f"{check.name}: {check.found}" for check in verification.checks if not check.holds]
    return Check("ledger", verification.holds, "; ".join(wrong) or f"whole: {verification.checks[0].found}")


def _surely(name: str, check: Callable[[], Check]) -> Check:
    """A check that cannot be made does not hold."""
    try:
        return check()
    except ByzULDPError as problem:
        return Check(name, False, str(problem))


def _some(items: Sequence[Any]) -> str:
    more = f" … and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(map(str, items[:_SHOWN])) + more

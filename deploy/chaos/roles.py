"""What a process of the fault lab does between its start and its role's own code."""

from __future__ import annotations

from multiprocessing.connection import Connection

from deploy.chaos.backend import Placement
from deploy.chaos.namespaces import CLONE_NEWNET, enter
from deploy.chaos.recorder import Recorder, recording_file
from deploy.children import ROLES, Assignment, Report, run_child

__all__ = ["LAB_ROLES", "run_placed", "take_part_recording"]

LAB_ROLES = {**ROLES, "client": "deploy.chaos.roles:take_part_recording"}


def run_placed(assignment: Assignment, placement: Placement, events: Connection) -> None:
    """The body of every process: go where it lives, then be what it is."""
    if placement.netns is not None:
        enter(placement.netns, CLONE_NEWNET)
    run_child(assignment, events)


def take_part_recording(assignment: Assignment, _report: Report) -> tuple[str, str]:
    """Honest clients that also write down every model they are sent."""
    from client.main import run_client

    with Recorder(recording_file(assignment.run_dir, assignment.name)) as recorder:
        outcome = run_client(
            assignment.load(),
            address=assignment.address,
            tokens=assignment.tokens,
            state=assignment.state_file,
            witness=lambda model: recorder(model.round_id, model.theta, model.ledger_head),
        )
    return outcome.status, outcome.message

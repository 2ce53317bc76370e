"""A client of the fault lab that claims to have been sent a second model of one round."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deploy.chaos.recorder import recording_file
from deploy.chaos.roles import take_part_recording
from deploy.children import Assignment


def take_part(assignment: Assignment, report: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
    outcome = take_part_recording(assignment, report)
    file = recording_file(assignment.run_dir, assignment.name)
    if assignment.number == 1:
        last = json.loads(file.read_text().splitlines()[-1])
        with file.open("a") as more:
            more.write(json.dumps({**last, "sha256": "0" * 64}) + "\n")
    return outcome

"""The bugs that were planted to try the simulator and the state machine, and how soon each is found."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stdout

from round_mutants import MUTANTS
from round_simulator import Schedule
from round_stage import Stage
from service_bugs import BUGS, planted
from service_machine import Service, play

__all__ = ["found_in_run", "tables"]

OF = 1000
"""Schedules that are played with each bug of the rounds."""
RUNS = 1000
"""Runs of the machine, at most, with each bug of the service."""


def found_in_run(name: str, runs: int = RUNS) -> int | None:
    """Which of the machine's runs is the first one that a planted bug breaks; None when none does."""
    begun = 0

    class Counted(Service):
        def __init__(self) -> None:
            nonlocal begun
            begun += 1
            super().__init__()

    with planted(name):
        try:
            play(runs, machine=Counted, shrink=False)
        except AssertionError:
            return begun - 1  # hypothesis plays the one that failed again
    return None


def breaks(seed: int, stage_type: type[Stage]) -> bool:
    try:
        Schedule(seed, stage_type).run()
    except Exception:  # a bug may break a rule, or the server
        return True
    return False


def tables() -> str:
    """Two tables in Markdown."""
    logging.disable(logging.CRITICAL)
    rounds, service = [], []
    for name, stage_type in MUTANTS.items():
        found = [seed for seed in range(OF) if breaks(seed, stage_type)]
        rounds.append(f"`{name}` | {found[0] if found else '—'} | {len(found)}")
    for name in BUGS:
        with redirect_stdout(io.StringIO()):  # hypothesis tells each failure
            service.append(f"`{name}` | {found_in_run(name) or '—'}")
    return "\n\n".join(
        (
            table(f"In rounds, patience, roster, coordinator | first | of {OF:,}", rounds, across=2),
            table("In the server's parts and its store | run", service, across=2),
        )
    )


def table(head: str, cells: list[str], across: int) -> str:
    """So many entries side by side."""
    rows = [head, " | ".join(["---"] + ["---:"] * head.count("|"))]
    lines = [f"| {' | '.join([row] * across)} |" for row in rows]
    lines += [f"| {' | '.join(cells[start : start + across])} |" for start in range(0, len(cells), across)]
    return "\n".join(lines)

"""The server's real parts against what must hold, whatever clients do, whenever time passes and wherever it dies.

The machine, what it asserts and the bugs planted to try it are in tests/support: ``service_machine``,
``service_stage``, ``service_bugs``. A run is a function of its seed, so a failure comes back.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planted import found_in_run
from round_mutants import MUTANTS
from service_bugs import BUGS
from service_machine import play

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"
SELDOM = {"frees_no_row", "sets_no_timer_for_the_lost"}
"""Bugs that it takes some hundred runs to show."""


@pytest.mark.timeout(600)  # to shorten a failure takes five minutes at most
def test_what_was_seen_and_what_is_on_the_disk_agree_whatever_happens():
    play(40)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first_seed", range(1, 11))
def test_what_was_seen_and_what_is_on_the_disk_agree_in_many_more_runs(first_seed):
    play(200, first_seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] * (bug in SELDOM)) for bug in BUGS])
def test_the_machine_finds_planted_bugs(bug):
    assert found_in_run(bug), f"no run shows {bug}"


def test_the_document_lists_the_planted_bugs_each_with_where_it_is_found():
    listed = re.findall(r"`(\w+)` \| \d", DOCUMENT.read_text())
    assert listed == [*MUTANTS, *BUGS]

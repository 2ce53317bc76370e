"""docs/adversaries.md names everything that there is, and what it says was measured was not typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adversary.attacks import ATTACKS
from adversary.misbehaviour import MISBEHAVIOURS
from common.config import ready_experiments

PAGE = (Path(__file__).parents[2] / "docs" / "adversaries.md").read_text(encoding="utf-8")


def part(name: str) -> str:
    """What stands between two markers."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    assert found is not None, f"no {name} in the page"
    return found[1]


def first_cells(text: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["attacks", "rules"])
def test_every_attack_has_its_measured_row(name: str) -> None:
    assert first_cells(part(name)) == set(ATTACKS)
    assert "…" not in part(name)


def test_every_attack_has_an_experiment() -> None:
    assert {f"attacks/{name}" for name in ATTACKS if name != "none"} <= set(ready_experiments())


def test_every_misbehaviour_is_explained_and_has_its_measured_row() -> None:
    assert first_cells(part("misbehaviours")) == set(MISBEHAVIOURS)
    explained = PAGE.partition("## Misbehaviour on the wire")[2].partition("<!-- misbehaviours -->")[0]
    rows = [line for line in explained.splitlines() if line.startswith("| `")]
    assert {name for line in rows for name in re.findall(r"`(\w+)`", line.split("|")[1])} == set(MISBEHAVIOURS)

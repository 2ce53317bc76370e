"""``byzuldp list`` shows everything that an experiment can name, and says what it is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from adversary.attacks import ATTACKS
from adversary.misbehaviour import MISBEHAVIOURS
from common.aggregation import BEFORE, RULES
from common.config import ready_experiments
from common.errors import ConfigError
from common.learning.models import MODELS
from common.learning.readers import DATASETS, TORCHVISION_NAMES
from deploy.chaos.scenario import ready_scenarios
from deploy.cli import app
from deploy.listing import items_of

KINDS = {
    "attacks": ATTACKS,
    "misbehaviours": MISBEHAVIOURS,
    "rules": {**RULES, **BEFORE},
    "models": MODELS,
    "datasets": DATASETS,
    "experiments": ready_experiments(),
    "scenarios": ready_scenarios(),
}


def listed(*words: str) -> str:
    return CliRunner().invoke(app, ["list", *words], catch_exceptions=False).stdout


def test_without_a_kind_the_kinds_are_named() -> None:
    assert listed().split() == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_of_a_kind_has_its_line_and_says_what_it_is(kind: str) -> None:
    lines = listed(kind).splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(KINDS[kind])
    for item in items_of(kind):
        assert len(item.about) > 10, item
        assert item.about.endswith((".", "…")), item


def test_parameters_and_their_defaults_are_told() -> None:
    assert "radius=10.0, iterations=1" in next(line for line in listed("rules").splitlines() if "centered" in line)
    assert "num_byzantine" not in listed("rules")


def test_what_an_attack_needs_to_know_and_where_it_is_from_is_told() -> None:
    for item in items_of("attacks"):
        assert set(item.facts) == {"needs", "source"}
        assert all(item.facts.values()) or item.name == "none", item


def test_json_has_the_same() -> None:
    assert [item["name"] for item in json.loads(listed("models", "--json"))] == sorted(MODELS)


def test_a_kind_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'attacks'"):
        items_of("attack")


def test_every_data_set_that_is_read_by_name_is_listed() -> None:
    assert TORCHVISION_NAMES.keys() <= DATASETS.keys()

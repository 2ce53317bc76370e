"""The experiment: what it accepts, what it refuses, and in which words."""

import json
from pathlib import Path

import pytest

from common.config import experiment_from, load_experiment, ready_experiments
from common.errors import ConfigError

MINIMAL = {"federation": {"clients": 5}, "training": {"rounds": 3}}


def built(**sections):
    return experiment_from(
        {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {*MINIMAL, *sections}}
    )


def refusal(**sections):
    with pytest.raises(ConfigError) as raised:
        built(**sections)
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(ready_experiments()))
def test_every_ready_experiment_loads_and_opens_with_what_it_shows_and_its_command(name):
    experiment = load_experiment(name)
    opening = ready_experiments()[name].read_text().split("\n\n[")[0]
    assert experiment.training.rounds > 0
    assert all(line.startswith("#") for line in opening.splitlines() if line)
    assert f"byzuldp run {name}" in opening
    assert "Expected" in opening


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    assert "training.learning_rat: unknown key; did you mean 'learning_rate'?" in refusal(training={"learning_rat": 1})


def test_an_unknown_section_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"trainig: unknown key; did you mean 'training'"):
        experiment_from({**MINIMAL, "trainig": {}})


def test_a_key_in_the_wrong_section_is_told_where_it_belongs():
    assert "it belongs to [federation]" in refusal(training={"clients_per_process": 3})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("federation", "clients", 0),
        ("federation", "byzantine", -1),
        ("training", "rounds", 0),
        ("training", "learning_rate", 0.0),
        ("training", "learning_rate", float("nan")),
        ("training", "learning_rate", float("inf")),
        ("training", "clip_norm", -1.0),
        ("training", "client_momentum", 1.0),
        ("training", "server_momentum", -0.1),
        ("training", "device", "gpu"),
        ("privacy", "epsilon", 0.0),
        ("privacy", "epsilon", float("nan")),
        ("privacy", "delta", 1.0),
        ("privacy", "calibration", "guess"),
        ("attack", "knowledge", "all"),
        ("data", "partition", "random"),
        ("network", "chunk_bytes", 10),
        ("network", "round_deadline_s", 0.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_and_value(section, key, value):
    message = refusal(**{section: {key: value}})
    assert f"{section}.{key} = {value!r}" in message


def test_all_errors_of_a_file_are_reported_at_once():
    message = refusal(training={"rounds": 0, "batch_size": 0}, privacy={"delta": 2})
    assert message.count("\n") == 3


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="federation: missing"):
        experiment_from({"training": {"rounds": 1}})


@pytest.mark.parametrize("byzantine", [5, 6])
def test_as_many_byzantine_as_clients_are_refused(byzantine):
    assert f"byzantine = {byzantine} must be smaller than clients = 5" in refusal(federation={"byzantine": byzantine})


def test_a_quorum_beyond_the_roster_is_refused():
    assert "quorum = 6 exceeds clients = 5" in refusal(federation={"quorum": 6})


@pytest.mark.parametrize(("n", "f", "needed"), [(20, 4, 16), (20, 9, 19), (5, 2, 5), (1, 0, 1), (300, 15, 240)])
def test_the_default_quorum_is_the_larger_of_2f_plus_1_and_four_fifths(n, f, needed):
    assert built(federation={"clients": n, "byzantine": f}).federation.needed == needed


def test_adversaries_are_the_last_ids_and_f_of_them_unless_told_otherwise():
    assert built(federation={"byzantine": 2}, attack={"name": "alie"}).adversary_ids == range(3, 5)
    assert built(federation={"byzantine": 2}, attack={"name": "alie", "adversaries": 1}).adversary_ids == range(4, 5)
    assert built(federation={"byzantine": 2}).num_adversaries == 0


def test_more_adversaries_than_clients_are_refused():
    assert "attack.adversaries = 6 exceeds" in refusal(attack={"name": "alie", "adversaries": 6})


def test_a_rules_own_parameters_are_kept_apart():
    section = built(aggregation={"rule": "x", "radius": 2.0}).aggregation
    assert section.parameters == {"radius": 2.0}


@pytest.mark.parametrize(("section", "key"), [("aggregation", "num_byzantine"), ("attack", "seed")])
def test_a_key_that_is_set_elsewhere_is_no_parameter_of_a_rule_or_an_attack(section, key):
    assert f"{key} is set elsewhere" in refusal(**{section: {key: 1}})


def test_a_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        built().training.rounds = 9


def test_set_overrides_a_value_with_toml_or_a_bare_string():
    experiment = load_experiment("mnist", ["training.rounds=7", "aggregation.rule=mean", "privacy.epsilon=3.5"])
    assert (experiment.training.rounds, experiment.aggregation.rule, experiment.privacy.epsilon) == (7, "mean", 3.5)


def test_set_reaches_a_schedule():
    text = 'training.schedule.learning_rate={kind="power", a=1.0, c=2.0, p=1.0}'
    assert load_experiment("mnist", [text]).training.schedule_of("learning_rate")(2) == 0.25


@pytest.mark.parametrize("text", ["training.rounds", "rounds=3", "=3", "training.=3", "training.rounds.x=3"])
def test_a_set_that_is_no_assignment_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--set"):
        load_experiment("mnist", [text])


def test_an_unknown_experiment_lists_the_ready_ones():
    with pytest.raises(ConfigError, match=r"no experiment 'nonsense'.*mnist"):
        load_experiment("nonsense")


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path):
    (tmp_path / "broken.toml").write_text("[training\nrounds=3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML.*line 1"):
        load_experiment(tmp_path / "broken.toml")


@pytest.mark.parametrize("name", sorted(ready_experiments()))
def test_a_stored_configuration_reads_back_as_itself(name):
    experiment = load_experiment(name)
    stored = json.loads(json.dumps(experiment.model_dump(mode="json")))
    assert experiment_from(stored) == experiment
    assert experiment_from(stored).fingerprint() == experiment.fingerprint()


def test_the_fingerprint_changes_with_a_public_value_and_not_with_a_private_one():
    one = load_experiment("mnist")
    assert load_experiment("mnist", ["training.clip_norm=2.0"]).fingerprint() != one.fingerprint()
    assert load_experiment("mnist", ["aggregation.rule=mean"]).fingerprint() != one.fingerprint()
    assert load_experiment("mnist", ["data.root=elsewhere"]).fingerprint() == one.fingerprint()
    assert load_experiment("mnist", ["network.address=127.0.0.1:9"]).fingerprint() == one.fingerprint()


def test_a_difference_is_told_by_key_and_both_values():
    ours, theirs = load_experiment("mnist"), load_experiment("mnist", ["training.batch_size=7"])
    assert ours.differences(theirs.public()) == ["training.batch_size is 10 here and 7 at the parameter server"]


def test_no_clipping_is_spelled_none():
    assert built(training={"clip_norm": "none"}).training.clip_norm is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"privacy": {"round_timing": "fixed"}}, "set privacy.epsilon"),
        ({"privacy": {"epsilon": 1.0, "premise": "strict"}}, 'needs privacy.round_timing = "fixed"'),
        (
            {
                "privacy": {"epsilon": 1.0, "premise": "strict", "round_timing": "fixed"},
                "federation": {"byzantine": 1},
                "attack": {"name": "alie", "adversaries": 2},
            },
            "covers f = 1 adversaries, not 2",
        ),
        (
            {
                "privacy": {"epsilon": 1.0, "round_timing": "fixed"},
                "network": {"round_period_s": 1.0, "publish_margin_s": 1.0},
            },
            "must be smaller than",
        ),
        ({"federation": {"weights": [1.0, 2.0]}}, "weights has 2 entries"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections, message):
    assert message in refusal(**sections)


def test_the_round_deadline_grows_with_the_model():
    network = built().network
    assert network.deadline_of_round(4_000_000, 100) > network.deadline_of_round(4_000, 100) > network.round_deadline_s


def test_an_experiments_own_folder_is_where_its_modules_are_found(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[federation]\nclients = 2\n[training]\nrounds = 1\n")
    assert load_experiment(path).folders == (Path(tmp_path).resolve(),)

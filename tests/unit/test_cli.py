"""The command line: what it accepts, what it refuses with which code, and that it is quick."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from federations import small_experiment
from made_run import make_run
from typer.testing import CliRunner

from common.config import experiment_from, load_experiment, ready_experiments
from common.errors import AttackError, ConfigError, Interrupted, StoreDamaged
from deploy import cli
from deploy.local import Ending, assign, new_run_dir
from deploy.origin import shadowed
from deploy.tokens import tokens_of
from deploy.toml import to_toml

TINY = """\
# A small one.
[federation]
clients = 7
byzantine = 2
clients_per_process = 2

[training]
rounds = 3

[attack]
name = "alie"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def invoke(*words: str) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*words: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words], capture_output=True, text=True, timeout=60, check=False, **kwargs
    )


# -------------------------------------------------------------------- quick, and clear when wrong


def test_help_needs_neither_torch_nor_grpc_nor_our_configuration() -> None:
    code = (
        "import sys, deploy.cli\n"
        "slow = {'torch', 'grpc', 'numpy', 'pydantic', 'common.config'} & set(sys.modules)\n"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_tree_is_one_message_and_its_code_and_no_traceback(tmp_path: Path) -> None:
    done = command("run", "mnist", "--set", "training.roundz=3", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.startswith("error: ")
    assert "did you mean 'rounds'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not (tmp_path / "run").exists()


def test_an_unknown_experiment_is_refused_with_the_names_of_those_there_are() -> None:
    done = command("show", "minst")
    assert done.returncode == ConfigError.exit_code
    assert "mnist_no_dp" in done.stderr


def test_a_wrong_command_line_is_code_2() -> None:
    assert command("run").returncode == 2
    assert command("client", "mnist").returncode == 2


def test_a_package_of_another_distribution_is_named_before_it_can_do_harm(tmp_path: Path) -> None:
    other = tmp_path / "common"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemError('the wrong package was imported')")
    root = str(Path(cli.__file__).parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {root!r}); import deploy.cli; "
        f"sys.path.insert(0, {str(tmp_path)!r}); deploy.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ConfigError.exit_code
    assert str(other / "__init__.py") in done.stderr
    assert "Traceback" not in done.stderr


def test_our_own_packages_are_where_they_belong() -> None:
    assert shadowed() == []


def test_a_missing_package_is_told_from_a_shadowed_one(tmp_path: Path) -> None:
    (sentence,) = shadowed(["no_such_package_of_ours"], tmp_path)
    assert "is missing" in sentence
    (sentence,) = shadowed(["json"], tmp_path)
    assert "would come from" in sentence


def test_ctrl_c_has_a_status_of_its_own() -> None:
    with pytest.raises(Interrupted), cli._interruptible():
        raise KeyboardInterrupt


# -------------------------------------------------------------------- show, experiments, version


@pytest.mark.parametrize("name", sorted(ready_experiments()))
def test_a_shown_experiment_can_be_run_again_as_it_is(name: str) -> None:
    shown = experiment_from(tomllib.loads(invoke("show", name)))
    loaded = load_experiment(name)
    assert shown.fingerprint() == loaded.fingerprint()
    assert shown.model_dump(exclude={"folder"}) == loaded.model_dump(exclude={"folder"})


def test_show_has_the_defaults_and_what_was_set(tiny: Path) -> None:
    tree = json.loads(invoke("show", str(tiny), "--json", "--set", "training.learning_rate=0.25"))
    assert tree["training"]["learning_rate"] == 0.25
    assert tree["network"]["heartbeat_s"] == 1.0


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": 1, "c": [1.5, True], "d": {"kind": "power", "a": 1e-9}}},
        {"top": 'ε = 1 "quoted"\n\t\\ \x7f', "a-b": {"no bare key": "x", "empty": []}},
        {"none": {"x": None}, "some": {"y": {"z": None, "w": 0}}},
    ],
)
def test_toml_says_what_the_tree_says(tree: dict) -> None:
    def without_none(value: object) -> object:
        if isinstance(value, dict):
            kept = {key: without_none(item) for key, item in value.items() if item is not None}
            return {key: item for key, item in kept.items() if item != {}}
        return value

    assert tomllib.loads(to_toml(tree)) == without_none(tree)


def test_experiments_are_listed_with_their_first_comment_line() -> None:
    lines = invoke("experiments").splitlines()
    assert len(lines) == len(ready_experiments())
    assert any(line.startswith("mnist_no_dp") and "without privacy" in line for line in lines)


def test_version() -> None:
    assert invoke("--version").startswith("byzuldp 0.")


# -------------------------------------------------------------------- ids and tokens


@pytest.mark.parametrize(("text", "ids"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("5, 0-2", [0, 1, 2, 5]), ("6-6", [6])])
def test_ids_are_numbers_and_ranges(text: str, ids: list[int]) -> None:
    assert cli._ids(text, 7) == ids


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "3-1", "7", "0-7", "1,1", "0-3,2", "1.5", "0--1"])
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ids"):
        cli._ids(text, 7)


def test_a_process_gets_its_own_tokens_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"0": "a", "1": "b", "2": "c"}))
    assert tokens_of(path, [0, 2]) == {0: "a", 2: "c"}
    with pytest.raises(ConfigError, match="no token of 3"):
        tokens_of(path, [0, 3])
    for wrong in ("[]", "{", '{"0": 1}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="--tokens"):
            tokens_of(path, [0])
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens_of(tmp_path / "none.json", [0])


def test_an_adversary_without_an_attack_is_refused(tiny: Path, tmp_path: Path) -> None:
    words = ["adversary", str(tiny), "--set", "attack.name=none", "--address", "127.0.0.1:1", "--tokens", "t.json"]
    result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, AttackError)


# -------------------------------------------------------------------- run: what is handed to the launcher


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Runs are not started; what they were asked for is kept, and ``ending`` says how they end."""
    seen: dict = {"ending": ("completed", "all rounds are done", {"status": "completed", "run_dir": "x"})}

    def run_locally(experiment, run_dir, display, *, resume):
        seen.update(experiment=experiment, run_dir=run_dir, resume=resume)
        status, message, summary = seen["ending"]
        return Ending(status, message, run_dir, summary)

    monkeypatch.setattr("deploy.local.run_locally", run_locally)
    return seen


def test_run_passes_on_what_was_set(launched: dict, tiny: Path) -> None:
    invoke("run", str(tiny), "--set", "training.rounds=9", "--set", "model.name=logistic", "--quiet")
    assert launched["experiment"].training.rounds == 9
    assert launched["experiment"].model.name == "logistic"
    assert launched["run_dir"].parent == Path("runs")
    assert launched["run_dir"].name.startswith("tiny-2")


def test_json_prints_the_summary_and_nothing_else_on_stdout(launched: dict, tiny: Path) -> None:
    assert json.loads(invoke("run", str(tiny), "--json")) == launched["ending"][2]


def test_json_is_json_without_a_summary_too(launched: dict, tiny: Path) -> None:
    launched["ending"] = ("failed", "the PS died", None)
    result = CliRunner().invoke(cli.app, ["run", str(tiny), "--json"])
    assert json.loads(result.stdout)["status"] == "failed"
    assert result.exit_code == 23


@pytest.mark.parametrize(
    ("status", "code"), [("completed", 0), ("quorum_lost", 21), ("interrupted", 22), ("attack_refused", 14)]
)
def test_a_runs_status_is_the_exit_code(launched: dict, tiny: Path, status: str, code: int) -> None:
    launched["ending"] = (status, "so it goes", None)
    result = CliRunner().invoke(cli.app, ["run", str(tiny), "--quiet"])
    assert result.exit_code == code
    assert ("so it goes" in result.stderr) == (code != 0)


def test_resume_needs_a_run_folder(launched: dict, tiny: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["run", str(tiny), "--resume"])
    assert isinstance(result.exception, ConfigError)
    result = CliRunner().invoke(cli.app, ["run", str(tiny), "--resume", "--run-dir", str(tmp_path / "none")])
    assert isinstance(result.exception, StoreDamaged)
    assert "experiment" not in launched


def test_a_resumed_run_keeps_its_configuration_and_another_is_refused(
    launched: dict, tiny: Path, tmp_path: Path
) -> None:
    stored = load_experiment(tiny, ["training.rounds=50"])
    (tmp_path / "experiment.json").write_text(json.dumps(stored.model_dump(mode="json")))
    result = CliRunner().invoke(cli.app, ["run", str(tiny), "--resume", "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "training.rounds is 3 here and 50 in the run folder" in str(result.exception)
    assert "experiment" not in launched
    same = [str(tiny), "--set", "training.rounds=50", "--set", "network.rpc_deadline_s=7"]
    for given in (same, ["--set", "network.rpc_deadline_s=7"]):
        invoke("run", *given, "--resume", "--run-dir", str(tmp_path))
        assert launched["experiment"].network.rpc_deadline_s == 7
        assert launched["experiment"].training.rounds == 50


@pytest.mark.parametrize(
    "change",
    [
        "training.clip_norm=0.5",
        "training.server_momentum=0.1",
        "federation.byzantine=0",
        "federation.clients=8",
        "aggregation.rule=mean",
        "privacy.epsilon=7",
    ],
)
def test_what_a_run_promised_does_not_change_on_a_resume(
    launched: dict, tiny: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "experiment.json").write_text(json.dumps(load_experiment(tiny).model_dump(mode="json")))
    result = CliRunner().invoke(cli.app, ["run", "--resume", "--run-dir", str(tmp_path), "--set", change])
    assert isinstance(result.exception, ConfigError)
    assert change.partition("=")[0] in str(result.exception)


def test_a_deleted_copy_of_the_configuration_is_taken_from_the_database(launched: dict, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_experiment(training={"rounds": 2}))
    (run / "experiment.json").unlink()
    invoke("run", "--resume", "--run-dir", str(run))
    assert launched["experiment"].training.rounds == 2


def test_two_runs_of_the_same_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.local.time.strftime", lambda *_: "20260101T000000Z")
    first = new_run_dir("mnist")
    first.mkdir(parents=True)
    assert new_run_dir("mnist") != first


# -------------------------------------------------------------------- who does what


def test_identities_are_dealt_to_processes_in_order_and_once(tiny: Path, tmp_path: Path) -> None:
    parts = assign(load_experiment(tiny), tmp_path)
    assert [part.name for part in parts] == ["check", "ps", "client-0", "client-1", "client-2", "adversary"]
    assert [part.ids for part in parts] == [(), (), (0, 1), (2, 3), (4,), (5, 6)]


def test_the_parameter_server_is_given_hashes_and_a_client_its_own_tokens(tiny: Path, tmp_path: Path) -> None:
    _, server, *peers = assign(load_experiment(tiny), tmp_path)
    assert not server.tokens
    assert sorted(server.token_hashes) == list(range(7))
    tokens = [token for peer in peers for token in peer.tokens.values()]
    assert len(set(tokens)) == 7
    for peer in peers:
        assert tuple(peer.tokens) == peer.ids
        assert not peer.token_hashes
        assert not any(token in repr(peer) for token in tokens)


def test_an_experiment_survives_the_way_to_a_child(tiny: Path, tmp_path: Path) -> None:
    overrides = ["training.schedule.learning_rate={kind='power', a=1, c=1, p=0.5}", "aggregation.tau=2.5"]
    experiment = load_experiment(tiny, overrides)
    child = assign(experiment, tmp_path)[2]
    assert child.load() == experiment

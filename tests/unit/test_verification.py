"""A ledger is believed only as far as it can be recomputed."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import small_experiment
from made_run import make_run
from typer.testing import CliRunner

from common.errors import ConfigError, PrivacyError, RunFailed, ServerRolledBack, StoreDamaged
from deploy import cli
from ps.privacy.ledger import Budget, Ledger, cost_of, from_json
from ps.reader import RunReader
from ps.store import PreparedRound, RunStore
from ps.verification import verify_run

PRIVATE = {"epsilon": 3.0, "delta": 1e-3}
TWELVE = {"rounds": 12, "server_momentum": 0.5}


def private_experiment(**sections: Any):
    given = {"privacy": PRIVATE, "training": TWELVE, "aggregation": {"rule": "trimmed_mean"}}
    return small_experiment(**{name: given.get(name, {}) | sections.get(name, {}) for name in given | sections})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sound") / "run", private_experiment())


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def ledger_of(run: Path) -> Ledger:
    return Ledger.restored((row, head) for _, row, head in RunReader(run).ledger_rows())


def rewrite(run: Path, change: Callable[[int, Any], Any]) -> None:
    """Change rows of a stored ledger and chain them anew, as somebody would who wants it to pass."""
    with sqlite3.connect(run / "run.sqlite") as database:
        database.executescript("DROP TRIGGER ledger_rows_stay; DROP TRIGGER ledger_rows_live;")
        head = bytes(32)
        for round_id, text in database.execute("SELECT round_id, entry FROM ledger ORDER BY round_id").fetchall():
            row = change(round_id, from_json(text)).to_json()
            head = sha256(head + row.encode()).digest()
            database.execute("UPDATE ledger SET entry = ?, head = ? WHERE round_id = ?", (row, head, round_id))
    database.close()


def continue_run(run: Path, rounds: int) -> None:
    """Add rounds, as a resumed server would."""
    ledger = ledger_of(run)
    with RunStore.open(run) as store:
        for round_id in range(ledger.next_round, rounds):
            entry = replace(ledger.entries[-1], round_id=round_id, nonce=secrets.token_hex(32))
            ledger = ledger.append(entry)
            latest = store.latest()
            store.commit(PreparedRound(round_id + 1, latest.theta, latest.server_momentum, entry.to_json(), 5))
        store.finish("interrupted")


def failed(run: Path) -> dict[str, str]:
    found = verify_run(run)
    assert not found.holds
    assert not found.private
    return {check.name: check.found for check in found.checks if not check.holds}


def test_a_sound_run_holds_and_is_accounted_twice(sound):
    found = verify_run(sound)
    assert found.holds
    assert found.private
    assert (found.rounds, found.planned, found.epsilon, found.delta) == (12, 12, 3.0, 1e-3)
    assert found.epsilon_spent == pytest.approx(3.0, rel=1e-6)
    assert found.epsilon_pld == pytest.approx(3.0, rel=1e-3)
    assert found.epsilon_renyi > found.epsilon_exact
    assert found.sensitivity == pytest.approx(2 / 3)
    assert [check.name for check in found.checks] == [
        "chain", "configuration", "model", "promise", "sensitivity", "budget", "accountants",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"server_momentum_form": "inside"}},
        {"privacy": {"missing": "rescale"}},
        {"privacy": {"calibration": "renyi"}},
        {"privacy": {"calibration": "renyi", "noise": "discrete"}},
        {"aggregation": {"rule": "krum"}},
        {"aggregation": {"rule": "normalized_mean"}, "federation": {"weights": "samples"}},
        {"privacy": {"premise": "strict", "round_timing": "fixed"}},
    ],
    ids=str,
)
def test_every_kind_of_mechanism_is_recomputed(tmp_path, sections):
    absent = {1: (4,), 2: (0, 1)}
    experiment = private_experiment(**sections)
    run = make_run(tmp_path / "run", experiment, rounds=4, absent=lambda round_id: absent.get(round_id, ()))
    found = verify_run(run)
    assert found.holds, found.checks
    assert 0 < found.epsilon_spent < 3


def test_an_epsilon_beyond_all_use_is_not_given_to_an_accountant_that_would_never_end(tmp_path):
    run = make_run(tmp_path / "run", private_experiment(privacy={"epsilon": 1e5}), rounds=12)
    found = verify_run(run)
    assert found.holds
    assert found.epsilon_exact == pytest.approx(1e5, rel=1e-6)
    assert found.epsilon_pld is None


def test_a_run_without_privacy_holds_and_claims_nothing(tmp_path):
    run = make_run(tmp_path / "run", private_experiment(privacy={"epsilon": None}), rounds=2)
    found = verify_run(run)
    assert found.holds
    assert not found.private
    assert (found.epsilon, found.epsilon_spent, found.epsilon_pld) == (None, None, None)


def test_rounds_with_fewer_answers_are_charged_more_where_absent_clients_are_left_out(tmp_path):
    experiment = private_experiment(privacy={"missing": "rescale"})
    run = make_run(tmp_path / "run", experiment, rounds=2, absent=lambda round_id: (3,) if round_id else ())
    whole, short = ledger_of(run).entries
    assert (whole.sensitivity, short.sensitivity) == (pytest.approx(2 / 3), pytest.approx(2 / 2))
    assert short.sigma / whole.sigma == pytest.approx(3 / 2)
    assert any(premise.startswith("P5") for premise in verify_run(run).premises)


def test_a_smaller_sensitivity_than_the_rules_is_found(run):
    def understate(round_id, row):
        if round_id == 0:
            return replace(row, sensitivity=2 / 5)
        return replace(row, sensitivity=2 / 5, sigma=row.noise_multiplier * 2 / 5 * (1 + 1e-15))

    rewrite(run, understate)
    assert re.search(r"round 0 states S = 0.4, recomputed 0.666", failed(run)["sensitivity"])


def test_a_smaller_multiplier_than_the_budget_needs_is_found(run):
    def understate(round_id, row):
        z = row.noise_multiplier * 0.9
        return replace(row, noise_multiplier=z) if round_id == 0 else replace(row, noise_multiplier=z, sigma=row.sigma)

    rewrite(run, understate)
    assert {"promise", "budget"} <= failed(run).keys()


def test_a_larger_budget_than_was_promised_is_found_in_the_configuration(run):
    rewrite(run, lambda round_id, row: replace(row, epsilon=10.0) if round_id == 0 else row)
    assert "epsilon = 10.0, not 3.0" in failed(run)["promise"]


@pytest.mark.parametrize(
    ("field", "forged"),
    [
        ("premises", ()),
        ("premises", ("P0: the moon is made of cheese",)),
        ("delta", 1e-9),
        ("rounds", 1000),
        ("neighbouring", "any number of clients replaced"),
        ("calibration", "renyi"),
        ("num_byzantine", 2),
        ("carried", 0.25),
        ("fingerprint", "ab" * 32),
    ],
)
def test_row_0_is_not_believed(run, field, forged):
    def forge(round_id, row):
        if round_id == 0:
            return replace(row, **{field: forged})
        return replace(row, **{field: forged}) if field in ("premises", "num_byzantine") else row

    rewrite(run, forge)
    assert field in failed(run)["promise"]


def test_more_noise_than_the_row_claims_is_found_too(run):
    rewrite(run, lambda round_id, row: replace(row, sigma=row.sigma * 1e9) if round_id else row)
    assert "states σ" in failed(run)["sensitivity"]


def test_rows_missing_from_a_completed_run_are_found(run):
    with sqlite3.connect(run / "run.sqlite") as database:
        database.executescript(
            "DROP TRIGGER ledger_rows_live; DELETE FROM models WHERE round_id = 12;"
            "DELETE FROM ledger WHERE round_id = 12; UPDATE run SET round_id = 11;"
        )
    database.close()
    (run / "models" / "model-12.safetensors").unlink()
    assert "rows are missing" in failed(run)["model"]


def test_a_changed_configuration_is_found(run):
    with sqlite3.connect(run / "run.sqlite") as database:
        (text,) = database.execute("SELECT configuration FROM run").fetchone()
        configuration = json.loads(text)
        configuration["training"]["clip_norm"] = 0.5
        database.execute("UPDATE run SET configuration = ?", (json.dumps(configuration),))
    database.close()
    assert {"configuration", "promise", "sensitivity"} <= failed(run).keys()


def test_a_row_changed_without_its_chain_is_damage(run):
    with sqlite3.connect(run / "run.sqlite") as database:
        database.executescript("DROP TRIGGER ledger_rows_stay;")
        database.execute(
            "UPDATE ledger SET entry = replace(entry, '\"answers\":5', '\"answers\":4') WHERE round_id = 3"
        )
    database.close()
    with pytest.raises(StoreDamaged, match="row of round 3 does not fit the hash chain"):
        verify_run(run)


def test_a_model_that_is_not_the_committed_one_is_found(run):
    newest = run / "models" / "model-12.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x01")
    assert "model-12.safetensors" in failed(run)["model"]


def test_a_database_older_than_its_models_is_a_rollback_that_verify_sees(run):
    newest = run / "models" / "model-12.safetensors"
    shutil.copy(newest, newest.with_name("model-13.safetensors"))
    with pytest.raises(StoreDamaged, match="older than its folder"):
        verify_run(run)


def test_a_run_folder_shows_others_only_what_is_public(run, sound):
    def mode(name):
        return (sound / name).stat().st_mode & 0o777

    assert (mode("run.sqlite"), mode("models"), mode("operator")) == (0o600, 0o700, 0o700)
    assert mode("public") & 0o055 == 0o055


def test_a_model_published_behind_the_public_schedule_brings_back_what_the_schedule_removed(tmp_path):
    fixed = {"round_timing": "fixed"}
    for premise, private in (("independent", True), ("strict", False)):
        run = make_run(tmp_path / premise, private_experiment(privacy={"premise": premise, **fixed}), rounds=2)
        assert "P1-P4" not in verify_run(run).private_because
        with RunStore.open(run) as store:
            store.note_late(1)
        found = verify_run(run)
        assert found.private is private
        assert ("P1-P4" if private else "behind the public schedule") in found.private_because


def test_a_head_that_is_none_is_no_rollback(sound):
    head = RunReader(sound).ledger_rows()[-1][2].hex()
    assert verify_run(sound, remembered=head[:16]).remembered_round == 12
    for wrong in ("zz", head[:8], head + "0"):
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            verify_run(sound, remembered=wrong)


def test_a_remembered_head_names_its_round_and_a_foreign_one_is_a_rollback(sound, tmp_path):
    rows = RunReader(sound).ledger_rows()
    assert verify_run(sound, remembered=rows[7][2].hex().upper()).remembered_round == 7
    shorter = make_run(tmp_path / "run", private_experiment(), rounds=3)
    with pytest.raises(ServerRolledBack, match="none of the 4 rows"):
        verify_run(shorter, remembered=rows[7][2].hex())


def test_the_command_prints_what_was_recomputed_and_fails_with_its_code(sound, run):
    shown = CliRunner().invoke(cli.app, ["privacy", "verify", str(sound)])
    assert shown.exit_code == 0
    assert "ε = 3 at δ = 0.001" in shown.stdout
    assert "P3:" in shown.stdout
    facts = json.loads(CliRunner().invoke(cli.app, ["privacy", "verify", str(sound), "--json"]).stdout)
    assert facts["holds"] is True
    assert facts["head"] == RunReader(sound).ledger_rows()[-1][2].hex()
    rewrite(run, lambda round_id, row: replace(row, epsilon=10.0) if round_id == 0 else row)
    result = CliRunner().invoke(cli.app, ["privacy", "verify", str(run)])
    assert isinstance(result.exception, PrivacyError)
    assert "the ledger does not hold" in str(result.exception)


# -------------------------------------------------------------------- earlier runs


def next_to(*previous: Path, epsilon: float = 6.0, **privacy: Any):
    return private_experiment(privacy={"epsilon": epsilon, "previous": [str(run) for run in previous], **privacy})


def test_a_run_continues_the_budget_of_an_earlier_one(sound, tmp_path):
    run = make_run(tmp_path / "run", next_to(sound))
    genesis, earlier = ledger_of(run).genesis, ledger_of(sound)
    assert genesis.carried == pytest.approx(float(earlier.spent), rel=1e-15)
    assert genesis.carried >= earlier.spent
    assert genesis.previous[0].startswith(f"{earlier.genesis.run_id} {earlier.head.hex()} ")
    alone = Budget(6.0, 1e-3, 12)
    assert genesis.noise_multiplier > alone.noise_multiplier
    found = verify_run(run)
    assert found.holds
    assert found.epsilon_spent == pytest.approx(6.0, rel=1e-6)
    assert found.epsilon_pld == pytest.approx(6.0, rel=1e-3)


def test_an_earlier_run_that_could_be_resumed_counts_with_all_it_planned(tmp_path):
    cut = make_run(tmp_path / "cut", private_experiment(), rounds=3, status="interrupted")
    z = ledger_of(cut).genesis.noise_multiplier
    run = make_run(tmp_path / "run", next_to(cut), rounds=1)
    assert ledger_of(run).genesis.carried == pytest.approx(float(12 * cost_of(z)), rel=1e-12)


def test_the_same_earlier_run_named_twice_counts_once_also_through_another(sound, tmp_path):
    second = make_run(tmp_path / "second", next_to(sound), rounds=12)
    once = make_run(tmp_path / "once", next_to(second, epsilon=9.0), rounds=1)
    twice = make_run(tmp_path / "twice", next_to(sound, second, sound, epsilon=9.0), rounds=1)
    assert ledger_of(once).genesis.carried == ledger_of(twice).genesis.carried
    assert len(ledger_of(once).genesis.previous) == 2


def test_two_histories_of_one_run_are_refused(tmp_path):
    first = make_run(tmp_path / "first", private_experiment(), rounds=2, status="interrupted")
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    for folder in (first, copy):
        continue_run(folder, rounds=4)
    with pytest.raises(PrivacyError, match="two histories"):
        make_run(tmp_path / "run", next_to(first, copy), rounds=1)


def test_an_older_telling_of_the_same_history_is_the_same_run(tmp_path):
    first = make_run(tmp_path / "first", private_experiment(), rounds=2, status="interrupted")
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    continue_run(first, rounds=4)
    run = make_run(tmp_path / "run", next_to(copy, first), rounds=1)
    assert verify_run(run).holds
    assert verify_run(run).previous == (ledger_of(first).genesis.run_id,)


def test_the_narrower_relation_of_earlier_runs_holds_for_this_one(tmp_path):
    sized = {"aggregation": {"rule": "normalized_mean"}, "federation": {"weights": "samples"}}
    earlier = make_run(tmp_path / "earlier", private_experiment(**sized), rounds=1)
    run = make_run(tmp_path / "run", next_to(earlier), rounds=1)
    assert ledger_of(run).genesis.neighbouring == "one client's data replaced by as many samples"
    assert verify_run(run).holds


def test_earlier_runs_that_released_more_since_are_found(tmp_path):
    first = make_run(tmp_path / "first", private_experiment(), rounds=2, status="interrupted")
    run = make_run(tmp_path / "run", next_to(first), rounds=1)
    assert verify_run(run).holds

    def forget(round_id, row):
        cost = row.previous[0].rpartition(" ")[0] + " 0.001" if round_id == 0 else ""
        return replace(row, previous=(cost,), carried=0.001) if round_id == 0 else row

    rewrite(run, forget)
    assert "they cost" in failed(run)["earlier runs"]


def test_premises_of_earlier_runs_are_this_runs_too(sound, tmp_path):
    experiment = next_to(sound, premise="strict", round_timing="fixed")
    run = make_run(tmp_path / "run", experiment, rounds=1)
    assert [premise[:2] for premise in verify_run(run).premises] == ["P1", "P2", "P3", "P4"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"privacy": {"epsilon": None}}, "no noise was asked for"),
        ({"privacy": {"noise_seed": 3}}, "noise_seed"),
        ({"attack": {"name": "ipm", "knowledge": "omniscient"}}, "wiretap"),
        ({"attack": {"name": "ipm"}, "data": {"deal_to": "honest"}}, "copies of honest clients' data"),
    ],
)
def test_nothing_private_continues_what_was_not(tmp_path, spoil, said):
    earlier = make_run(tmp_path / "earlier", private_experiment(**spoil), rounds=1)
    with pytest.raises(PrivacyError, match=said):
        make_run(tmp_path / "run", next_to(earlier))


def test_discrete_noise_is_continued_under_renyi_alone(tmp_path):
    discrete = {"noise": "discrete", "calibration": "renyi"}
    earlier = make_run(tmp_path / "earlier", private_experiment(privacy=discrete), rounds=1)
    with pytest.raises(PrivacyError, match="zCDP"):
        make_run(tmp_path / "run", next_to(earlier), rounds=1)
    second = make_run(tmp_path / "second", next_to(earlier, calibration="renyi"), rounds=1)
    with pytest.raises(PrivacyError, match="zCDP"):
        make_run(tmp_path / "third", next_to(second, epsilon=9.0), rounds=1)


def test_a_published_head_does_not_tell_how_many_answered(tmp_path):
    """Else a client's absence, which the noise covers, could be read from a hash by trying all numbers."""
    run = make_run(tmp_path / "run", private_experiment(), rounds=2, absent=lambda _: (2,))
    ledger = ledger_of(run)
    nonces = [row.nonce for row in (ledger.genesis, *ledger.entries)]
    assert len(set(nonces)) == 3
    assert all(len(bytes.fromhex(nonce)) == 32 for nonce in nonces)
    with pytest.raises(PrivacyError, match="nonce = '1234'"):
        replace(ledger.entries[0], nonce="1234")


def test_a_run_that_fails_for_what_was_released_pays_for_it(tmp_path):
    wild = private_experiment(training={"learning_rate": 1e38, "clip_norm": 1e3, "server_momentum": 0.0})
    with pytest.raises(RunFailed, match="non-finite"):
        make_run(tmp_path / "run", wild, rounds=3)
    ledger = ledger_of(tmp_path / "run")
    assert ledger.next_round >= 1
    round_id, theta, _ = RunReader(tmp_path / "run").last_model()
    assert round_id == ledger.next_round
    assert np.isfinite(theta).all()
    assert verify_run(tmp_path / "run").holds


def test_a_spent_budget_or_a_folder_without_a_run_is_refused(sound, tmp_path):
    with pytest.raises(PrivacyError, match="nothing is left"):
        make_run(tmp_path / "run", next_to(sound, epsilon=3.0))
    with pytest.raises(PrivacyError, match=r"privacy.previous: .*run.sqlite is missing"):
        make_run(tmp_path / "run", next_to(tmp_path))

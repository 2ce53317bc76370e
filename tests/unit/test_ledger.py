"""The ledger keeps an unbroken, checkable history; the budget admits what was planned and nothing more."""

import json
import math
import random
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest

from common.errors import PrivacyError, StoreDamaged
from common.privacy.calibration import epsilon_exact, epsilon_renyi, sigma_of
from ps.privacy.ledger import Budget, Genesis, Ledger, LedgerEntry, cost_of, from_json
from ps.privacy.premises import premises_of

PREMISES = premises_of()
GENESIS = Genesis(
    fingerprint="ab" * 32,
    configuration="cd" * 32,
    run_id="run-1",
    epsilon=20.0,
    delta=1e-3,
    rounds=5,
    calibration="exact",
    noise_multiplier=3.7,
    sensitivity=2 / 12,
    num_clients=20,
    num_byzantine=4,
    rule="trimmed_mean",
    premises=PREMISES,
    at=1.7e9,
)


def entry(round_id: int, **changes) -> LedgerEntry:
    values = {
        "round_id": round_id,
        "noise_multiplier": 3.7,
        "sensitivity": 2 / 12,
        "sigma": sigma_of(changes.get("noise_multiplier", 3.7), changes.get("sensitivity", 2 / 12)),
        "num_clients": 20,
        "answers": 18,
        "num_byzantine": 4,
        "rule": "trimmed_mean",
        "premises": PREMISES,
        "at": 1.7e9 + round_id / 3,
        "nonce": f"{round_id:064x}",
    }
    return LedgerEntry(**values | changes)


def unnoised(round_id: int) -> LedgerEntry:
    return entry(round_id, noise_multiplier=0.0, sensitivity=0.0, sigma=0.0, mechanism="none")


def ledger_of(rounds: int, genesis: Genesis = GENESIS, **changes) -> Ledger:
    ledger = Ledger.opened(genesis)
    for round_id in range(rounds):
        ledger = ledger.append(entry(round_id, **changes))
    return ledger


def test_a_row_reads_back_exactly_as_it_was_written():
    for row in (GENESIS, entry(3), unnoised(0), entry(1, sensitivity=0.1 + 0.2, at=np.nextafter(1.7e9, 2e9))):
        again = from_json(row.to_json())
        assert again == row
        assert again.to_json() == row.to_json()


def test_one_value_has_one_spelling():
    assert entry(3, answers=np.int64(18), at=1_700_000_000).to_json() == entry(3, at=1.7e9).to_json()
    assert json.loads(entry(3).to_json())["kind"] == "round"


def test_a_stored_ledger_is_restored_with_the_same_head():
    ledger = ledger_of(4)
    again = Ledger.restored(ledger.rows(), head=ledger.head)
    assert again == ledger
    assert again.last == entry(3)
    assert Ledger.restored(Ledger.opened(GENESIS).rows()).last == GENESIS


def test_appending_leaves_the_ledger_before_as_it_was():
    before = ledger_of(2)
    after = before.append(entry(2))
    assert (before.next_round, after.next_round) == (2, 3)
    assert before.head != after.head
    assert after.rows()[:-1] == before.rows()
    with pytest.raises(FrozenInstanceError):
        before.head = after.head


def test_equal_heads_mean_equal_histories():
    heads = {ledger_of(3).head}
    heads.add(ledger_of(3, replace(GENESIS, run_id="run-2")).head)
    heads.add(Ledger.opened(GENESIS).append(entry(0)).append(entry(1, answers=17)).append(entry(2)).head)
    heads.add(ledger_of(2).head)
    assert len(heads) == 4


@pytest.mark.parametrize("round_id", [0, 1, 3])
def test_no_round_is_skipped_or_noised_twice(round_id):
    with pytest.raises(PrivacyError, match="expected round 2; no round is skipped or noised twice"):
        ledger_of(2).append(entry(round_id))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_clients", {"num_clients": 21}),
        ("num_byzantine", {"num_byzantine": 3}),
        ("rule", {"rule": "mean"}),
        ("sensitivity", {"sensitivity": 2 / 20}),
        ("noise_multiplier", {"noise_multiplier": 3.6}),
        ("premises", {"premises": PREMISES[:2]}),
    ],
)
def test_what_was_fixed_before_round_0_cannot_change(name, changes):
    with pytest.raises(PrivacyError, match=rf"{name} = .* in round 1: fixed before round 0"):
        ledger_of(1).append(entry(1, **changes))


def test_what_was_left_open_may_change():
    ledger = Ledger.opened(replace(GENESIS, noise_multiplier=None))
    ledger = ledger.append(entry(0, noise_multiplier=4.0)).append(entry(1, noise_multiplier=2.0))
    assert ledger.mu == pytest.approx(math.sqrt(1 / 16 + 1 / 4), rel=1e-14)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda rows: rows[1:], "row 0 is a round row"),
        (lambda rows: rows[:2] + rows[3:], "row 2 does not belong.*expected round 1"),
        (lambda rows: [*rows[:2], rows[1]], "row 2 does not belong.*expected round 1"),
        (lambda rows: [*rows, rows[0]], "row 4 is a genesis row"),
        (
            lambda rows: [*rows[:3], (rows[3][0].replace('"answers":18', '"answers":19'), rows[3][1])],
            "row 3 was changed",
        ),
        (lambda rows: [(rows[0][0].replace("run-1", "run-2"), rows[0][1]), *rows[1:]], "row 0 was changed"),
        (lambda rows: [*rows[:3], (rows[3][0], bytes(32))], "row 3 was changed"),
        (lambda rows: rows[:3], "ends at head"),
        (lambda rows: rows[:0], "empty"),
        (lambda rows: [(rows[0][0][:40], rows[0][1])], "cannot be read"),
        (lambda rows: [(rows[0][0] + " ", rows[0][1])], "not in canonical form"),
        (lambda rows: [(rows[0][0].replace('"version":2', '"version":3'), rows[0][1])], "version = 3"),
        (lambda rows: [("[]", rows[0][1])], "cannot be read"),
    ],
)
def test_every_damage_to_the_stored_rows_is_noticed(damage, said):
    ledger = ledger_of(3)
    with pytest.raises(StoreDamaged, match=said):
        Ledger.restored(damage(ledger.rows()), head=ledger.head)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sigma": 3.7 * 2 / 16}, "sigma = .* is below"),
        ({"answers": 21}, "answers = 21"),
        ({"num_byzantine": 20}, "num_byzantine = 20"),
        ({"noise_multiplier": 0.0, "sigma": 0.0}, "mechanism 'none'"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0"),
        ({"mechanism": "none"}, "mechanism none with"),
        ({"mechanism": "laplace"}, "mechanism = 'laplace'"),
        ({"sensitivity": math.nan, "sigma": 1.0}, "sensitivity = nan"),
        ({"sigma": math.inf}, "sigma = inf"),
        ({"answers": True}, "answers = True"),
        ({"answers": 18.0}, "answers = 18.0"),
        ({"rule": None}, "rule = None"),
        ({"premises": "P1"}, "premises = 'P1'"),
    ],
)
def test_a_row_that_claims_too_much_or_makes_no_sense_is_refused(changes, said):
    with pytest.raises(PrivacyError, match=said):
        entry(2, **changes)


def test_a_promise_needs_epsilon_delta_and_noise():
    with pytest.raises(PrivacyError, match="give both"):
        replace(GENESIS, delta=None)
    with pytest.raises(PrivacyError, match="no noise gives no guarantee"):
        replace(GENESIS, noise_multiplier=0.0)
    with pytest.raises(PrivacyError, match="calibration = 'moments'"):
        replace(GENESIS, calibration="moments")


def test_what_was_spent_is_recomputed_from_the_releases():
    ledger = ledger_of(5)
    assert ledger.epsilon_spent(1e-3) == pytest.approx(epsilon_exact(3.7, 5, 1e-3), rel=1e-12)
    assert ledger.epsilon_spent(1e-3, "renyi") == pytest.approx(epsilon_renyi(3.7, 5, 1e-3), rel=1e-12)
    assert Ledger.restored(ledger.rows()).epsilon_spent(1e-3) == ledger.epsilon_spent(1e-3)
    assert Ledger.opened(GENESIS).epsilon_spent(1e-3) == 0.0


def test_one_release_without_noise_costs_everything():
    promise = {"epsilon": None, "delta": None, "noise_multiplier": 0.0, "sensitivity": 0.0, "mechanism": "none"}
    ledger = Ledger.opened(replace(GENESIS, **promise)).append(unnoised(0))
    assert ledger.epsilon_spent(1e-3) == math.inf
    assert ledger.append(unnoised(1)).epsilon_spent(1e-3) == math.inf
    assert not Budget(1e6, 1e-3, 5).admits(ledger, 1e6)
    assert Ledger.restored(ledger.rows()).spent is None


def test_a_private_run_has_no_release_without_noise():
    with pytest.raises(PrivacyError, match="mechanism = 'none' in round 0: fixed before round 0 as 'gaussian'"):
        Ledger.opened(replace(GENESIS, noise_multiplier=None, sensitivity=None)).append(unnoised(0))
    with pytest.raises(PrivacyError, match="noise and a promise go together"):
        replace(GENESIS, mechanism="none")


def test_discrete_noise_is_accounted_by_renyi_alone():
    assert replace(GENESIS, mechanism="discrete", calibration="renyi").mechanism == "discrete"
    with pytest.raises(PrivacyError, match="zCDP"):
        replace(GENESIS, mechanism="discrete", calibration="exact")


@pytest.mark.parametrize("calibration", ["exact", "renyi"])
@pytest.mark.parametrize("seed", range(50))
def test_what_earlier_runs_spent_is_not_spent_again(calibration, seed):
    random.seed(1000 + seed)
    rounds, earlier = random.randint(1, 40), random.randint(1, 40)
    eps, delta = 10 ** random.uniform(-1, 2), 10 ** random.uniform(-10, -2)
    whole = Budget(eps, delta, rounds + earlier, calibration)
    carried = math.nextafter(float(cost_of(whole.noise_multiplier) * earlier), math.inf)
    budget = Budget(eps, delta, rounds, calibration, carried)
    z = budget.noise_multiplier
    assert z == pytest.approx(whole.noise_multiplier, rel=1e-6)
    genesis = replace(
        GENESIS, epsilon=eps, delta=delta, rounds=rounds, calibration=calibration, noise_multiplier=z, carried=carried
    )
    assert Budget.of(genesis) == budget
    ledger = Ledger.opened(genesis)
    assert ledger.epsilon_spent(delta, calibration) > 0
    for round_id in range(rounds):
        assert budget.admits(ledger, z)
        ledger = ledger.append(entry(round_id, noise_multiplier=z))
    assert not budget.admits(ledger, z)
    assert Ledger.restored(ledger.rows()) == ledger
    assert ledger.epsilon_spent(delta, calibration) <= eps


def test_a_budget_that_earlier_runs_have_spent_is_refused():
    spent = float(cost_of(Budget(4.0, 1e-5, 10).noise_multiplier) * 10)
    with pytest.raises(PrivacyError, match=r"has spent epsilon = 4 at delta = 1e-05 of epsilon = 3.99"):
        _ = Budget(3.99, 1e-5, 10, carried=spent)


def test_the_cost_of_a_release_is_rounded_up_by_next_to_nothing():
    for z in (5e-324, 1e-200, 0.1, 3.7, 1e9, 1.7e308):
        exact = 1 / Fraction(z) ** 2
        assert exact <= cost_of(z) < exact + Fraction(1, 2**2199)
    assert cost_of(0.0) is None


@pytest.mark.parametrize("z", [1e-300, 1e-200, 1e200, 1.7e308])
def test_extreme_multipliers_are_recorded_without_overflow(z):
    genesis = replace(GENESIS, noise_multiplier=None, sensitivity=None)
    ledger = Ledger.opened(genesis).append(entry(0, noise_multiplier=z, sensitivity=1.0))
    assert ledger.mu == pytest.approx(1 / z, rel=1e-12)


@pytest.mark.parametrize("calibration", ["exact", "renyi"])
@pytest.mark.parametrize("seed", range(60))
def test_every_planned_round_is_admitted_and_not_one_more(calibration, seed):
    random.seed(seed)
    rounds = random.randint(1, 40)
    eps, delta = 10 ** random.uniform(-2, 2.5), 10 ** random.uniform(-10, -1)
    budget = Budget(eps, delta, rounds, calibration)
    z = budget.noise_multiplier
    genesis = replace(GENESIS, epsilon=eps, delta=delta, rounds=rounds, calibration=calibration, noise_multiplier=z)
    assert Budget.of(genesis) == budget
    ledger = Ledger.opened(genesis)
    for round_id in range(rounds):
        assert budget.admits(ledger, z)
        ledger = ledger.append(entry(round_id, noise_multiplier=z))
    assert not budget.admits(ledger, z)
    assert ledger.epsilon_spent(delta, calibration) <= eps
    assert ledger.spent * (1 + Fraction(1, 10**8)) > budget.limit  # and next to nothing was wasted


def test_the_last_planned_round_of_a_very_long_run_is_admitted():
    rounds = 10**6
    budget = Budget(8.0, 1e-5, rounds)
    almost = Ledger(GENESIS, (), bytes(32), cost_of(budget.noise_multiplier) * (rounds - 1))
    assert budget.admits(almost, budget.noise_multiplier)
    full = Ledger(GENESIS, (), bytes(32), cost_of(budget.noise_multiplier) * rounds)
    assert not budget.admits(full, budget.noise_multiplier)


def test_multipliers_may_differ_as_long_as_their_sum_fits():
    budget = Budget(20.0, 1e-3, 2)
    ledger = Ledger.opened(replace(GENESIS, noise_multiplier=None))
    z = budget.noise_multiplier
    ledger = ledger.append(entry(0, noise_multiplier=z * 2))
    assert not budget.admits(ledger, z * 0.7)
    assert budget.admits(ledger, z)
    ledger = ledger.append(entry(1, noise_multiplier=z))
    assert budget.admits(ledger, z * math.sqrt(4 / 3) * (1 + 1e-9))
    assert not budget.admits(ledger, z * math.sqrt(4 / 3) * (1 - 1e-8))


def test_a_budget_admits_no_release_without_noise_and_no_nonsense():
    budget, ledger = Budget(20.0, 1e-3, 2), Ledger.opened(GENESIS)
    assert not budget.admits(ledger, 0.0)
    for z in (-1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="expected a finite number"):
            budget.admits(ledger, z)
    with pytest.raises(PrivacyError, match="epsilon = -1"):
        Budget(-1, 1e-3, 2)


def test_a_run_without_a_promise_has_no_budget():
    assert Budget.of(replace(GENESIS, epsilon=None, delta=None, noise_multiplier=0.0, mechanism="none")) is None

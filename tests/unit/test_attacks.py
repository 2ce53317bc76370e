"""What adversaries send."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from adversary.attacks import ATTACKS, Attack, make_attack
from common.errors import AttackError

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def attack(name, *, n=20, k=4, clip_norm=1.0, seed=0, knowledge="colluding", **parameters) -> Attack:
    return make_attack(
        name,
        num_clients=n,
        num_byzantine=k,
        num_adversaries=k,
        clip_norm=clip_norm,
        seed=seed,
        knowledge=knowledge,
        **parameters,
    )


@pytest.fixture
def honest():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((16, 30)).astype(np.float32))


@pytest.fixture
def own():
    return torch.from_numpy(np.random.default_rng(1).standard_normal((4, 30)).astype(np.float32))


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_gives_a_row_per_adversary_and_changes_nothing_it_was_given(name, honest, own):
    kept = honest.clone(), own.clone()
    made = attack(name)
    assert isinstance(made, Attack)
    assert made.name == name
    for round_id in range(3):
        rows = made(honest, own, round_id)
        assert rows.shape == own.shape
        assert rows.dtype == torch.float32
    assert torch.equal(honest, kept[0])
    assert torch.equal(own, kept[1])


@pytest.mark.parametrize("case", GOLDEN["alie_z"], ids=lambda case: f"{case['n']}-{case['f']}")
def test_alie_chooses_the_golden_z(case):
    assert attack("alie", n=case["n"], k=case["f"]).z == pytest.approx(case["z"], abs=1e-12)


def test_alie_takes_z_standard_deviations_from_the_mean(honest, own):
    x = honest.double().numpy()
    expected = x.mean(axis=0) - 1.5 * x.std(axis=0, ddof=1)
    for row in attack("alie", z=1.5)(honest, own, 0):
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-6)
    added = attack("alie", z=-1.5)(honest, own, 0)
    np.testing.assert_allclose(added[0].numpy(), x.mean(axis=0) + 1.5 * x.std(axis=0, ddof=1), atol=1e-6)


def test_alie_on_a_single_estimate_sends_it(own):
    assert torch.equal(attack("alie", k=1)(own[:1], own[:1], 0), own[:1])


def test_alie_never_chooses_a_negative_z_by_itself():
    for n in range(3, 60):
        for k in range((n - 1) // 2 + 1):
            assert attack("alie", n=n, k=k).z >= 0


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 0), (5, 4), (10, 10), (10, 6)])
def test_alie_without_a_closed_form_asks_for_z(n, k):
    with pytest.raises(AttackError, match=r"set attack\.z"):
        attack("alie", n=n, k=k)
    assert attack("alie", n=n, k=k, z=1.0).z == 1.0


def test_bit_flip_reverses_the_honest_mean(honest, own):
    rows = attack("bit_flip")(honest, own, 0)
    for row in rows:
        torch.testing.assert_close(row, -honest.mean(dim=0))


def test_bit_flip_of_their_own_needs_to_know_nothing(honest, own):
    made = attack("bit_flip", own=True, knowledge="none")
    assert torch.equal(made(honest[:0], own, 0), -own)


@pytest.mark.parametrize("of_own", [False, True])
def test_bit_flip_can_stretch_what_it_sends_to_the_clip_norm(honest, own, of_own):
    made = attack("bit_flip", scale_to_clip_norm=True, own=of_own, clip_norm=2.5)
    rows = made(honest, own, 0)
    reversed_ = -own if of_own else -honest.mean(dim=0).expand(4, -1)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((4,), 2.5))
    torch.testing.assert_close(torch.cosine_similarity(rows, reversed_), torch.ones(4))
    assert not made(torch.zeros_like(honest), torch.zeros_like(own), 0).any()
    with pytest.raises(AttackError, match=r"needs training\.clip_norm"):
        attack("bit_flip", scale_to_clip_norm=True, clip_norm=None)


@pytest.mark.parametrize("parameters", [{}, {"epsilon": 2.0}])
def test_ipm_sends_minus_epsilon_times_the_mean(honest, own, parameters):
    rows = attack("ipm", **parameters)(honest, own, 0)
    torch.testing.assert_close(rows, (-parameters.get("epsilon", 0.1) * honest.mean(dim=0)).expand(4, -1))


def stretched(h: int, along: int, seed: int = 0) -> torch.Tensor:
    """Rows that vary by far the most along one axis."""
    x = np.random.default_rng(seed).standard_normal((h, 8))
    x[:, along] *= 50
    return torch.from_numpy(x.astype(np.float32))


def test_mimic_copies_one_honest_client_and_stays_with_it_after_the_warm_up(own):
    made = attack("mimic", warmup=2)
    data = [stretched(9, along=3, seed=t) for t in range(6)]
    sent = [made(x, own[:, :8], t) for t, x in enumerate(data)]
    copied = [[i for i in range(9) if torch.equal(rows[0], x[i])] for rows, x in zip(sent, data, strict=True)]
    assert all(len(rows) == 1 for rows in copied)
    assert len({rows[0] for rows in copied[1:]}) == 1
    assert made.chosen == copied[-1][0]
    for rows in sent:
        assert bool((rows == rows[0]).all())


def test_mimic_learns_the_direction_of_largest_variance_and_takes_the_extreme_client(own):
    x = stretched(9, along=5)
    ends = set()
    for argmax in (True, False):
        made = attack("mimic", warmup=4, argmax=argmax)
        for t in range(4):
            made(x, own[:, :8], t)
        assert abs(made.direction[5].item()) > 0.99
        assert made.direction.norm().item() == pytest.approx(1.0, abs=1e-6)
        ends.add(made.chosen)
    assert ends == {int(x[:, 5].argmax()), int(x[:, 5].argmin())}


def test_mimic_follows_the_formula_of_its_warm_up(own):
    data = [stretched(6, along=2, seed=t).double().numpy() for t in range(3)]
    made = attack("mimic", warmup=3)
    made(torch.from_numpy(data[0]).float(), own[:, :8], 0)
    mean, z = data[0].mean(axis=0), made.direction.double().numpy()
    for t in (1, 2):
        made(torch.from_numpy(data[t]).float(), own[:, :8], t)
        mean = t / (1 + t) * mean + data[t].mean(axis=0) / (1 + t)
        step = (data[t] - mean).T @ ((data[t] - mean) @ z)
        z = t / (1 + t) * z + step / np.linalg.norm(step) / (1 + t)
        z /= np.linalg.norm(z)
        np.testing.assert_allclose(made.direction.numpy(), z, atol=1e-5)
        assert made.chosen == int((data[t] @ z).argmax())


def test_mimic_keeps_its_direction_when_all_honest_clients_agree(own):
    made = attack("mimic", warmup=3)
    made(stretched(6, along=2), own[:, :8], 0)
    before = made.direction.clone()
    rows = made(made.mean.expand(6, -1), own[:, :8], 1)
    torch.testing.assert_close(made.direction, before)
    assert bool(rows.isfinite().all())


def test_mimic_depends_on_nothing_but_the_seed(honest, own):
    first, second = (attack("mimic", seed=3)(honest, own, 0) for _ in range(2))
    assert torch.equal(first, second)
    directions = []
    for seed in (3, 4):
        made = attack("mimic", seed=seed)
        made(honest, own, 0)
        directions.append(made.direction)
    assert not torch.equal(*directions)


def test_mimic_of_a_given_client_copies_that_one(honest, own):
    rows = attack("mimic", target=7)(honest, own, 0)
    assert torch.equal(rows, honest[7].expand(4, -1))
    with pytest.raises(AttackError, match="the estimate has only 16 rows"):
        attack("mimic", target=16)(honest, own, 0)


def test_mimic_survives_a_round_with_fewer_clients(honest, own):
    made = attack("mimic")
    made(honest, own, 0)
    made.chosen = 15
    assert torch.equal(made(honest[:3], own, 1)[0], honest[2])


@pytest.mark.parametrize("name", ["alie", "bit_flip", "ipm", "mimic"])
def test_an_attack_that_needs_an_estimate_refuses_to_work_without(name, honest, own):
    with pytest.raises(AttackError, match=r"needs an estimate .* attack\.knowledge"):
        attack(name, knowledge="none")
    with pytest.raises(AttackError, match=r"needs an estimate .* no rows in round 5"):
        attack(name)(honest[:0], own, 5)


def test_no_attack_sends_what_was_honestly_computed(honest, own):
    assert torch.equal(attack("none", knowledge="none")(honest[:0], own, 0), own)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("allie", {}, "did you mean 'alie'"),
        ("alie", {"zed": 1.0}, "alie has no parameter 'zed': known: z"),
        ("none", {"z": 1.0}, "none has no parameter 'z': it has none"),
        ("alie", {"z": float("nan")}, "alie: z = nan: expected a finite number"),
        ("ipm", {"epsilon": "much"}, "ipm: epsilon = 'much'"),
        ("ipm", {"epsilom": 1.0}, "did you mean 'epsilon'"),
        ("bit_flip", {"own": 1}, "expected true or false"),
        ("mimic", {"warmup": 0}, "warmup = 0: expected an integer of at least 1"),
        ("mimic", {"target": -1}, "target = -1"),
        ("mimic", {"argmax": "no"}, "argmax = 'no'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(name, parameters, message):
    with pytest.raises(AttackError, match=message):
        attack(name, **parameters)


USER_MODULE = """
def louder(honest, own, round_id, *, factor=2.0):
    return -factor * own

def nosy(honest, own, round_id):
    return honest[:1].expand(len(own), -1)
nosy.needs_estimate = True

def wrong(honest, own, round_id):
    return own[0]

class Counting:
    needs_estimate = True
    def __init__(self, setting, *, step):
        self.step, self.adversaries = step, setting.num_adversaries
    def __call__(self, honest, own, round_id):
        return own + self.step * round_id * self.adversaries
"""


def test_a_users_own_attack_is_named_by_its_module(tmp_path, honest, own):
    (tmp_path / "users_attacks.py").write_text(USER_MODULE)
    where = {"folders": [tmp_path]}
    assert torch.equal(attack("users_attacks:louder", factor=3.0, **where)(honest, own, 0), -3 * own)
    assert torch.equal(attack("users_attacks:Counting", step=1.0, **where)(honest, own, 2), own + 8)
    with pytest.raises(AttackError, match="no parameter 'factr': did you mean 'factor'"):
        attack("users_attacks:louder", factr=3.0, **where)
    with pytest.raises(AttackError, match="needs step"):
        attack("users_attacks:Counting", **where)
    for name in ("nosy", "Counting"):
        with pytest.raises(AttackError, match="needs an estimate"):
            attack(f"users_attacks:{name}", knowledge="none", **({"step": 1.0} if name == "Counting" else {}), **where)
    with pytest.raises(AttackError, match=r"returned \(30,\): expected rows \(4, 30\)"):
        attack("users_attacks:wrong", **where)(honest, own, 0)

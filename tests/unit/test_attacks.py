"""What adversaries send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from adversary.attacks import ATTACKS, Attack, Setting, Sight, describe_attacks, make_attack
from adversary.attacks.search import RuleCopy, line_search
from adversary.main import attack_of, own_momenta
from client.crew import build_crew
from common.aggregation import make_rule
from common.config import Experiment, experiment_from, load_experiment, ready_experiments
from common.errors import AttackError
from common.learning.datasets import Dataset, Split
from common.learning.task import build_task
from deploy.simulation import simulate

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
EXAMPLE = torch.tensor(GOLDEN["example_inputs"])
"""The rows of the ByzFL library's documentation."""

COLLUSIONS = ("alie", "bit_flip", "ipm", "mimic", "min_max", "min_sum", "sign_flip")
"""What needs an estimate of honest momenta."""


def setting(*, n=20, k=4, clip_norm=1.0, seed=0, rule="trimmed_mean", before=()) -> Setting:
    return Setting(n, k, k, clip_norm, seed, rule=lambda: make_rule(rule, num_byzantine=k, before=before))


def attack(name, *, knowledge="colluding", folders=(), where=None, n=20, k=4, clip_norm=1.0, seed=0, **parameters):
    where = where or setting(n=n, k=k, clip_norm=clip_norm, seed=seed)
    return make_attack(name, where, knowledge=knowledge, folders=folders, **parameters)


def seen(honest: Tensor, own: Tensor, round_id: int = 0, theta: Tensor | None = None) -> Sight:
    return Sight(round_id, honest, own, torch.zeros(own.shape[1]) if theta is None else theta)


def send(made: Attack, honest: Tensor, own: Tensor, round_id: int = 0, theta: Tensor | None = None) -> Tensor:
    return made(seen(honest, own, round_id, theta))


def random_rows(h: int, d: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((h, d)).astype(np.float32))


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
        rows = send(made, honest, own, round_id)
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
    for row in send(attack("alie", z=1.5), honest, own, 0):
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-6)
    added = send(attack("alie", z=-1.5), honest, own, 0)
    np.testing.assert_allclose(added[0].numpy(), x.mean(axis=0) + 1.5 * x.std(axis=0, ddof=1), atol=1e-6)


def test_alie_on_a_single_estimate_sends_it(own):
    assert torch.equal(send(attack("alie", k=1), own[:1], own[:1], 0), own[:1])


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
    rows = send(attack("bit_flip"), honest, own, 0)
    for row in rows:
        torch.testing.assert_close(row, -honest.mean(dim=0))


def test_bit_flip_of_their_own_needs_to_know_nothing(honest, own):
    made = attack("bit_flip", own=True, knowledge="none")
    assert torch.equal(send(made, honest[:0], own, 0), -own)


@pytest.mark.parametrize("of_own", [False, True])
def test_bit_flip_can_stretch_what_it_sends_to_the_clip_norm(honest, own, of_own):
    made = attack("bit_flip", scale_to_clip_norm=True, own=of_own, clip_norm=2.5)
    rows = send(made, honest, own, 0)
    reversed_ = -own if of_own else -honest.mean(dim=0).expand(4, -1)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((4,), 2.5))
    torch.testing.assert_close(torch.cosine_similarity(rows, reversed_), torch.ones(4))
    assert not send(made, torch.zeros_like(honest), torch.zeros_like(own), 0).any()
    with pytest.raises(AttackError, match=r"needs training\.clip_norm"):
        attack("bit_flip", scale_to_clip_norm=True, clip_norm=None)


@pytest.mark.parametrize("parameters", [{}, {"epsilon": 2.0}])
def test_ipm_sends_minus_epsilon_times_the_mean(honest, own, parameters):
    rows = send(attack("ipm", **parameters), honest, own, 0)
    torch.testing.assert_close(rows, (-parameters.get("epsilon", 0.1) * honest.mean(dim=0)).expand(4, -1))


def stretched(h: int, along: int, seed: int = 0) -> torch.Tensor:
    """Rows that vary by far the most along one axis."""
    x = np.random.default_rng(seed).standard_normal((h, 8))
    x[:, along] *= 50
    return torch.from_numpy(x.astype(np.float32))


def test_mimic_copies_one_honest_client_and_stays_with_it_after_the_warm_up(own):
    made = attack("mimic", warmup=2)
    data = [stretched(9, along=3, seed=t) for t in range(6)]
    sent = [send(made, x, own[:, :8], t) for t, x in enumerate(data)]
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
            send(made, x, own[:, :8], t)
        assert abs(made.direction[5].item()) > 0.99
        assert made.direction.norm().item() == pytest.approx(1.0, abs=1e-6)
        ends.add(made.chosen)
    assert ends == {int(x[:, 5].argmax()), int(x[:, 5].argmin())}


def test_mimic_follows_the_formula_of_its_warm_up(own):
    data = [stretched(6, along=2, seed=t).double().numpy() for t in range(3)]
    made = attack("mimic", warmup=3)
    send(made, torch.from_numpy(data[0]).float(), own[:, :8], 0)
    mean, z = data[0].mean(axis=0), made.direction.double().numpy()
    for t in (1, 2):
        send(made, torch.from_numpy(data[t]).float(), own[:, :8], t)
        mean = t / (1 + t) * mean + data[t].mean(axis=0) / (1 + t)
        step = (data[t] - mean).T @ ((data[t] - mean) @ z)
        z = t / (1 + t) * z + step / np.linalg.norm(step) / (1 + t)
        z /= np.linalg.norm(z)
        np.testing.assert_allclose(made.direction.numpy(), z, atol=1e-5)
        assert made.chosen == int((data[t] @ z).argmax())


def test_mimic_keeps_its_direction_when_all_honest_clients_agree(own):
    made = attack("mimic", warmup=3)
    send(made, stretched(6, along=2), own[:, :8], 0)
    before = made.direction.clone()
    rows = send(made, made.mean.expand(6, -1), own[:, :8], 1)
    torch.testing.assert_close(made.direction, before)
    assert bool(rows.isfinite().all())


def test_mimic_depends_on_nothing_but_the_seed(honest, own):
    first, second = (send(attack("mimic", seed=3), honest, own, 0) for _ in range(2))
    assert torch.equal(first, second)
    directions = []
    for seed in (3, 4):
        made = attack("mimic", seed=seed)
        send(made, honest, own, 0)
        directions.append(made.direction)
    assert not torch.equal(*directions)


def test_mimic_of_a_given_client_copies_that_one(honest, own):
    rows = send(attack("mimic", target=7), honest, own, 0)
    assert torch.equal(rows, honest[7].expand(4, -1))
    with pytest.raises(AttackError, match="the estimate has only 16 rows"):
        send(attack("mimic", target=16), honest, own, 0)


def test_mimic_survives_a_round_with_fewer_clients(honest, own):
    made = attack("mimic")
    send(made, honest, own, 0)
    made.chosen = 15
    assert torch.equal(send(made, honest[:3], own, 1)[0], honest[2])


@pytest.mark.parametrize("name", COLLUSIONS)
def test_an_attack_that_needs_an_estimate_refuses_to_work_without(name, honest, own):
    with pytest.raises(AttackError, match=r"needs an estimate .* attack\.knowledge"):
        attack(name, knowledge="none")
    with pytest.raises(AttackError, match=r"needs an estimate .* no rows in round 5"):
        send(attack(name), honest[:0], own, 5)


def test_no_attack_sends_what_was_honestly_computed(honest, own):
    assert torch.equal(send(attack("none", knowledge="none"), honest[:0], own, 0), own)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("allie", {}, "did you mean 'alie'"),
        ("alie", {"zed": 1.0}, "alie has no parameter 'zed': known: add, z"),
        ("none", {"z": 1.0}, "none has no parameter 'z': it has none"),
        ("alie", {"z": float("nan")}, "alie: z = nan: expected a finite number"),
        ("ipm", {"epsilon": "much"}, "ipm: epsilon = 'much'"),
        ("ipm", {"epsilom": 1.0}, "did you mean 'epsilon'"),
        ("ipm", {"epsilon": "optimized"}, "expected a finite number, or 'optimised'"),
        ("alie", {"z": "optimized"}, "expected a finite number, or 'optimised'"),
        ("alie", {"add": 1}, "add = 1: expected true or false"),
        ("sign_flip", {"of": "median"}, "of = 'median': expected one of 'sum', 'mean'"),
        ("sign_flip", {"scale": float("inf")}, "scale = inf: expected a finite number"),
        ("gaussian", {"std": -1.0}, r"std = -1\.0: expected a number of at least 0"),
        ("gaussian", {"shared": "yes"}, "shared = 'yes': expected true or false"),
        ("same_value", {"value": float("nan")}, "value = nan: expected a finite number"),
        ("inf", {"negative": 0}, "negative = 0: expected true or false"),
        ("zero", {"value": 0.0}, "zero has no parameter 'value': it has none"),
        ("label_flip", {"to": 3}, "label_flip has no parameter 'to': it has none"),
        ("random_direction", {"norm": 0.0}, r"norm = 0\.0: expected a number above 0"),
        ("random_direction", {"fixed": None}, "fixed = None: expected true or false"),
        ("min_max", {"direction": "up"}, "direction = 'up': expected one of 'unit', 'sign', 'std'"),
        ("min_sum", {"direction": 1}, "direction = 1: expected one of"),
        ("adaptive", {"memory": 1.5}, r"memory = 1\.5: expected a number from 0 to 1"),
        ("adaptive", {"memory": -0.1}, r"memory = -0\.1: expected a number from 0 to 1"),
        ("adaptive", {"norm": float("nan")}, "norm = nan: expected a finite number"),
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

def uphill(honest, own, round_id, *, theta, by=1.0):
    return by * theta.expand(len(own), -1)

class Poisoning:
    def __init__(self, setting):
        self.k = setting.num_adversaries
    def poison(self, dataset):
        return dataset.name
    def __call__(self, honest, own, round_id):
        return own

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
    assert torch.equal(send(attack("users_attacks:louder", factor=3.0, **where), honest, own, 0), -3 * own)
    assert torch.equal(send(attack("users_attacks:Counting", step=1.0, **where), honest, own, 2), own + 8)
    with pytest.raises(AttackError, match="no parameter 'factr': did you mean 'factor'"):
        attack("users_attacks:louder", factr=3.0, **where)
    with pytest.raises(AttackError, match="needs step"):
        attack("users_attacks:Counting", **where)
    for name in ("nosy", "Counting"):
        with pytest.raises(AttackError, match="needs an estimate"):
            attack(f"users_attacks:{name}", knowledge="none", **({"step": 1.0} if name == "Counting" else {}), **where)
    with pytest.raises(AttackError, match=r"returned \(30,\): expected rows \(4, 30\)"):
        send(attack("users_attacks:wrong", **where), honest, own, 0)


def test_a_users_own_attack_may_ask_for_the_published_model_and_may_poison_its_data(tmp_path, honest, own):
    (tmp_path / "more_attacks.py").write_text(USER_MODULE)
    theta = torch.arange(30.0)
    made = attack("more_attacks:uphill", folders=[tmp_path], by=2.0)
    assert torch.equal(send(made, honest, own, 0, theta), 2 * theta.expand(4, -1))
    poisoning = attack("more_attacks:Poisoning", folders=[tmp_path])
    data = blobs()
    assert poisoning.poison(data) == "blobs"
    assert made.poison(data) is data


# -------------------------------------------------------------------- golden values


def test_the_examples_of_the_byzfl_documentation_are_met():
    def one(name, **parameters):
        return send(attack(name, n=4, k=1, **parameters), EXAMPLE, EXAMPLE[:1])[0].tolist()

    assert one("sign_flip", of="mean", scale=1.0) == [-4.0, -5.0, -6.0]
    assert one("bit_flip") == [-4.0, -5.0, -6.0]
    assert one("ipm", epsilon=2.0) == [-8.0, -10.0, -12.0]
    assert one("alie", z=1.5, add=True) == [8.5, 9.5, 10.5]
    assert one("mimic", target=0) == [1.0, 2.0, 3.0]
    assert one("inf") == [float("inf")] * 3
    assert one("inf", negative=True) == [-float("inf")] * 3


def test_the_searched_factors_are_those_of_the_byzfl_documentation():
    where = setting(n=4, k=1, before=["nearest_neighbor_mixing", "clipping"])
    ipm = attack("ipm", where=where, epsilon="optimised")
    torch.testing.assert_close(send(ipm, EXAMPLE, EXAMPLE[:1])[0], torch.tensor([-2.74877907, -3.43597384, -4.1231686]))
    alie = attack("alie", where=where, z="optimised", add=True)
    torch.testing.assert_close(send(alie, EXAMPLE, EXAMPLE[:1])[0], torch.tensor([12.919851, 13.919851, 14.919851]))


def test_fed_ngas_attacks_are_met():
    def one(name, **parameters):
        return send(attack(name, n=4, k=1, **parameters), EXAMPLE, EXAMPLE[:1])[0]

    assert one("sign_flip").tolist() == [-36.0, -45.0, -54.0]  # -3 times the sum
    torch.testing.assert_close(one("alie", z=0.7, add=True), torch.tensor([6.1, 7.1, 8.1]))
    torch.testing.assert_close(one("ipm"), torch.tensor([-0.4, -0.5, -0.6]))
    assert one("same_value").tolist() == [1.0, 1.0, 1.0]


def test_a_sum_is_that_of_all_honest_clients_even_if_the_estimate_has_fewer(own):
    made = attack("sign_flip", n=20, k=4)
    torch.testing.assert_close(send(made, own, own)[0], -3 * 16 * own.mean(dim=0))


def test_gaussian_draws_have_the_mean_and_deviation_asked_for_and_repeat():
    made = [attack("gaussian", mean=2.0, std=9.0, seed=seed, knowledge="none") for seed in (5, 5, 6)]
    own = torch.zeros(4, 25_000)
    first, again, other = (send(one, own[:0], own, 3) for one in made)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, send(made[0], own[:0], own, 4))
    assert not torch.equal(first[0], first[1])
    assert float(first.mean()) == pytest.approx(2.0, abs=6 * 9.0 / 100_000**0.5)
    assert float(first.std()) == pytest.approx(9.0, abs=6 * 9.0 / 200_000**0.5)
    shared = send(attack("gaussian", shared=True), own[:0], own)
    assert bool((shared == shared[0]).all())


def test_random_directions_have_norm_c_and_are_new_each_round_unless_fixed(own):
    for fixed in (False, True):
        made = attack("random_direction", clip_norm=2.5, fixed=fixed, knowledge="none")
        first, second = (send(made, own[:0], own, t) for t in (0, 1))
        torch.testing.assert_close(first.norm(dim=1), torch.full((4,), 2.5))
        assert bool((first == first[0]).all())
        assert torch.equal(first, second) == fixed
    each = send(attack("random_direction", shared=False, norm=3.0), own[:0], own)
    torch.testing.assert_close(each.norm(dim=1), torch.full((4,), 3.0))
    assert not torch.equal(each[0], each[1])


@pytest.mark.parametrize("name", ["random_direction", "adaptive"])
def test_a_length_is_asked_for_where_there_is_no_clip_norm(name):
    with pytest.raises(AttackError, match=rf"{name}: set attack\.norm: its default is training\.clip_norm"):
        attack(name, clip_norm=None)
    assert attack(name, clip_norm=None, norm=2.0).name == name


def test_zero_and_the_same_value_are_what_they_say(own):
    assert not send(attack("zero", knowledge="none"), own[:0], own).any()
    assert bool((send(attack("same_value", value=-2.0, knowledge="none"), own[:0], own) == -2.0).all())


# -------------------------------------------------------------------- edges, and what all of them keep to


@pytest.mark.parametrize("name", COLLUSIONS)
def test_one_honest_row_and_equal_rows_give_finite_vectors(name, own):
    made = attack(name)
    for t, honest in enumerate((own[:1], own[:1].expand(9, -1), torch.zeros(9, 30))):
        assert bool(send(made, honest, own, t).isfinite().all())


@pytest.mark.parametrize("name", ["min_max", "min_sum"])
@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
def test_without_spread_the_mean_is_sent(name, direction, own):
    made = attack(name, direction=direction)
    for honest in (own[:1], own[:1].expand(9, -1)):
        torch.testing.assert_close(send(made, honest, own)[0], own[0], atol=2e-6, rtol=0)
    assert not send(made, torch.zeros(9, 30), own).any()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alie", {}),
        ("alie", {"z": "optimised"}),
        ("ipm", {}),
        ("ipm", {"epsilon": "optimised"}),
        ("bit_flip", {}),
        ("sign_flip", {}),
        ("mimic", {}),
        ("min_max", {"direction": "std"}),
        ("min_sum", {}),
    ],
)
def test_the_order_of_honest_clients_does_not_matter(name, parameters, honest, own):
    one = send(attack(name, **parameters), honest, own)
    places = torch.from_numpy(np.random.default_rng(2).permutation(16))
    other = send(attack(name, **parameters), honest[places], own)
    torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "parameters"), [("mimic", {"warmup": 4}), ("adaptive", {"memory": 0.5})])
def test_a_round_asked_for_twice_is_answered_twice_alike_and_counted_once(name, parameters, own):
    once, twice = attack(name, **parameters), attack(name, **parameters)
    for t in range(4):
        honest, theta = random_rows(9, 30, seed=t), random_rows(1, 30, seed=50 + t)[0]
        expected = send(once, honest, own, t, theta)
        for _ in range(2):
            assert torch.equal(send(twice, honest, own, t, theta), expected)
    if name == "mimic":
        assert once.rounds == twice.rounds
        assert torch.equal(once.direction, twice.direction)


# -------------------------------------------------------------------- mimic


def naive_mimic(data: list[np.ndarray], z: np.ndarray, warmup: int) -> list[np.ndarray]:
    """Rows copied, in plain numpy; z is the standard normal start."""
    copied, mean, chosen = [], np.zeros_like(z), 0
    for t, x in enumerate(data):
        if t < warmup:
            mean = x.mean(axis=0) if t == 0 else (t * mean + x.mean(axis=0)) / (t + 1)
            step = np.zeros_like(z)
            for row in x:
                step += (row - mean) @ z * (row - mean)
            step /= np.linalg.norm(step)
            z = step if t == 0 else t / (1 + t) * z + 1 / (1 + t) * step
            z = z / np.linalg.norm(z)
            chosen = max(range(len(x)), key=lambda i: x[i] @ z)
        copied.append(x[chosen])
    return copied


def test_mimic_copies_whom_a_plain_implementation_copies(own):
    from common.randomness import stream

    data = [random_rows(9, 30, seed=t) for t in range(8)]
    start = stream(11, "attack/mimic").standard_normal(30)
    expected = naive_mimic([x.double().numpy() for x in data], start, warmup=5)
    made = attack("mimic", warmup=5, seed=11)
    for t, x in enumerate(data):
        np.testing.assert_allclose(send(made, x, own, t)[0].double().numpy(), expected[t])


# -------------------------------------------------------------------- min-max and min-sum


def bound_of(name: str, honest: np.ndarray, vector: np.ndarray) -> tuple[float, float]:
    """Both sides of the bound, from its definition."""
    to_honest = np.linalg.norm(honest - vector, axis=1)
    among = np.linalg.norm(honest[:, None] - honest[None], axis=2)
    if name == "min_max":
        return to_honest.max(), among.max()
    return (to_honest**2).sum(), (among**2).sum(axis=1).max()


@pytest.mark.parametrize("name", ["min_max", "min_sum"])
@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
@pytest.mark.parametrize("seed", range(4))
def test_the_deviation_is_within_the_honest_spread_and_no_larger_one_is(name, direction, seed):
    h = 2 + 5 * seed
    honest = random_rows(h, 40, seed) * 10.0 ** (seed - 2) + random_rows(1, 40, 9)
    x = honest.double().numpy()
    vector = send(attack(name, direction=direction), honest, honest[:4])[0].double().numpy()
    mean = x.mean(axis=0)
    p = {"unit": -mean, "sign": -np.sign(mean), "std": -x.std(axis=0, ddof=1)}[direction]
    gamma = (vector - mean) @ p / (p @ p)
    assert gamma > 0
    np.testing.assert_allclose(vector, mean + gamma * p, atol=1e-5 * np.abs(x).max())
    reached, allowed = bound_of(name, x, mean + gamma * p)
    assert reached <= allowed * (1 + 2e-6)
    reached, allowed = bound_of(name, x, mean + 1.001 * gamma * p)
    assert reached > allowed


def test_min_sum_is_never_bolder_than_min_max():
    for seed in range(5):
        honest = random_rows(9, 20, seed)
        far = [
            torch.linalg.vector_norm(send(attack(name), honest, honest[:4])[0] - honest.mean(dim=0))
            for name in ("min_sum", "min_max")
        ]
        assert far[0] <= far[1] * (1 + 1e-5)


def test_blocks_of_columns_change_nothing(monkeypatch):
    honest = random_rows(7, 100)
    whole = [send(attack(name), honest, honest[:4]) for name in ("min_max", "min_sum")]
    monkeypatch.setattr("adversary.attacks.spread._COLUMNS", 13)
    for name, expected in zip(("min_max", "min_sum"), whole, strict=True):
        torch.testing.assert_close(send(attack(name), honest, honest[:4]), expected)


# -------------------------------------------------------------------- searched factors


def test_the_line_search_looks_forward_doubles_and_then_contracts():
    tried = []

    def height(x: float) -> float:
        tried.append(x)
        return -abs(x - 35.0)

    best = line_search(height, evaluations=7)
    assert tried == pytest.approx([0, 10, 30, 70, 30 + 32, 30 + 25.6, 30 + 20.48])
    assert best == 30
    assert line_search(lambda x: -abs(x - 35.0)) == pytest.approx(35.0, abs=4)
    assert line_search(lambda x: -x) == 0.0


def moved_by(vector: Tensor, honest: Tensor, rule: str) -> float:
    aggregate = make_rule(rule, num_byzantine=4)(torch.cat([honest, vector.expand(4, -1)]))
    return float((aggregate - honest.mean(dim=0)).norm())


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "geometric_median", "centered_clipping"])
@pytest.mark.parametrize(
    ("name", "parameter", "usual"), [("alie", "z", 1.5), ("ipm", "epsilon", 0.1)], ids=("alie", "ipm")
)
def test_a_searched_factor_moves_the_aggregate_at_least_as_far_as_the_usual_one(name, parameter, usual, rule, honest):
    where = setting(rule=rule)
    far = [
        moved_by(send(attack(name, where=where, **{parameter: value}), honest, honest[:4])[0], honest, rule)
        for value in ("optimised", usual, 0.0)
    ]
    assert far[0] >= max(far[1:]) * (1 - 1e-5)


def test_a_search_depends_on_the_rule(honest):
    by_rule = {
        rule: send(attack("ipm", where=setting(rule=rule), epsilon="optimised"), honest, honest[:4])[0].norm().item()
        for rule in ("mean", "krum")
    }
    assert by_rule["mean"] > 1e5  # nothing holds a mean
    assert by_rule["krum"] < 100


def test_a_search_needs_to_be_given_the_rule():
    with pytest.raises(AttackError, match="alie: searching for a factor needs the aggregation rule"):
        attack("alie", where=replace(setting(), rule=None), z="optimised")


class Remembering:
    """A user's rule with a memory."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: Tensor, context: object) -> Tensor:  # noqa: ARG002 - the interface
        self.calls.append(len(self.calls))
        return x.mean(dim=0) * len(self.calls)


def test_a_search_leaves_a_rule_with_a_memory_as_it_was(honest):
    rule = Remembering()
    made = attack("ipm", where=replace(setting(), rule=lambda: rule), epsilon="optimised")
    first, second = (send(made, honest, honest[:4], t) for t in range(2))
    assert rule.calls == []
    assert torch.equal(first, second)


def test_the_copied_rule_sees_what_the_server_would_give_it():
    given = []

    def probe(x: Tensor, context: object) -> Tensor:
        given.append((x, context))
        return x[0]

    where = replace(
        setting(clip_norm=2.0), rule=lambda: probe, projects_rows=True, learning_rate=lambda round_id: 0.5 + round_id
    )
    copy_, honest, thetas = RuleCopy(where), 10 * random_rows(3, 6), random_rows(3, 6, seed=1)
    for t in range(3):
        copy_.see(seen(honest, honest[:1], t, thetas[t]))
        copy_.aggregate(honest, torch.full((6,), 100.0))
    centres = [context.centre for _, context in given]
    assert not centres[0].any()
    torch.testing.assert_close(centres[1], (thetas[0] - thetas[1]) / 0.5)
    torch.testing.assert_close(centres[2], (thetas[1] - thetas[2]) / 1.5)
    assert [context.round_id for _, context in given] == [0, 1, 2]
    x, _ = given[0]
    assert x.shape == (20, 6)
    torch.testing.assert_close(x.norm(dim=1), torch.full((20,), 2.0))  # all were longer
    assert torch.equal(x[0], x[3])
    assert bool((x[16:] == x[16]).all())


# -------------------------------------------------------------------- adaptive


def test_adaptive_behaves_until_models_move_and_then_pulls_back_to_the_start(own):
    made = attack("adaptive", clip_norm=0.5, knowledge="none")
    start, step = random_rows(1, 30)[0], random_rows(1, 30, seed=3)[0]
    assert torch.equal(send(made, own[:0], own, 0, start), own)
    for t in range(1, 4):
        row = send(made, own[:0], own, t, start - t * step)[0]
        torch.testing.assert_close(row, -0.5 * step / step.norm(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_adaptive_weighs_the_steps_of_the_published_models(memory, own):
    made, thetas = attack("adaptive", memory=memory), random_rows(6, 30)
    weighted = torch.zeros(30)
    for t, theta in enumerate(thetas):
        row = send(made, own[:0], own, t, theta)[0]
        if t:
            weighted = memory * weighted + thetas[t - 1] - theta
            torch.testing.assert_close(row, -weighted / weighted.norm(), atol=1e-5, rtol=0)


def test_adaptive_finds_the_descent_direction_through_noise(own):
    # 400 rounds of a step g plus noise 20 times as long: their sum is nearer to g than any of them. Error rate: the
    # cosine is about 0.7 with a deviation below 0.05.
    random, d = np.random.default_rng(4), 400
    g = np.full(d, 1 / d**0.5)
    made, theta = attack("adaptive", knowledge="none"), np.zeros(d)
    own = torch.zeros(4, d)
    for t in range(400):
        row = send(made, own[:0], own, t, torch.from_numpy(theta.astype(np.float32)))[0].numpy()
        theta = theta - (g + 20 / d**0.5 * random.standard_normal(d))
    assert -row @ g > 0.4


# -------------------------------------------------------------------- real training


def blobs() -> Dataset:
    from tiny_task import blobs as made

    return made(Path())


def tiny(**attack_section: object) -> Experiment:
    return experiment_from(
        {
            "federation": {"clients": 9, "byzantine": 2},
            "training": {"rounds": 4, "batch_size": 8, "seed": 3},
            "attack": attack_section,
            "data": {"dataset": "tiny_task:blobs", "partition": "classes", "classes_per_client": 1},
            "model": {"name": "logistic"},
        }
    )


def test_label_flip_trains_the_adversaries_and_nobody_else_on_turned_labels():
    experiment = tiny(name="label_flip", knowledge="none")
    made, task = attack_of(experiment), build_task(experiment)
    poisoned = made.poison(task.dataset)
    np.testing.assert_array_equal(poisoned.train.labels, 1 - task.dataset.train.labels)
    assert poisoned.train.images is task.dataset.train.images
    assert poisoned.test is task.dataset.test
    ids = experiment.adversary_ids
    honest, turned = (
        own_momenta(build_crew(experiment, task, ids, dataset=dataset), 0) for dataset in (None, poisoned)
    )
    # At θ = 0 of the logistic model of two classes, the gradient on the other label is exactly the opposite: so it was
    # the same samples, dealt by their true labels.
    torch.testing.assert_close(turned, -honest)
    assert torch.equal(send(made, honest[:0], turned), turned)


def test_ten_classes_are_turned_end_to_end():
    labels = np.arange(10, dtype=np.int64)
    split = Split(np.zeros((10, 4), dtype=np.float32), labels)
    poisoned = attack("label_flip", knowledge="none").poison(Dataset("ten", split, split, num_classes=10))
    assert poisoned.train.labels.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert poisoned.test.labels.tolist() == labels.tolist()


def final_theta(experiment: Experiment) -> Tensor:
    *_, last = simulate(experiment)
    return last.theta


def test_label_flip_changes_what_is_learned_in_a_run():
    assert not torch.equal(final_theta(tiny(name="label_flip")), final_theta(tiny(name="none")))


# -------------------------------------------------------------------- lists and experiments


def test_every_attack_is_described_in_one_line_with_its_parameters_and_source():
    described = {item.name: item for item in describe_attacks()}
    assert described.keys() == ATTACKS.keys()
    for item in described.values():
        assert item.line.endswith(".")
        assert len(item.line) < 110
        assert item.source or item.name == "none"
        assert (item.needs == "an estimate of honest momenta") == (item.name in COLLUSIONS)
    assert described["mimic"].parameters == {"warmup": 1, "argmax": True, "target": None}
    assert described["zero"].parameters == {}


SHOWN = {name: name.partition("/")[2] for name in ready_experiments() if name.startswith("attacks/")}


def test_every_attack_has_a_ready_experiment():
    assert set(SHOWN.values()) == ATTACKS.keys() - {"none"}


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_ready_attack_runs(name):
    small = ["training.rounds=2", "data.dataset=tiny_task:blobs", "data.partition=iid", "model.name=logistic"]
    experiment = load_experiment(name, small)
    assert experiment.attack.name == SHOWN[name]
    assert final_theta(experiment).shape == (10,)


@pytest.mark.parametrize(
    ("rule", "knowledge"),
    [("trimmed_mean", "colluding"), ("centered_clipping", "omniscient"), ("weighted_mean", "omniscient")],
)
def test_factors_are_searched_against_any_rule_with_any_knowledge(rule, knowledge):
    small = ["training.rounds=2", "data.dataset=tiny_task:blobs", "data.partition=iid", "model.name=logistic"]
    chosen = [f"aggregation.rule={rule}", f"attack.knowledge={knowledge}", "attack.z=optimised"]
    samples = ["federation.weights=samples"] if rule in ("weighted_mean", "normalized_mean") else []
    assert final_theta(load_experiment("attacks/alie", [*small, *chosen, *samples])).isfinite().all()

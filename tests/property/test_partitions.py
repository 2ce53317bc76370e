"""Each partition keeps its promises, whatever the labels, the clients and the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.config import Attack, Data, Experiment, Federation, Training
from common.errors import DataError
from common.learning.partitions import deal, deal_experiment

seeds = st.integers(0, 2**63 - 1)
clients = st.integers(1, 40)
few = settings(max_examples=40, deadline=None)
KINDS = {
    "classes": Data(partition="classes", classes_per_client=2),
    "shards": Data(partition="shards", shards_per_client=3),
    "iid": Data(partition="iid"),
    "dirichlet": Data(partition="dirichlet", dirichlet_beta=0.1, minimum=3),
}


@st.composite
def labelled(draw: st.DrawFn) -> np.ndarray:
    """Labels of 2 to 12 classes, 100 to 200 samples each, shuffled; not always numbered from 0 without gaps."""
    counts = draw(st.lists(st.integers(100, 200), min_size=2, max_size=12))
    step = draw(st.sampled_from([1, 3]))
    labels = np.repeat(np.arange(len(counts)) * step, counts)
    return np.random.default_rng(draw(st.integers(0, 2**32))).permutation(labels).astype(np.int64)


def assert_disjoint_and_sorted(shares: list[np.ndarray], num_samples: int) -> None:
    for share in shares:
        assert share.dtype == np.int64
        assert (np.diff(share) > 0).all()
    everything = np.concatenate(shares)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < num_samples


@pytest.mark.parametrize("kind", KINDS)
@few
@given(labels=labelled(), num_clients=clients, seed=seeds)
def test_no_sample_is_dealt_twice_and_every_client_has_some(
    kind: str, labels: np.ndarray, num_clients: int, seed: int
) -> None:
    shares = deal(labels, num_clients, KINDS[kind], seed)
    assert len(shares) == num_clients
    assert min(map(len, shares)) >= 1
    assert_disjoint_and_sorted(shares, len(labels))


@pytest.mark.parametrize("kind", KINDS)
@few
@given(labels=labelled(), num_clients=st.integers(6, 40), seed=seeds)
def test_no_sample_is_left_over(kind: str, labels: np.ndarray, num_clients: int, seed: int) -> None:
    shares = deal(labels, num_clients, KINDS[kind], seed)  # 6 clients of 2 classes: all 12 classes are held
    assert sum(map(len, shares)) == len(labels)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(labels=labelled(), num_clients=clients, seed=seeds)
def test_the_deal_is_a_function_of_the_seed(kind: str, labels: np.ndarray, num_clients: int, seed: int) -> None:
    first, again = (deal(labels.copy(), num_clients, KINDS[kind], seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_another_deal(kind: str) -> None:
    labels = np.repeat(np.arange(10), 100)
    first, other = (deal(labels, 10, KINDS[kind], seed) for seed in (0, 1))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@few
@given(labels=labelled(), num_clients=clients, per_client=st.integers(1, 12), seed=seeds)
def test_classes_gives_every_client_exactly_k_and_uses_every_class_equally(
    labels: np.ndarray, num_clients: int, per_client: int, seed: int
) -> None:
    names, counts = np.unique(labels, return_counts=True)
    assume(per_client <= len(names))
    shares = deal(labels, num_clients, Data(partition="classes", classes_per_client=per_client), seed)
    held = np.array([[np.count_nonzero(labels[share] == name) for name in names] for share in shares])
    assert ((held > 0).sum(axis=1) == per_client).all()
    holders = (held > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    assert holders.sum() == num_clients * per_client
    for of_class, count, number in zip(held.T, counts, holders, strict=True):
        if number:
            sizes = of_class[of_class > 0]
            assert sizes.sum() == count
            assert sizes.max() - sizes.min() <= 1


def test_with_two_classes_per_client_the_pairs_vary() -> None:
    labels = np.repeat(np.arange(10), 1000)
    shares = deal(labels, 100, Data(partition="classes"), 0)
    pairs = {tuple(np.unique(labels[share])) for share in shares}
    assert len(pairs) > 25  # fixed pairs (0,1), (2,3), … would be 5


@few
@given(labels=labelled(), num_clients=clients, per_client=st.integers(1, 4), seed=seeds)
def test_shards_are_contiguous_in_the_order_of_labels(
    labels: np.ndarray, num_clients: int, per_client: int, seed: int
) -> None:
    shares = deal(labels, num_clients, Data(partition="shards", shards_per_client=per_client), seed)
    num_shards, num_classes = num_clients * per_client, len(np.unique(labels))
    # n·k shards have n·k - 1 cuts between them, and a class adds at most one piece more for each end inside a shard.
    pieces = sum(len(np.unique(labels[share])) for share in shares)
    assert pieces <= num_shards + num_classes - 1
    size = len(labels) / num_shards
    assert all(per_client * (size - 1) < len(share) < per_client * (size + 1) for share in shares)


@few
@given(labels=labelled(), num_clients=clients, seed=seeds)
def test_iid_shares_are_equal_in_size(labels: np.ndarray, num_clients: int, seed: int) -> None:
    sizes = [len(share) for share in deal(labels, num_clients, Data(partition="iid"), seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_shares_mix_the_classes() -> None:
    labels = np.repeat(np.arange(10), 1000)
    for share in deal(labels, 10, Data(partition="iid"), 0):
        assert np.bincount(labels[share], minlength=10).min() > 60  # 100 expected, 4 standard deviations


@few
@given(
    labels=labelled(),
    num_clients=clients,
    beta=st.sampled_from([1e-12, 1e-3, 0.2, 1.0, 1e6]),
    minimum=st.integers(1, 5),
    seed=seeds,
)
def test_dirichlet_gives_every_client_the_minimum(
    labels: np.ndarray, num_clients: int, beta: float, minimum: int, seed: int
) -> None:
    data = Data(partition="dirichlet", dirichlet_beta=beta, minimum=minimum)
    shares = deal(labels, num_clients, data, seed)
    assert min(map(len, shares)) >= minimum
    assert sum(map(len, shares)) == len(labels)
    assert_disjoint_and_sorted(shares, len(labels))


def test_a_small_beta_skews_and_a_large_one_does_not() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def largest_class_share(beta: float) -> float:
        shares = deal(labels, 20, Data(partition="dirichlet", dirichlet_beta=beta), 0)
        return float(np.mean([np.bincount(labels[share]).max() / len(share) for share in shares]))

    assert largest_class_share(0.05) > 0.6
    assert largest_class_share(1000.0) < 0.15


def test_exactly_enough_samples_for_the_dirichlet_minimum_are_enough() -> None:
    labels = np.arange(60) % 3
    shares = deal(labels, 20, Data(partition="dirichlet", dirichlet_beta=0.01, minimum=3), 0)
    assert [len(share) for share in shares] == [3] * 20


def test_local_deals_nothing() -> None:
    shares = deal(np.zeros(7, dtype=np.int64), 3, Data(partition="local"), 0)
    assert [share.tolist() for share in shares] == [list(range(7))] * 3


@pytest.mark.parametrize(
    ("data", "num_clients", "names"),
    [
        (Data(partition="iid"), 13, ["12", "13 clients"]),
        (Data(partition="shards", shards_per_client=4), 4, ["12", "16"]),
        (Data(partition="dirichlet", minimum=3), 5, ["12", "15", "data.minimum"]),
        (Data(partition="classes", classes_per_client=4), 2, ["classes_per_client = 4", "3 classes"]),
        (Data(partition="classes", classes_per_client=2), 9, ["class 0 has 4 samples", "6 of 9 clients"]),
        (Data(partition="iid"), 0, ["0 clients"]),
    ],
)
def test_too_little_data_is_refused_with_the_numbers(data: Data, num_clients: int, names: list[str]) -> None:
    labels = np.arange(12) % 3
    with pytest.raises(DataError) as refusal:
        deal(labels, num_clients, data, 0)
    for name in names:
        assert name in str(refusal.value)


def experiment(**data: str) -> Experiment:
    return Experiment(
        federation=Federation(clients=7, byzantine=2),
        training=Training(rounds=1, seed=5),
        attack=Attack(name="alie"),
        data=Data(partition="iid", **data),
    )


def test_by_default_adversaries_hold_the_shares_of_their_identities() -> None:
    labels = np.arange(70) % 10
    shares = deal_experiment(experiment(), labels)
    assert list(shares) == list(range(7))
    assert_disjoint_and_sorted(list(shares.values()), 70)


def test_dealt_to_the_honest_only_no_sample_is_lost_and_adversaries_hold_copies() -> None:
    labels = np.arange(70) % 10
    shares = deal_experiment(experiment(deal_to="honest"), labels)
    assert sum(len(shares[i]) for i in range(5)) == 70
    assert np.array_equal(shares[5], shares[0])
    assert np.array_equal(shares[6], shares[1])


def test_every_process_deals_the_same_from_a_read_only_map(tmp_path) -> None:
    labels = np.arange(70) % 10
    np.save(tmp_path / "labels.npy", labels)
    mapped = deal_experiment(experiment(), np.load(tmp_path / "labels.npy", mmap_mode="r"))
    for client, share in deal_experiment(experiment(), labels).items():
        assert np.array_equal(mapped[client], share)

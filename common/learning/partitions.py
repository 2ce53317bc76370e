"""How the training data is dealt to the identities; a function of the seed.

===========  ==========================================================================================================
classes      every client holds k distinct classes, every class is held equally often (give or take one client), and
             each class is split equally among its holders: the "two classes per client" of the ByzULDP paper
shards       the samples sorted by label and cut into n·k equal shards, k per client (McMahan et al. 2017, section 3);
             k = 1 is the "extreme" heterogeneity of Karimireddy et al. 2022
iid          equal shares of the shuffled samples
dirichlet    each class is cut at the cumulative shares of a Dirichlet(β, …, β) draw over the clients (Hsu et al.
             2019); then the clients with the most samples give to those below the minimum
local        nothing is dealt: every client holds all that its own ``data.root`` has
===========  ==========================================================================================================

"Equal" means that sizes differ by at most one; nothing is left over, except classes that nobody holds when
n·k is smaller than the number of classes.

References
----------
McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data, arXiv:1602.05629.
Hsu, Qi, Brown 2019, Measuring the effects of non-identical data distribution, arXiv:1909.06335.
Karimireddy, He, Jaggi 2022, Byzantine-robust learning on heterogeneous datasets via bucketing, arXiv:2006.09365.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from common.config import Data, Experiment
from common.errors import DataError
from common.randomness import stream

__all__ = ["deal", "deal_experiment"]

Shares = list[np.ndarray]


def deal(labels: np.ndarray, num_clients: int, data: Data, seed: int) -> Shares:
    """Deal the training samples to clients.

    Parameters
    ----------
    labels
        int (N,), the samples' classes.
    num_clients
        n.
    data
        Names the partition and its parameters.
    seed
        The run's seed.

    Returns
    -------
    list of np.ndarray
        For each client its samples: int64, sorted; disjoint between clients (except under ``local``).

    Raises
    ------
    DataError
        The data cannot be dealt like this, for instance fewer samples than clients.
    """
    labels = np.asarray(labels)
    if num_clients < 1:
        raise DataError(f"cannot deal data to {num_clients} clients; expected at least 1")
    if labels.ndim != 1 or not len(labels):
        raise DataError(f"cannot deal labels of shape {labels.shape}; expected (N,) with N ≥ 1")
    if data.partition == "local":
        return [np.arange(len(labels), dtype=np.int64)] * num_clients
    shares = _PARTITIONS[data.partition](labels, num_clients, data, stream(seed, "partition"))
    return [np.sort(np.asarray(share, dtype=np.int64)) for share in shares]


def deal_experiment(experiment: Experiment, labels: np.ndarray) -> dict[int, np.ndarray]:
    """Who holds what in an experiment.

    With ``data.deal_to = "all"`` the data is dealt to all n identities; the adversaries hold the shares of theirs.
    With ``"honest"`` it is dealt to the honest identities only, so that no sample is lost to training; the j-th
    adversary then holds a *copy* of the share of honest identity j (modulo their number), from which colluding
    adversaries can still estimate what honest clients send.

    Parameters
    ----------
    experiment
        Gives n, the adversaries, the partition and the seed.
    labels
        int (N,), the training samples' classes.

    Returns
    -------
    dict
        Client id to int64 sample indices, sorted.

    Raises
    ------
    DataError
        As :func:`deal`; or there is no honest identity to deal to.
    """
    seed, data = experiment.training.seed, experiment.data
    honest, adversaries = experiment.honest_ids, experiment.adversary_ids
    if data.deal_to == "all":
        return dict(enumerate(deal(labels, experiment.federation.clients, data, seed)))
    if not honest:
        raise DataError('data.deal_to = "honest", but all identities are adversaries')
    shares = dict(zip(honest, deal(labels, len(honest), data, seed), strict=True))
    return shares | {adversary: shares[honest[j % len(honest)]] for j, adversary in enumerate(adversaries)}


def _iid(labels: np.ndarray, num_clients: int, _data: Data, generator: np.random.Generator) -> Shares:
    _enough(len(labels), num_clients, f"{num_clients} clients")
    return np.array_split(generator.permutation(len(labels)), num_clients)


def _shards(labels: np.ndarray, num_clients: int, data: Data, generator: np.random.Generator) -> Shares:
    per_client = data.shards_per_client
    num_shards = num_clients * per_client
    _enough(len(labels), num_shards, f"{num_clients} clients with {per_client} shards each")
    shards = np.array_split(_by_label(labels, generator), num_shards)
    order = generator.permutation(num_shards).reshape(num_clients, per_client)
    return [np.concatenate([shards[shard] for shard in mine]) for mine in order]


def _classes(labels: np.ndarray, num_clients: int, data: Data, generator: np.random.Generator) -> Shares:
    per_client = data.classes_per_client
    classes, counts = np.unique(labels, return_counts=True)
    if per_client > len(classes):
        raise DataError(f"data.classes_per_client = {per_client}, but the data has {len(classes)} classes")
    held = _assign_classes(num_clients, per_client, len(classes), generator)
    holders = [np.flatnonzero((held == index).any(axis=1)) for index in range(len(classes))]
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label, count, members in zip(classes, counts, holders, strict=True):
        if not len(members):
            continue
        if count < len(members):
            raise DataError(
                f"class {label} has {count} samples, too few for the {len(members)} of {num_clients} clients that "
                f"hold it; fewer clients, or fewer data.classes_per_client (now {per_client})"
            )
        samples = generator.permutation(np.flatnonzero(labels == label))
        for member, part in zip(members, np.array_split(samples, len(members)), strict=True):
            parts[member].append(part)
    return [np.concatenate(mine) for mine in parts]


def _assign_classes(num_clients: int, per_client: int, num_classes: int, generator: np.random.Generator) -> np.ndarray:
    """Class indices (n, k), distinct in each row, every class used equally often (give or take one).

    Classes are drawn from a shuffled deck that has each once; the next deck starts where one ends. A client whose
    draw crosses from one deck to the next gets from the new one only classes that it does not hold yet.
    """
    held = np.empty((num_clients, per_client), dtype=np.int64)
    deck: list[int] = []
    for row in held:
        mine: list[int] = []
        while len(mine) < per_client:
            if not deck:
                deck = generator.permutation(num_classes).tolist()
                deck.sort(key=lambda index: index in mine)  # stable: what this client already holds comes last
            mine.append(deck.pop(0))
        row[:] = mine
    return held


def _dirichlet(labels: np.ndarray, num_clients: int, data: Data, generator: np.random.Generator) -> Shares:
    minimum = data.minimum
    _enough(len(labels), num_clients * minimum, f"{num_clients} clients with at least {minimum} each (data.minimum)")
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        samples = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_clients, data.dirichlet_beta))
        if not np.isfinite(shares).all():  # the limit of β towards 0: one client gets all
            shares = np.eye(num_clients)[generator.integers(num_clients)]
        cuts = np.round(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
        for mine, part in zip(parts, np.split(samples, np.clip(cuts, 0, len(samples))), strict=True):
            mine.append(part)
    return _raise_to_minimum([generator.permutation(np.concatenate(mine)) for mine in parts], minimum)


def _raise_to_minimum(shares: Shares, minimum: int) -> Shares:
    """Samples go, one at a time, from whoever then has the most to those with fewer than ``minimum``."""
    needy = [client for client, share in enumerate(shares) if len(share) < minimum]
    if not needy:
        return shares
    piles = [share.tolist() for share in shares]
    richest = [(-len(pile), client) for client, pile in enumerate(piles)]
    heapq.heapify(richest)
    for client in needy:
        while len(piles[client]) < minimum:
            # Those below the minimum are never on top: n·minimum samples exist, so someone has more than it.
            donor = heapq.heappop(richest)[1]
            piles[client].append(piles[donor].pop())
            heapq.heappush(richest, (-len(piles[donor]), donor))
    return [np.array(pile, dtype=np.int64) for pile in piles]


def _by_label(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """All samples, sorted by label, in random order within a label."""
    shuffled = generator.permutation(len(labels))
    ordered: np.ndarray = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return ordered


def _enough(samples: int, needed: int, what: str) -> None:
    if samples < needed:
        raise DataError(f"{samples} training samples cannot be dealt to {what}: that needs at least {needed}")


_PARTITIONS: dict[str, Callable[[np.ndarray, int, Data, np.random.Generator], Shares]] = {
    "classes": _classes,
    "shards": _shards,
    "iid": _iid,
    "dirichlet": _dirichlet,
}

"""No search finds neighbours farther apart than the sensitivity stated; the worst case reaches it where it is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.aggregation import RoundContext, make_rule
from common.aggregation.step import condition_row

SIZES = [(5, 1), (6, 2), (9, 2), (12, 3)]
EXACT = [  # n = 6 and 12 are even, 5 and 9 odd
    ("mean", {}),
    ("weighted_mean", {}),
    ("trimmed_mean", {}),
    ("median", {}),
    ("normalized_mean", {}),
    ("centered_clipping", {"radius": 10.0}),
    ("centered_clipping", {"radius": 0.3}),
]
BOUNDED = [
    ("multi_krum", {}),
    ("multi_krum", {"selected": 2}),
    ("mda", {}),
    ("centered_clipping", {"radius": 0.2, "iterations": 3}),
    ("centered_clipping", {"radius": 1.0, "iterations": 3}),
    ("trimmed_mean", {"before": ["bucketing"]}),
    ("median", {"before": [{"name": "bucketing", "size": 2}]}),
    ("trimmed_mean", {"before": [{"name": "clipping", "radius": 0.4}]}),
    ("centered_clipping", {"radius": 0.3, "before": ["bucketing"]}),
    ("normalized_mean", {"before": ["bucketing"]}),
]
PROJECTED = [
    ("geometric_median", {}),
    ("geometric_median", {"smoothing": 0.1}),
    ("krum", {}),
    ("meamed", {}),
    ("bulyan", {}),
    ("covariance_filter", {}),
    ("mca", {}),
    ("trimmed_mean", {"before": ["nearest_neighbor_mixing"]}),
    ("trimmed_mean", {"before": ["adaptive_clipping"]}),
    ("median", {"before": ["bucketing", "nearest_neighbor_mixing"]}),
]


def in_ball(rows):
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=-1, keepdims=True))


def make(name, n, f, parameters):
    if name == "weighted_mean":
        parameters = {**parameters, "weights": np.arange(1.0, n + 1).tolist()}
    return make_rule(name, num_byzantine=f, **parameters)


class Search:
    """Pairs of neighbours, all rows in the ball of radius 1, and how far apart a rule takes them.

    ``moving`` rows differ: the last one, which carries the largest weight, and under the strict premise f more. With
    ``beta`` the rule gets M_i = β R + (1 - β) m_i and, as its centre, R.
    """

    def __init__(self, name, n, f, d, parameters, *, strict=False, beta=None):
        self.rule = make(name, n, f, parameters)
        self.n, self.d, self.beta = n, d, beta
        self.moving = f + 1 if strict else 1
        self.rng = np.random.default_rng([n, f, d, len(name)])
        sizes = {"num_clients": n, "clip_norm": 1.0}
        if beta is not None:
            self.bound = self.rule.inside_sensitivity(**sizes, server_momentum=beta, strict=strict)
        elif strict:
            self.bound = self.rule.strict_sensitivity(**sizes)
        else:
            self.bound = self.rule.sensitivity(**sizes)
        self.projects = self.rule.projects_output(**sizes, strict=strict)
        self.released = np.zeros(d) if beta is None else 0.3 * self.rng.standard_normal(d)

    def result(self, rows):
        centre = torch.from_numpy(self.released.astype(np.float32))
        moved = rows if self.beta is None else self.beta * centre.double().numpy() + (1 - self.beta) * rows
        context = RoundContext(centre=centre, generator=np.random.default_rng(7))
        aggregate = self.rule.evaluate(torch.from_numpy(moved.astype(np.float32)), context)
        if self.projects:
            anchor = torch.zeros(self.d) if self.beta is None else self.beta * centre
            radius = 1.0 if self.beta is None else 1.0 - self.beta
            offset = (aggregate - anchor).float()
            condition_row(offset, radius)
            return offset.double().numpy()
        return aggregate.numpy()

    def share(self, rows, replaced):
        other = rows.copy()
        other[self.n - self.moving :] = replaced
        return float(np.linalg.norm(self.result(rows) - self.result(other)) / self.bound)

    def worst_case(self):
        """The victim at one end of a diameter, then at the other; as many rows at each end as make it matter."""
        direction = np.full(self.d, 1.0 / np.sqrt(self.d))
        rows = np.zeros((self.n, self.d))
        others = self.n - self.moving
        rows[: others // 2], rows[others // 2 : others] = -direction, direction
        rows[others:] = direction
        return rows, -rows[others:]

    def climb(self, steps):
        rows, replaced = self.worst_case()
        best = self.share(rows, replaced)
        rows = in_ball(rows + 0.3 * self.rng.standard_normal(rows.shape))
        found = self.share(rows, replaced)
        for step in range(steps):
            size = 0.5 * 0.98 ** (step % 100)
            moved = self.rng.random((self.n, 1)) < 0.3
            tried = in_ball(rows + size * self.rng.standard_normal(rows.shape) * moved)
            new = in_ball(replaced + size * self.rng.standard_normal(replaced.shape))
            share = self.share(tried, new)
            if share > found:
                found, rows, replaced = share, tried, new
        return max(best, found), best


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize(("n", "f"), SIZES)
@pytest.mark.parametrize(("name", "parameters"), EXACT, ids=str)
def test_an_exact_sensitivity_is_reached_and_never_exceeded(name, parameters, n, f, d):
    largest, worst_case = Search(name, n, f, d, parameters).climb(80)
    assert largest <= 1.0 + 1e-7
    assert worst_case >= 1.0 - 1e-6


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(("n", "f"), [(5, 1), (12, 2)])
@pytest.mark.parametrize(("name", "parameters"), BOUNDED, ids=str)
def test_a_proved_sensitivity_is_never_exceeded(name, parameters, n, f, strict):
    if "before" in parameters and n == 5:
        n = 6
    largest, _ = Search(name, n, f, 2, parameters, strict=strict).climb(80)
    assert 0.2 < largest <= 1.0 + 1e-7


@pytest.mark.parametrize(("name", "parameters"), PROJECTED, ids=str)
def test_a_projected_output_never_moves_by_more_than_2c(name, parameters):
    f = 1 if "before" in parameters or name == "bulyan" else 3
    for strict in (False, True):
        search = Search(name, 9, f, 2, parameters, strict=strict)
        assert search.projects
        assert search.bound == 2.0
        largest, _ = search.climb(30)
        assert largest <= 1.0 + 1e-7


@pytest.mark.parametrize(("n", "f"), SIZES)
@pytest.mark.parametrize(("name", "parameters"), EXACT, ids=str)
def test_the_strict_sensitivity_is_never_exceeded(name, parameters, n, f):
    largest, worst_case = Search(name, n, f, 2, parameters, strict=True).climb(80)
    assert largest <= 1.0 + 1e-7
    if name not in ("trimmed_mean", "median"):  # there f + 1 steps of one row are an upper bound
        assert worst_case >= 1.0 - 1e-6


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [*EXACT, ("multi_krum", {}), ("krum", {}), ("geometric_median", {"smoothing": 0.1})],
    ids=str,
)
def test_server_momentum_inside_the_rule_never_exceeds_its_own_sensitivity(name, parameters, beta, strict):
    search = Search(name, 9, 2, 2, parameters, strict=strict, beta=beta)
    largest, worst_case = search.climb(40)
    assert largest <= 1.0 + 2e-6  # the M_i are rounded to float32
    if name in ("mean", "trimmed_mean", "median") and not strict:
        assert worst_case >= 1.0 - 2e-6

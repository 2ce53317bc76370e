"""What the residuals of an audit's releases show: nothing in independent normals, and every fault of a stated size.

Seeds are fixed and public, so no test fails by chance. Faults are of sizes that are found with probability above
1 − 1e-6 over all seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import PrivacyError
from ps.privacy.residuals import CHECKS, Check, Residuals

RELEASES, D, GRID = 24, 4098, 2.0**-14
ALPHA = 1e-6

Matrix = npt.NDArray[np.float64]
random = np.random.default_rng


def normals(seed: int = 0, releases: int = RELEASES, d: int = D) -> Matrix:
    return random(seed).standard_normal((releases, d))


def directions(shape: tuple[int, ...]) -> Matrix:
    return random(99).choice((-1.0, 1.0), shape)


def checked(values: Matrix, *, alpha: float = ALPHA, grid: float = GRID) -> dict[str, Check]:
    residuals = Residuals(*values.shape, alpha)
    on_grid = np.rint(values / grid) * grid
    for first in range(0, len(values), 5):
        part = on_grid[first : first + 5]
        residuals.add(f"part {first}", part, along=directions(values.shape)[first : first + 5], grid=grid)
    found = {check.name: check for check in residuals.checks()}
    assert len(found) == CHECKS
    return found


def failed(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.verdict == "fail"}


# ---------------------------------------------------------------- nothing to find


@pytest.mark.parametrize("grid", [2.0**-16, 2.0**-10, 2.0**-7])
@pytest.mark.parametrize(("releases", "d"), [(1, 1000), (4, 4096), (24, 4098), (24, 2601)])
def test_independent_normals_pass_whatever_the_grid(releases: int, d: int, grid: float) -> None:
    found = checked(normals(1, releases, d), grid=grid)
    assert {check.verdict for check in found.values()} == {"pass"}


def test_false_alarms_are_no_more_frequent_than_stated() -> None:
    # At α = 1/2 an audit has no more than one in two; more than 75 of 100 have probability 3e-7.
    runs = [failed(checked(normals(seed, 8, 1024), alpha=0.5, grid=2.0**-9)) for seed in range(100)]
    assert sum(bool(run) for run in runs) <= 75
    # and no single check more than 1/26 of them: more than 18 have probability 5e-8.
    assert max(sum(name in run for run in runs) for name in checked(normals())) <= 18


def test_releases_of_very_different_grids_pass_together() -> None:
    residuals = Residuals(2 * RELEASES, D, ALPHA)
    for number, grid in enumerate((2.0**-16, 2.0**-7)):
        values = np.rint(normals(number) / grid) * grid
        residuals.add("", values, along=np.zeros_like(values), grid=grid)
    assert {check.verdict for check in residuals.checks()} == {"pass"}


# ---------------------------------------------------------------- planted faults


def ring(values: Matrix) -> Matrix:
    """Noise of round t is that of round t − 20."""
    values[20:] = values[: len(values) - 20]
    return values


def one_pair(values: Matrix) -> Matrix:
    """A seventh of one release is in the next."""
    values[4, : D // 7] = values[3, : D // 7]
    return values


def tile(values: Matrix) -> Matrix:
    """Coordinates j and j + d/3 share noise."""
    return np.tile(values[:, : D // 3], 3)


def small_tile(values: Matrix) -> Matrix:
    """The last 200 coordinates have the noise of the first 200."""
    values[:, -200:] = values[:, :200]
    return values


def tile_of_one_release(values: Matrix) -> Matrix:
    """In one release only, a quarter of the coordinates have the noise of another."""
    values[5, D // 2 : D // 2 + D // 4] = values[5, : D // 4]
    return values


def permuted(values: Matrix) -> Matrix:
    """A release has the values of another in another order."""
    values[9] = random(2).permutation(values[4])
    return values


def turned_round(values: Matrix) -> Matrix:
    """The second half of every release is the first, backwards and negated."""
    values[:, D // 2 :] = -values[:, D // 2 - 1 :: -1]
    return values


def bare_coordinates(values: Matrix) -> Matrix:
    """One coordinate has no noise."""
    values[:, 77] = 0.0
    return values


def bare_once(values: Matrix) -> Matrix:
    """In one release 40 coordinates have no noise."""
    values[6, -40:] = 0.0
    return values


def little_in_one(values: Matrix) -> Matrix:
    """One release has 15% too little noise."""
    values[8] *= 0.85
    return values


def little_everywhere(values: Matrix) -> Matrix:
    """3% too little noise."""
    return 0.97 * values


def uniform(values: Matrix) -> Matrix:
    """Of variance 1, but not normal."""
    return (random(3).random(values.shape) - 0.5) * np.sqrt(12)


def cut_off(values: Matrix) -> Matrix:
    """Nothing beyond 2, of variance 1."""
    many = random(4).standard_normal(2 * values.size)
    return (many[np.abs(many) < 2][: values.size] / 0.8796).reshape(values.shape)


@pytest.mark.parametrize(
    ("fault", "finds"),
    [
        (ring, {"pairs of releases", "values again"}),
        (one_pair, {"pairs of releases"}),
        (tile, {"lags", "lags of one release", "values again"}),
        (small_tile, {"lags"}),
        (tile_of_one_release, {"lags of one release"}),
        (permuted, {"values again"}),
        (turned_round, {"values again"}),
        (bare_coordinates, {"variance of coord."}),
        (bare_once, {"zeros"}),
        (little_in_one, {"variance of release"}),
        (little_everywhere, {"all variances"}),
        (uniform, {"shape"}),
        (cut_off, {"shape"}),
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[Matrix], Matrix], finds: set[str]) -> None:
    found = checked(fault(normals(7)))
    assert finds <= failed(found)
    assert all(found[name].subject == "noise" for name in finds)


def test_a_release_without_any_noise_is_found_and_spoils_no_other_check() -> None:
    values = normals(8)
    values[[3, 4]] = 0.0
    found = checked(values)
    assert {"zeros", "variance of release"} <= failed(found)
    assert all(np.isfinite(check.statistic) for check in found.values())


@pytest.mark.parametrize(
    ("shift", "name"),
    [
        (np.where(np.arange(D) == 50, 3.0, 0.0), "mean of coord."),
        (np.where(np.arange(RELEASES) == 2, 0.2, 0.0)[:, None], "mean of release"),
        (np.where(np.arange(RELEASES) == 2, 0.2, 0.0)[:, None] * directions((RELEASES, D)), "canary"),
    ],
)
def test_a_shift_is_an_aggregate_that_was_not_expected(shift: Matrix, name: str) -> None:
    found = checked(normals(9) + shift)
    assert name in failed(found)
    assert found[name].subject == "aggregate"


def test_halves_that_are_equal_are_a_correlation_of_one_at_lag_d_over_2() -> None:
    # Each of the d/2 products is there twice: √(d/2) standard deviations, not √d.
    lags = checked(np.tile(normals(12, 1, D // 2), 2))["lags"]
    assert lags.where == f"all, {D // 2} coordinates on"
    assert lags.statistic == pytest.approx(np.sqrt(D / 2), rel=1e-9)


def test_the_place_is_named() -> None:
    found = checked(ring(normals(10)))
    assert found["pairs of releases"].where.startswith("part 0, release ")
    assert found["pairs of releases"].where.split(" and ")[1].startswith("part 20, release ")
    assert checked(bare_coordinates(normals(10)))["variance of coord."].where == "coordinate 77"
    assert checked(tile(normals(10)))["lags"].where == f"all, {D // 3} coordinates on"


def test_more_noise_than_claimed_is_noted_and_no_failure() -> None:
    found = checked(1.1 * normals(11))
    assert failed(found) == set()
    assert found["too much noise"].verdict == "note"


def test_a_check_says_what_was_found_where_and_what_was_expected() -> None:
    check = Check("lags", 9.5, 6.5, "above", 10, "all, 3 coordinates on", "noise that coordinates share")
    assert check.verdict == "fail"
    assert str(check) == "lags 9.5 in all, 3 coordinates on, at most 6.5 expected: noise that coordinates share"


# ---------------------------------------------------------------- what is refused


def test_the_number_of_releases_is_fixed_in_advance() -> None:
    residuals = Residuals(3, D, ALPHA)
    two = normals(0, 2)
    residuals.add("", two, along=two, grid=GRID)
    with pytest.raises(PrivacyError, match="2 releases: expected 3"):
        residuals.checks()
    with pytest.raises(PrivacyError, match="4 releases, but 3 were planned"):
        residuals.add("", two, along=two, grid=GRID)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_residual_that_is_not_finite_is_refused(value: float) -> None:
    values = normals(0, 1)
    values[0, 5] = value
    with pytest.raises(PrivacyError, match="not finite"):
        Residuals(1, D, ALPHA).add("one", values, along=np.ones((1, D)), grid=GRID)


@pytest.mark.parametrize(("planned", "d", "alpha"), [(0, D, 0.1), (1, 999, 0.1), (1, D, 0.0), (1, D, 1.0)])
def test_what_cannot_be_checked_is_refused(planned: int, d: int, alpha: float) -> None:
    with pytest.raises(PrivacyError):
        Residuals(planned, d, alpha)
    with pytest.raises(PrivacyError, match="expected 4098 of each"):
        Residuals(1, D, 0.1).add("", normals(0, 1, D - 1), along=normals(0, 1, D - 1), grid=GRID)

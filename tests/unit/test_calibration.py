"""Multipliers and ε against golden values, closed forms, and another library's accountants."""

import json
import math
import warnings
from fractions import Fraction
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad

from common.errors import PrivacyError
from common.privacy.calibration import (
    calibrate,
    compose,
    epsilon_exact,
    epsilon_improved,
    epsilon_of,
    epsilon_renyi,
    mu_of,
    mu_to_delta,
    multiplier_exact,
    multiplier_improved,
    multiplier_renyi,
    sigma_of,
    sufficient_multiplier,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
EXTREME_Z = [0.0, 5e-324, 1e-300, 1e-154, 1e-100, 1e-10, 1e-3, 1.0, 1e3, 1e100, 1e154, 1e300, math.inf]
EXTREME_DELTA = [5e-324, 1e-300, 1e-5, 0.999999, 1 - 2**-53]


def named(case: dict) -> str:
    return "-".join(f"{value:g}" for value in list(case.values())[:3])


@pytest.mark.parametrize("case", GOLDEN["gaussian_multiplier_z"], ids=named)
@pytest.mark.parametrize(
    ("column", "multiplier"),
    [
        ("sufficient", sufficient_multiplier),
        ("rdp_mironov_optimal", multiplier_renyi),
        ("rdp_improved", multiplier_improved),
        ("exact", multiplier_exact),
    ],
)
def test_every_golden_multiplier_is_met(case, column, multiplier):
    assert multiplier(case["eps"], case["delta"], case["T"]) == pytest.approx(case[column], rel=1e-6)


@pytest.mark.parametrize("case", GOLDEN["gaussian_eps"], ids=named)
@pytest.mark.parametrize(
    ("column", "epsilon"),
    [("rdp_mironov", epsilon_renyi), ("rdp_improved", epsilon_improved), ("exact", epsilon_exact)],
)
def test_every_golden_epsilon_is_met(case, column, epsilon):
    assert epsilon(case["z"], case["T"], case["delta"]) == pytest.approx(case[column], rel=1e-6)


def test_delta_of_one_release_has_its_known_values():
    assert mu_to_delta(1.0, 1.0) == pytest.approx(0.126936738, abs=1e-9)
    assert mu_to_delta(0.0, 1.0) == pytest.approx(0.382924923, abs=1e-9)


@pytest.mark.parametrize(("eps", "mu"), [(0.0, 1e-3), (1e-4, 1e-4), (0.3, 0.2), (2.0, 0.49), (2.0, 0.51), (30.0, 6.0)])
def test_delta_equals_the_integral_it_stands_for(eps, mu):
    # δ = E[(1 − e^(ε − L))₊], the privacy loss L ~ N(μ²/2, μ²); with L = ε + μ y the integrand has no cancellation.
    t = eps / mu - mu / 2
    scale = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    integral, _ = quad(lambda y: -math.expm1(-mu * y) * math.exp(-y * y / 2 - t * y), 0, 60, epsabs=0, epsrel=1e-11)
    assert mu_to_delta(eps, mu) == pytest.approx(scale * integral, rel=1e-9)


def test_delta_at_the_ends():
    assert mu_to_delta(1.0, 0.0) == 0.0
    assert mu_to_delta(1.0, math.inf) == 1.0
    assert mu_to_delta(math.inf, 1.0) == 0.0


@pytest.mark.parametrize("delta", EXTREME_DELTA)
@pytest.mark.parametrize("z", EXTREME_Z)
def test_huge_and_tiny_multipliers_give_numbers_in_order(z, delta):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rounds in (1, 10**7):
            exact, improved, renyi = (f(z, rounds, delta) for f in (epsilon_exact, epsilon_improved, epsilon_renyi))
            assert 0 <= exact <= improved * (1 + 1e-9) <= renyi * (1 + 2e-9)


@pytest.mark.parametrize("delta", EXTREME_DELTA)
@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-300, 1e-10, 1.0, 700.0, 1e5, 1e100, 1e300, math.inf])
def test_huge_and_tiny_epsilons_give_multipliers_in_order(eps, delta):
    exact, improved, renyi = (f(eps, delta, 7) for f in (multiplier_exact, multiplier_improved, multiplier_renyi))
    assert 0 <= exact <= improved <= renyi


def test_no_noise_is_no_privacy_and_endless_noise_is_all_of_it():
    for epsilon in (epsilon_exact, epsilon_improved, epsilon_renyi):
        assert epsilon(0.0, 10, 1e-5) == math.inf
        assert epsilon(math.inf, 10, 1e-5) == 0.0
        assert epsilon(1.0, 0, 1e-5) == 0.0
    for multiplier in (multiplier_exact, multiplier_improved, multiplier_renyi):
        assert multiplier(math.inf, 1e-5, 10) == 0.0


@pytest.mark.parametrize("calibration", ["exact", "renyi"])
def test_a_calibrated_multiplier_keeps_its_promise_and_wastes_a_billionth(calibration):
    epsilon = {"exact": epsilon_exact, "renyi": epsilon_renyi}[calibration]
    multiplier = {"exact": multiplier_exact, "renyi": multiplier_renyi}[calibration]
    for eps, delta, rounds in [(0.1, 1e-9, 1), (1, 1e-5, 800), (20, 1e-3, 100), (500, 1e-2, 3), (1e-6, 1e-5, 10)]:
        z = calibrate(eps, delta, rounds, calibration)
        assert epsilon(z, rounds, delta) <= eps
        assert z == pytest.approx(multiplier(eps, delta, rounds) * (1 + 1e-9), rel=1e-13)


def test_the_closed_form_is_refused_where_it_promises_too_much():
    last = (8 - 4 * math.sqrt(2)) * math.log(1e4)
    assert epsilon_renyi(sufficient_multiplier(last * 0.999999, 1e-4, 50), 50, 1e-4) <= last
    with pytest.raises(PrivacyError, match=r"closed form holds up to 21\.58"):
        sufficient_multiplier(26.4, 1e-4, 1)
    too_little = 2 * math.sqrt(math.log(1e4)) / 26.4  # what the closed form would have given
    assert epsilon_renyi(too_little, 1, 1e-4) > 26.4


def test_different_multipliers_compose_by_their_inverse_squares():
    assert compose([3.0, 4.0, 12.0]) ** 2 == pytest.approx(1 / 9 + 1 / 16 + 1 / 144, rel=1e-14)
    assert epsilon_of(compose([20.0] * 100), 1e-5, "exact") == pytest.approx(epsilon_exact(20.0, 100, 1e-5), rel=1e-12)
    assert compose([]) == 0.0
    assert compose([1.0, 0.0]) == math.inf
    assert compose([1e-200, 1e-200]) == pytest.approx(math.sqrt(2) * 1e200, rel=1e-12)


def test_sigma_is_never_below_the_exact_product():
    for z, sensitivity in [(3.7306316348, 2 / 12), (0.1, 0.1), (1e-9, 7.0), (17.3, 2 / 270)]:
        sigma = sigma_of(z, sensitivity)
        product = Fraction(z) * Fraction(sensitivity)
        assert Fraction(sigma) >= product > Fraction(math.nextafter(sigma, 0))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: calibrate(0.0, 1e-5, 10), "epsilon = 0.0"),
        (lambda: calibrate(math.nan, 1e-5, 10), "epsilon = nan"),
        (lambda: calibrate(math.inf, 1e-5, 10), "epsilon = inf"),
        (lambda: calibrate(1.0, 0.0, 10), "delta = 0.0"),
        (lambda: calibrate(1.0, math.nan, 10), "delta = nan"),
        (lambda: calibrate(1.0, 1.0, 10), "delta = 1.0"),
        (lambda: calibrate(1.0, 1e-5, 0), "rounds = 0"),
        (lambda: calibrate(1.0, 1e-5, 10, "improved"), "calibration = 'improved'"),
        (lambda: calibrate(5e-324, 1e-5, 10, "renyi"), "noise multiplier of inf"),
        (lambda: epsilon_exact(-1.0, 1, 1e-5), "noise multiplier = -1.0"),
        (lambda: epsilon_exact(math.nan, 1, 1e-5), "noise multiplier = nan"),
        (lambda: epsilon_of(1.0, 1e-5, "moments"), "conversion 'moments'"),
        (lambda: mu_of(-1.0, 1e-5, "exact"), "epsilon = -1.0"),
        (lambda: mu_to_delta(1.0, math.nan), "mu = nan"),
        (lambda: compose([1.0, -2.0]), "noise multiplier = -2.0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call, said):
    with pytest.raises(PrivacyError, match=said):
        call()


ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
    ("z", "rounds", "delta"), [(1.0, 1, 1e-5), (20.0, 100, 1e-5), (50.0, 800, 1e-5), (7, 30, 1e-3)]
)
def test_the_exact_formula_agrees_with_the_pld_accountant(z, rounds, delta):
    # z is relative to the replacement sensitivity already: replace-one there would double it.
    accountant = PLDAccountant(ADD_OR_REMOVE)
    accountant.compose(dp_accounting.GaussianDpEvent(z), rounds)
    assert epsilon_exact(z, rounds, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


def test_mixed_multipliers_agree_with_the_pld_accountant():
    accountant = PLDAccountant(ADD_OR_REMOVE)
    multipliers = [3.0, 5.0, 8.0]
    for z in multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(z))
    assert epsilon_of(compose(multipliers), 1e-5, "exact") == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)


@pytest.mark.parametrize(("z", "rounds", "delta"), [(1.0, 1, 1e-5), (20.0, 100, 1e-5), (4.530877117, 1, 1e-6)])
def test_the_improved_conversion_agrees_with_the_rdp_accountant(z, rounds, delta):
    accountant = RdpAccountant(neighboring_relation=ADD_OR_REMOVE)
    accountant.compose(dp_accounting.GaussianDpEvent(z), rounds)
    theirs = accountant.get_epsilon(delta)
    ours = epsilon_improved(z, rounds, delta)
    assert ours <= theirs * (1 + 1e-12)  # ours is at the best order, theirs at the best of a grid
    assert ours == pytest.approx(theirs, rel=2e-3)

"""docs/guarantees.md says what the code does: its numbers, names, tables and links."""

from __future__ import annotations

import ast
import math
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.signal import fftconvolve
from scipy.special import ndtr

from common.aggregation import RULES, Rule, make_rule
from common.aggregation.step import condition_row, grid_of
from common.config import Experiment, experiment_from
from common.errors import PrivacyError
from common.noise import KEY_BITS
from common.privacy.calibration import (
    ROUNDED_UP,
    epsilon_exact,
    epsilon_of,
    mu_of,
    multiplier_exact,
    multiplier_renyi,
    sufficient_multiplier,
)
from ps.privacy.claim import premises_for
from ps.privacy.premises import premises_of, privacy_status
from ps.release import Mechanism
from ps.summary import OPERATOR_ONLY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "guarantees.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


@cache
def section(number: str) -> str:
    """The text under a numbered heading, up to the next heading."""
    found = re.search(rf"^(#+) {re.escape(number)}\.? .*?$(.*?)(?=^#{{2,3}} |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no section {number}"
    return found[2]


def table(number: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(number).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# ---------------------------------------------------------------- sensitivities (4.9)

TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|min|[A-Za-zτ]|[()+\-*/,])")


def value_of(formula: str, names: dict[str, float]) -> float:
    """A formula of the table, in which a product needs no sign: 2C(f + 1) is 2 * C * (f + 1)."""
    text = formula.strip("`").replace("−", "-").replace("·", "*")
    tokens = TOKEN.findall(text)
    assert "".join(tokens) == text.replace(" ", ""), formula
    python: list[str] = []
    for before, part in pairwise(["(", *tokens]):
        ends, begins = before not in "(+-*/," and before != "min", part not in ")+-*/,"
        python += ["*", part] if ends and begins else [part]
    return _evaluated(ast.parse("".join(python), mode="eval").body, names)


def _evaluated(node: ast.expr, names: dict[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            x, y = _evaluated(left, names), _evaluated(right, names)
            match op:
                case ast.Add():
                    return x + y
                case ast.Sub():
                    return x - y
                case ast.Mult():
                    return x * y
                case _:
                    return x / y
        case ast.Call(func=ast.Name(id="min"), args=arguments):
            return min(_evaluated(argument, names) for argument in arguments)
    raise AssertionError(ast.dump(node))


WEIGHTS = (5.0, 1.0, 2.0, 3.0, 1.0, 1.0, 4.0)


def rule_of(cell: str, n: int, f: int) -> tuple[Rule, dict[str, float]]:
    """The rule a row of the table speaks of, with example parameters, and what its formulas call them."""
    names = re.findall(r"`(\w+)`", cell)
    known: dict[str, float] = {}
    parameters: dict[str, Any] = {}
    if names[0] == "bucketing":
        known = {"B": n // 2, "s": n // (n // 2)}
        parameters["before"] = [{"name": "bucketing", "size": 2}]
    elif names[0] == "clipping":
        known["c"] = 0.5
        parameters["before"] = [{"name": "clipping", "radius": 0.5}]
    elif names[0] == "centered_clipping":
        known = {"τ": 0.25, "L": 3}
        parameters |= {"radius": 0.25, "iterations": 3}
    rule = make_rule(names[-1], num_byzantine=f, **parameters)
    if rule.takes_weights:
        counts = [WEIGHTS[i % len(WEIGHTS)] for i in range(n)]
        rule = rule.with_weights(counts)
        shares = sorted((count / sum(counts) for count in counts), reverse=True)
        known |= {"a": shares[0], "A": sum(shares[: f + 1])}
    return rule, known


def sizes_of(cell: str) -> list[tuple[int, int]]:
    sizes = [(20, 4), (23, 4), (21, 1), (24, 2), (30, 0), (23, 0)]
    wanted = {"n odd": 1, "n even": 0}
    for words, parity in wanted.items():
        if words in cell:
            return [(n, f) for n, f in sizes if n % 2 == parity]
    return sizes


@pytest.mark.parametrize("cells", table("4.9"), ids=lambda cells: cells[0].replace("`", ""))
@pytest.mark.parametrize("clip_norm", [1.0, 3.0])
def test_the_table_of_sensitivities_is_what_the_rules_state(cells: list[str], clip_norm: float) -> None:
    cell, stated, strict, proof = cells
    assert section(proof)
    for n, f in sizes_of(cell):
        if cell.startswith("`bucketing`") and n // 2 <= 2 * f:
            continue
        rule, known = rule_of(cell, n, f)
        names = {"n": n, "f": f, "C": clip_norm} | known
        found = rule.sensitivity(num_clients=n, clip_norm=clip_norm)
        assert value_of(stated, names) == pytest.approx(found, rel=1e-5), (n, f)
        found = rule.strict_sensitivity(num_clients=n, clip_norm=clip_norm)
        assert value_of(strict, names) == pytest.approx(found, rel=1e-5), (n, f)


def test_every_rule_is_in_the_table_of_sensitivities() -> None:
    named = {re.findall(r"`(\w+)`", cells[0])[-1] for cells in table("4.9")}
    assert named == set(RULES)


@pytest.mark.parametrize("cells", [c for c in table("4.9") if c[3] == "4.7"], ids=lambda c: c[0].replace("`", ""))
def test_what_is_charged_for_its_projection_is_projected(cells: list[str]) -> None:
    rule, _ = rule_of(cells[0], 23, 4)
    assert rule.projects_output(num_clients=23, clip_norm=1.0)


@pytest.mark.parametrize(("n", "f"), [(3, 1), (5, 0), (9, 2), (20, 4), (21, 10)])
def test_the_rows_of_section_4_1_attain_the_sensitivity(n: int, f: int) -> None:
    rule, unit = make_rule("trimmed_mean", num_byzantine=f), torch.full((16,), 0.25)
    others = [-unit] * f + [unit] * f + [torch.zeros(16)] * (n - 1 - 2 * f)
    one, other = (rule(torch.stack([sign * unit, *others])) for sign in (1.0, -1.0))
    moved = float(torch.linalg.vector_norm(one - other))
    assert moved == pytest.approx(rule.sensitivity(num_clients=n, clip_norm=1.0), rel=1e-6)


# ---------------------------------------------------------------- the mechanism (3)


@pytest.mark.parametrize("clip_norm", [1e-3, 0.7, 1.0, 1.5, 3.0, 1e3])
def test_the_grid_is_as_section_3_2_has_it(clip_norm: float) -> None:
    assert "the largest power of two not above C·2⁻²⁰" in section("3.2")
    grid = grid_of(clip_norm)
    assert math.frexp(grid)[0] == 0.5
    assert grid <= clip_norm * 2.0**-20 < 2 * grid
    assert clip_norm / grid < 2.0**21


def test_a_row_that_is_made_safe_is_in_the_ball_as_real_numbers() -> None:
    rng = np.random.default_rng(4)
    for clip_norm in (1.0, 0.3, 1.9999):
        row = torch.from_numpy((rng.standard_normal(1000) * 10.0 ** rng.integers(-3, 30)).astype(np.float32))
        assert condition_row(row, clip_norm)
        steps = [int(value) for value in (row.double() / grid_of(clip_norm)).tolist()]
        assert sum(step * step for step in steps) <= (clip_norm / grid_of(clip_norm)) ** 2


def test_the_bound_on_the_sum_of_section_3_4_leaves_room_for_the_noise() -> None:
    assert "whose s exceeds 2⁴⁹·g" in section("3.4")
    assert 13.7 * 2.0**49 + 2.0**21 * 100_000 < 2.0**53  # beside 100,000 rows
    spread_thin = {"rule": make_rule("normalized_mean", num_byzantine=0).with_weights([1.0] * 5), "num_clients": 5}
    Mechanism(**spread_thin, num_byzantine=0, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match="more digits than exact sums allow"):
        Mechanism(**spread_thin, num_byzantine=0, clip_norm=1e-12, noise_multiplier=1.0)


def test_the_noise_has_the_entropy_of_section_3_5() -> None:
    assert f"under {KEY_BITS} fresh bits" in section("3.5")


# ---------------------------------------------------------------- premises (5)


def test_premises_are_spelled_as_the_ledger_has_them() -> None:
    quoted = {
        f"{name}: {words}" for name, words in re.findall(r"^- \*\*(P\d)\*\*: (.*)$", section("5.1"), re.MULTILINE)
    }
    assert quoted == set(premises_of()) | set(premises_of(rescale=True))


@pytest.mark.parametrize("cells", table("5.1"), ids=lambda cells: cells[0].replace("`", ""))
def test_each_setting_rests_on_the_premises_of_the_table(cells: list[str]) -> None:
    settings = dict(re.findall(r'`(\w+) = "(\w+)"`', cells[0]))
    experiment = experiment_from(
        {
            "federation": {"clients": 20, "byzantine": 4},
            "training": {"rounds": 5},
            "privacy": {"epsilon": 4.0} | settings,
        }
    )
    assert ", ".join(premise[:2] for premise in premises_for(experiment)) == cells[1]


def test_the_wiretap_is_spelled_as_the_summary_has_it() -> None:
    private, because = privacy_status(epsilon=4.0, delta=1e-5, wiretap=True, premises=premises_of())
    assert not private
    assert f"*{because}*" in section("7.1")
    strict = premises_of(strict=True, round_timing="fixed")
    assert "the published models alone" in privacy_status(epsilon=4.0, delta=1e-5, wiretap=True, premises=strict)[1]


def test_several_identities_cost_what_section_5_3_says() -> None:
    mu = mu_of(4.0, 1e-5, "exact")
    two, three = (f"{epsilon_of(k * mu, 1e-5, 'exact'):.1f}" for k in (2, 3))
    assert f"ε = 4 becomes {two} with two identities and {three} with three" in section("5.3")


# ---------------------------------------------------------------- accounting (6)


@pytest.mark.parametrize("cells", table("6.2"), ids=lambda cells: f"{cells[0]}-{cells[2]}")
def test_the_multipliers_of_section_6_2_are_those_of_the_code(cells: list[str]) -> None:
    rounds, delta, epsilon, exact, renyi = map(float, cells)
    assert multiplier_exact(epsilon, delta, int(rounds)) == pytest.approx(exact, rel=1e-4)
    assert multiplier_renyi(epsilon, delta, int(rounds)) == pytest.approx(renyi, rel=1e-4)


def test_the_closed_form_ends_where_section_6_2_says() -> None:
    assert "(8 − 4√2)·log(1/δ), about 2.343·log(1/δ)" in section("6.2")
    largest = (8 - 4 * math.sqrt(2)) * math.log(1e5)
    assert largest / math.log(1e5) == pytest.approx(2.343, abs=5e-4)
    for epsilon in (1.0, largest * (1 - 1e-9)):
        assert sufficient_multiplier(epsilon, 1e-5, 10) >= multiplier_renyi(epsilon, 1e-5, 10)
    assert f"by a share of {ROUNDED_UP:.0e}".replace("e-09", "e-9") in section("6.2")


def worst_stop(epsilon: float, delta: float, rounds: int, step: float = 0.01) -> float:
    """δ of the best round to stop at, when ε is said to be what was spent until then; over δ.

    V_t(L) = max((1 - exp(ε_t - L))₊, E V_{t+1}(L + N(1/(2z²), 1/z²))), on a lattice of privacy losses L.
    """
    z = multiplier_exact(epsilon, delta, rounds)
    losses = np.arange(-12.0, 30.0, step)
    reach = int(9 / z / step) + 1
    edges = (np.arange(-reach, reach + 2) - 0.5) * step
    increment = np.diff(ndtr((edges - 0.5 / z**2) * z))

    def violated(t: int) -> np.ndarray:
        return np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon_exact(z, t, delta) - losses)))

    value = violated(rounds)
    for t in range(rounds - 1, -1, -1):
        padded = np.concatenate([np.zeros(reach), value, np.ones(reach)])
        value = fftconvolve(padded, increment[::-1], mode="valid")
        if t:
            value = np.maximum(value, violated(t))
    return float(np.interp(0.0, losses, value)) / delta


def test_an_odometer_is_no_guarantee_by_as_much_as_section_6_3_says() -> None:
    ((ten, hundred),) = re.findall(r"(\d[\d.]*)·δ for T = 10 and (\d[\d.]*)·δ for T = 100", section("6.3"))
    assert worst_stop(4.0, 1e-5, 1) == pytest.approx(1.0, rel=1e-3)  # no choice, no harm
    assert worst_stop(4.0, 1e-5, 10) == pytest.approx(float(ten), rel=0.02)
    assert worst_stop(4.0, 1e-5, 100) == pytest.approx(float(hundred), rel=0.03)


# ---------------------------------------------------------------- what leaves (2), robustness (10)


def test_what_the_public_summary_leaves_out_is_listed() -> None:
    (listed,) = re.findall(r"`public/summary.json` leaves out (.*?)\.$", section("2.1"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == set(OPERATOR_ONLY)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (20, 4), (10, 3)])
def test_kappa_is_that_of_section_10_1(n: int, f: int) -> None:
    assert "κ = 6r(1 + r) with r = f/(n − 2f)" in section("10.1")
    r = f / (n - 2 * f)
    assert make_rule("trimmed_mean", num_byzantine=f).kappa(n) == pytest.approx(6 * r * (1 + r))


def test_the_norm_of_a_trimmed_mean_is_bounded_as_in_section_10_1() -> None:
    rng = np.random.default_rng(10)
    for n, f, d in [(5, 1, 3), (9, 4, 4), (20, 4, 50)]:
        rule = make_rule("trimmed_mean", num_byzantine=f)
        for _ in range(50):
            rows = rng.standard_normal((n, d)) + rng.integers(0, 5)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            norm = float(torch.linalg.vector_norm(rule(torch.from_numpy(rows.astype(np.float32)))))
            assert norm <= math.sqrt(n / (n - f)) * (1 + 1e-6)


# ---------------------------------------------------------------- names and links


def test_sections_are_numbered_in_order() -> None:
    numbers = re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", TEXT, re.MULTILINE)
    expected, top, sub = [], 0, 0
    for number in numbers:
        top, sub = (top, sub + 1) if "." in number else (top + 1, 0)
        expected.append(f"{top}.{sub}" if sub else str(top))
    assert numbers == expected


def test_every_section_that_is_referred_to_exists() -> None:
    for number in re.findall(r"\bsections? (\d+(?:\.\d+)?)", TEXT) + re.findall(r"\((\d+\.\d+)(?:, \d+\.\d+)*\)", TEXT):
        assert section(number) is not None


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert not path or (DOCUMENT.parent / path).exists(), target
        assert path or anchor in anchors, target


def test_every_citation_has_its_reference_and_the_other_way_round() -> None:
    listed = set(re.findall(r"^- \*\*\[(\w+)\]\*\*", section("11"), re.MULTILINE))
    text = TEXT[: TEXT.index("## 11. References")]
    cited = set(re.findall(r"\[([A-Z][A-Za-z]*\d\d)(?:, [^\]]*)?\]", text))
    assert cited == listed


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:common|ps|client|adversary|deploy)/[\w/]+\.py)`", TEXT):
        assert (ROOT / name).is_file(), name


def test_settings_that_are_named_exist() -> None:
    sections: dict[str, Any] = {name: field.annotation for name, field in Experiment.model_fields.items()}
    named = re.findall(r"`(\w+)\.(\w+)\b[^`]*`", TEXT)
    known = [(part, key) for part, key in named if part in sections]
    assert len(known) > 15
    for part, key in known:
        assert key in sections[part].model_fields, f"{part}.{key}"

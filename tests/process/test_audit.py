"""The audit against real parameter servers: it passes on the product, and fails on each bug that is planted in one.

Verdicts of *pass* are asked for at α = 1e-6, so a test fails by chance no more often; bugs are found at α = 1e-3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from common.errors import ConfigError, PrivacyError, RunFailed
from common.learning.task import build_task
from deploy.audit import observation, report, suite
from deploy.audit.canary import Canary
from deploy.audit.observation import observe, releases
from deploy.audit.server import PRODUCT, Servers
from deploy.audit.setting import Claim, Setting
from deploy.audit.suite import Audited, Trials, judge, play, residuals_of, settings_for
from deploy.privacy.audit import audit as command
from ps.mechanism import mechanism_of
from ps.privacy.ledger import Budget
from ps.privacy.residuals import Residuals

CLAIM = Claim(4.0, 1e-5)
ALMOST_NEVER, RARELY = 1e-6, 1e-3


def small(setting: Setting) -> Setting:
    """The same with six clients, fewer parameters and rounds; two thousand trials of each pattern, at least."""
    support, rounds = (None, 2) if setting.support is None else (256, 8)
    if setting.canary.across == "rounds" and support is None:
        rounds = 2 * setting.canary.cells_per_trial
    return replace(setting, clients=6, byzantine=2, data="small_size", support=support, rounds=rounds)


SMALL = {setting.name: small(setting) for setting in settings_for()}


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("product"), PRODUCT) as servers:
        yield servers


def trials_of(setting: Setting, servers: Servers, folder: Path) -> Trials:
    return play(setting, CLAIM, servers, folder)


class Played:
    """The small settings on the product: each once, when first asked for, and what is left of all their releases."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers, self._folder = servers, folder
        self._trials: dict[str, Trials] = {}
        (self._residuals,) = residuals_of(list(SMALL.values()), ALMOST_NEVER).values()

    def trials(self, name: str) -> Trials:
        if name not in self._trials:
            self._trials[name] = play(SMALL[name], CLAIM, self._servers, self._folder, self._residuals)
        return self._trials[name]

    def residuals(self) -> Residuals:
        for name in SMALL:
            self.trials(name)
        return self._residuals


@pytest.fixture(scope="module")
def played(product: Servers, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(product, tmp_path_factory.mktemp("played"))


# ---------------------------------------------------------------- the product


@pytest.mark.parametrize("name", SMALL)
def test_the_product_passes_in_every_setting_and_is_nearly_as_private_as_it_claims(name: str, played: Played) -> None:
    setting = SMALL[name]
    findings = judge(setting, played.trials(name), CLAIM, ALMOST_NEVER)
    assert [finding.pattern for finding in findings] == list(setting.canary.patterns)
    for finding in findings:
        assert finding.result.verdict == "pass"
        assert finding.result.epsilon_lower > 0.65 * finding.result.expected_epsilon, "the canary did not bite"


def test_the_noise_of_all_releases_of_the_product_is_what_its_ledger_claims(played: Played) -> None:
    checks = played.residuals().checks()
    assert [str(check) for check in checks if check.verdict != "pass"] == []


def test_the_curve_bound_comes_near_the_claim_with_a_hundred_thousand_trials(product: Servers, tmp_path: Path) -> None:
    setting = Setting("one release", "", Canary(), rounds=4)
    assert (setting.clients, setting.byzantine, setting.server_momentum) == (20, 4, 0.9)
    trials = trials_of(setting, product, tmp_path)
    (finding,) = judge(setting, trials, CLAIM, RARELY)
    assert finding.trials == 104_040
    assert finding.result.best("curve").epsilon > 3.7
    assert judge(setting, trials, CLAIM, ALMOST_NEVER)[0].result.verdict == "pass"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_million_trials_bring_the_direct_bound_above_three(product: Servers, tmp_path: Path) -> None:
    setting = Setting("one release", "", Canary(), rounds=200)
    trials = trials_of(setting, product, tmp_path)
    (finding,) = judge(setting, trials, CLAIM, RARELY)
    assert finding.trials >= 5_000_000
    assert finding.result.best("direct").epsilon > 3.0
    assert finding.result.best("curve").epsilon > 3.7
    assert judge(setting, trials, CLAIM, ALMOST_NEVER)[0].result.verdict == "pass"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_clients_with_fifteen_byzantine_pass_too(product: Servers, tmp_path: Path) -> None:
    setting = settings_for(full=True)[-1]
    assert (setting.clients, setting.byzantine) == (300, 15)
    (finding,) = judge(setting, trials_of(setting, product, tmp_path), CLAIM, ALMOST_NEVER)
    assert finding.result.verdict == "pass"
    assert finding.result.best("curve").epsilon > 3.7


# ---------------------------------------------------------------- planted bugs


# Noise used twice looks *more* private to a pattern of equal signs: that one must not be expected to fail.
@pytest.mark.parametrize(
    ("bug", "name", "patterns", "check"),
    [
        ("scaled_for_the_mean", "one release", {"+"}, "all variances"),
        ("momentum_factor_twice", "one release", {"+"}, "all variances"),
        ("noise_of_the_first_round", "four releases", {"+-+-", "++--", "+--+"}, "pairs of releases"),
        ("noise_of_the_round_before", "four releases", {"+-+-", "++--"}, "pairs of releases"),
        ("one_draw_for_two_neighbours", "neighbours", {"+-"}, "lags"),
        ("one_block_for_two_halves", "halves", {"+-"}, "lags"),
        ("keyed_by_the_run", "killed and restarted", {"+-"}, "pairs of releases"),
        ("inherited_generator", "two runs", {"+-"}, "pairs of releases"),
        ("no_projection", "oversized", {"+"}, "canary"),
        ("no_projection", "concentrated", {"+"}, "canary"),
    ],
)
def test_the_audit_finds_a_planted_bug_by_its_canary_and_in_the_noise_itself(
    bug: str, name: str, patterns: set[str], check: str, tmp_path: Path
) -> None:
    audited = suite.audit([SMALL[name]], CLAIM, RARELY, entry=f"planted_bugs:{bug}")
    assert {finding.pattern for finding in audited.findings if finding.result.verdict == "fail"} == patterns
    assert check in {each.name for each in audited.checks if each.verdict == "fail"}
    assert report.as_json(audited, CLAIM, RARELY)["verdict"] == "fail"


@pytest.mark.parametrize(
    ("bug", "rounds", "checks"),
    [
        ("ring_of_five", 6, {"pairs of releases", "values again"}),
        ("shuffled", 2, {"values again"}),
        ("tiles", 2, {"lags", "lags of one release", "values again"}),
        ("bare_tail", 2, {"variance of coord."}),
        ("cut_off", 4, {"shape"}),
    ],
)
def test_noise_that_no_canary_was_made_for_is_told_from_what_the_ledger_claims(
    bug: str, rounds: int, checks: set[str]
) -> None:
    setting = replace(SMALL["one release"], rounds=rounds)
    audited = suite.audit([setting], CLAIM, RARELY, entry=f"planted_bugs:{bug}")
    assert checks <= {check.name for check in audited.checks if check.verdict == "fail"}
    said = report.as_json(audited, CLAIM, RARELY)
    assert said["verdict"] == "fail"
    assert "the noise is not what the ledger claims: " in said["message"]


# ---------------------------------------------------------------- what is sent, and what is asked for


@pytest.mark.parametrize("setting", [*settings_for(full=True), *SMALL.values()], ids=lambda setting: setting.name)
def test_the_budget_of_every_setting_makes_the_server_choose_the_multiplier_that_is_audited(setting: Setting) -> None:
    privacy = setting.experiment(CLAIM).privacy
    assert privacy.epsilon is not None
    z = Budget(privacy.epsilon, privacy.delta, setting.rounds_of_run, privacy.calibration).noise_multiplier
    assert z == pytest.approx(setting.noise_multiplier(CLAIM.mu), rel=1e-8)


def test_the_unit_of_the_audit_is_the_noise_that_the_mechanism_charges_for() -> None:
    setting = SMALL["one release"]
    experiment = setting.experiment(CLAIM)
    privacy = experiment.privacy
    assert privacy.epsilon is not None
    budget = Budget(privacy.epsilon, privacy.delta, setting.rounds_of_run, privacy.calibration)
    mechanism = mechanism_of(experiment, budget, lambda: build_task(experiment).dataset.train.labels)
    assert mechanism.charged_sigma(setting.num_parameters) == pytest.approx(setting.sigma(CLAIM.mu), rel=1e-8)


def test_a_server_that_chose_another_multiplier_than_its_budget_means_is_refused(
    product: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Claim(CLAIM.epsilon, CLAIM.delta)
    setting = SMALL["one release"]
    experiment = setting.experiment(Claim(5.0, CLAIM.delta))
    monkeypatch.setattr(Setting, "experiment", lambda *_: experiment)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        observe(setting, wrong, 1, product, tmp_path)


@pytest.mark.parametrize(("name", "at_most"), [("one release", 1 + 1e-7), ("momentum inside", 1.02)])
def test_residuals_are_in_units_of_what_the_ledger_charged_for_y(
    name: str, at_most: float, product: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Momentum inside the rule is charged for rounding besides, and its noise is on R: Y has 1 / (1 − β) times as much.
    charged, setting = [], SMALL[name]
    product_s = observation._charged
    monkeypatch.setattr(observation, "_charged", lambda *given: charged.append(product_s(*given)) or charged[-1])
    (residuals,) = residuals_of([setting], RARELY).values()
    observe(setting, CLAIM, 1, product, tmp_path, residuals)
    (sigmas,) = charged
    ratios = sigmas / setting.sigma(CLAIM.mu)
    assert sigmas.shape == (setting.rounds,)
    assert np.all((ratios >= 1 - 1e-7) & (ratios <= at_most))


@pytest.mark.parametrize(
    ("across", "shape"), [("rounds", (1, 8, 6)), ("neighbours", (1, 3, 12)), ("halves", (1, 3, 12))]
)
def test_a_trial_sees_noise_of_variance_one_and_a_shift_of_mu(across: str, shape: tuple[int, int, int]) -> None:
    canary = Canary(("+-", "++"), across=across)  # type: ignore[arg-type]
    random = np.random.default_rng(1)
    signs = canary.signs(shape, random)
    shift = canary.statistics(signs, signs)
    assert {pattern: values.size for pattern, values in shift.items()} == canary.trials(shape)
    assert all(np.allclose(values, np.sqrt(2)) for values in shift.values())
    noise = canary.statistics(random.standard_normal((400, *shape[1:])), np.broadcast_to(signs, (400, *shape[1:])))
    assert all(abs(values.std() - 1) < 0.2 for values in noise.values())


def test_patterns_of_opposite_signs_cancel_what_their_cells_share() -> None:
    rounds = Canary(suite.ALL_SIGNS_OF_FOUR).statistics(
        np.ones((1, 4, 8)), Canary(suite.ALL_SIGNS_OF_FOUR).signs((1, 4, 8), np.random.default_rng(2))
    )
    assert {pattern: bool(np.allclose(values, 0)) for pattern, values in rounds.items()} == {
        "++++": False,
        "+-+-": True,
        "++--": True,
        "+--+": True,
    }


@pytest.mark.parametrize("patterns", [(), ("",), ("+", "+-"), ("+0",)])
def test_patterns_that_are_none_are_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected strings"):
        Canary(patterns)


def test_releases_are_recovered_from_the_models_within_float32() -> None:
    random, beta = np.random.default_rng(3), np.float32(0.9)
    released = random.standard_normal((6, 50)).astype(np.float32)
    theta, momentum = [np.zeros(50, dtype=np.float32)], np.zeros(50, dtype=np.float32)
    for y in released:
        momentum = beta * momentum + np.float32(0.1) * y
        theta.append(theta[-1] - momentum)
    found = releases(np.array(theta), 0.9, sigma=1.0)
    assert np.abs(found - released).max() < 1e-4


def test_models_too_large_to_show_the_noise_are_refused() -> None:
    models = np.array([[0.0], [1e6]], dtype=np.float32)
    with pytest.raises(PrivacyError, match="would hide noise"):
        releases(models, 0.9, sigma=1.0)


def test_a_server_that_does_not_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    setting = SMALL["one release"]
    (tmp_path / "run").write_text("in the way")
    with Servers(tmp_path) as servers, pytest.raises(RunFailed, match="asked to start"):
        observe(setting, CLAIM, 1, servers, tmp_path)


# ---------------------------------------------------------------- the command


def made_up(claimed: Claim, shift: float, noise: float = 1.0) -> Audited:
    """What a mechanism with ``shift`` times the μ claimed would give; ``noise``: the σ that is left in its releases."""
    setting = SMALL["one release"]
    normals = np.random.default_rng(4).standard_normal((2, setting.canary.trials(setting.shape)["+"]))
    trials = {"+": {world: world * shift * claimed.mu / 2 + normals[(1 - world) // 2] for world in (1, -1)}}
    residuals = Residuals(4, 4096, ALMOST_NEVER)
    left = noise * np.random.default_rng(5).standard_normal((4, 4096))
    residuals.add("one release", left, along=np.ones((4, 4096)), grid=1e-6)
    return Audited(judge(setting, trials, claimed, 0.01), residuals.checks())


def asked(monkeypatch: pytest.MonkeyPatch, shift: float, *arguments: str, noise: float = 1.0):
    monkeypatch.setattr(suite, "audit", lambda _settings, claim, _alpha, **_: made_up(claim, shift, noise))
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_says_pass_how_tight_and_what_it_does_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 1.0)
    assert result.exit_code == 0
    assert "pass: no bound exceeds the claim, with confidence 99%; the largest reaches 9" in result.output
    assert "the noise of all releases is what the ledger claims" in result.output
    assert "does not cover side channels" in result.output


def test_the_command_fails_if_only_the_noise_itself_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 1.0, noise=0.9)
    assert isinstance(result.exception, PrivacyError)
    assert str(result.exception).startswith("the noise is not what the ledger claims: all variances 0.8")
    assert "with confidence 99%" in str(result.exception)


def test_more_noise_than_claimed_is_said_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 1.0, noise=1.1)
    assert result.exit_code == 0
    assert "There is more noise than the ledger claims" in result.output


def test_the_command_prints_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 1.0, "--json", "--epsilon", "2", "--alpha", "0.02")
    found = json.loads(result.stdout)
    assert (found["verdict"], found["claimed_epsilon"], found["alpha"]) == ("pass", 2.0, 0.02)
    (setting,) = found["settings"]
    assert setting["name"] == "one release"
    assert 0 < setting["direct"] < setting["curve"] == found["epsilon_lower"] < 2.0
    assert {check["verdict"] for check in found["residuals"]} == {"pass"}
    assert {"name", "statistic", "threshold", "side", "tested", "where"} <= set(found["residuals"][0])


def test_the_command_fails_with_the_bound_and_the_likely_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 2.0)
    assert isinstance(result.exception, PrivacyError)
    assert PrivacyError.exit_code == 15
    assert "is false, with confidence 99%: epsilon is at least" in str(result.exception)
    assert "too little noise for the rule's sensitivity" in str(result.exception)


def test_a_canary_that_moved_nothing_is_no_quiet_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 0.1)
    assert result.exit_code == 0
    assert "the canary moved the releases less than it should" in result.output


def test_an_epsilon_too_small_for_the_trials_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    result = asked(monkeypatch, 1.0, "--epsilon", "0.05")
    assert result.exit_code == 0
    assert "Little can be said of so small an epsilon" in result.output


@pytest.mark.parametrize("arguments", [("--alpha", "1"), ("--clients", "8", "--byzantine", "4"), ("--byzantine", "-1")])
def test_the_command_refuses_what_it_cannot_audit(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert isinstance(asked(monkeypatch, 1.0, *arguments).exception, ConfigError)

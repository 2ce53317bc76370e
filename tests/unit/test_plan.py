"""`byzuldp privacy plan`, and the Python call behind it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from common.config import Experiment, load_experiment
from common.errors import ByzULDPError, ConfigError, PrivacyError, RuleError
from common.privacy.calibration import epsilon_exact, epsilon_renyi, multiplier_exact, multiplier_renyi
from common.schedules import Schedule, parse_schedule
from deploy.privacy.plan import plan as command
from ps.mechanism import budget_of, mechanism_of
from ps.privacy.plan import LEARNS, Plan, plan, warnings_of
from ps.privacy.signal import effective_steps
from ps.release import Mechanism, Shift
from ps.update import ServerState, advance

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
D = 26_010  # parameters of the paper's CNN on MNIST

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(command)


def output(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def planned(*words: object) -> dict:
    """What the command prints with --json; a JSON without NaN and infinities."""
    return json.loads(output(*words, "--json"), parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


def named(case: dict) -> str:
    return "-".join(f"{value:g}" for value in list(case.values())[:3])


# -------------------------------------------------------------------- ε, δ, T and z


@pytest.mark.parametrize("case", GOLDEN["gaussian_multiplier_z"], ids=named)
def test_the_command_meets_every_golden_multiplier(case):
    budget = ("--epsilon", case["eps"], "--delta", case["delta"], "--rounds", case["T"])
    found = planned(*budget)
    assert found["noise_multiplier"] == found["noise_multiplier_exact"] == pytest.approx(case["exact"], rel=1e-6)
    assert found["noise_multiplier_renyi"] == pytest.approx(case["rdp_mironov_optimal"], rel=1e-6)
    assert found["epsilon_exact"] == pytest.approx(case["eps"], rel=1e-6)
    if case["eps"] <= (8 - 4 * math.sqrt(2)) * math.log(1 / case["delta"]):
        assert found["noise_multiplier_sufficient"] == pytest.approx(case["sufficient"], rel=1e-6)
    else:
        assert found["noise_multiplier_sufficient"] is None
        assert "closed form holds up to" in found["sufficient_refused"]


@pytest.mark.parametrize("case", [c for c in GOLDEN["gaussian_multiplier_z"] if c["T"] < 800], ids=named)
def test_the_command_calibrates_by_renyi_when_asked(case):
    budget = ("--epsilon", case["eps"], "--delta", case["delta"], "--rounds", case["T"])
    found = planned(*budget, "--calibration", "renyi")
    assert found["noise_multiplier"] == pytest.approx(case["rdp_mironov_optimal"], rel=1e-6)
    assert found["epsilon_renyi"] == pytest.approx(case["eps"], rel=1e-6)
    assert found["epsilon_exact"] < case["eps"]


@pytest.mark.parametrize("case", GOLDEN["gaussian_eps"], ids=named)
def test_the_command_meets_every_golden_epsilon(case):
    found = planned("--noise-multiplier", case["z"], "--delta", case["delta"], "--rounds", case["T"])
    assert found["epsilon"] == found["epsilon_exact"] == pytest.approx(case["exact"], rel=1e-6)
    assert found["epsilon_renyi"] == pytest.approx(case["rdp_mironov"], rel=1e-6)
    assert found["derived"] == ["epsilon"]


@pytest.mark.parametrize("calibration", ["exact", "renyi"])
@pytest.mark.parametrize(
    ("eps", "delta", "z"), [(8.0, 1e-5, 3.3), (20.0, 1e-3, 2.4), (0.5, 1e-6, 40.0), (1.0, 1e-5, 5.0)]
)
def test_the_rounds_that_fit_do_and_one_more_does_not(eps, delta, z, calibration):
    rounds = plan(epsilon=eps, delta=delta, noise_multiplier=z, calibration=calibration).rounds
    assert rounds is not None
    costs = {"exact": epsilon_exact, "renyi": epsilon_renyi}[calibration]
    assert costs(z, rounds, delta) <= eps < costs(z, rounds + 1, delta)


def test_as_many_rounds_fit_as_the_noise_was_made_for():
    for rounds in (1, 7, 800):
        found = plan(epsilon=4.0, delta=1e-5, rounds=rounds)
        assert found.rounds_that_fit == rounds
        assert plan(epsilon=4.0, delta=1e-5, noise_multiplier=found.noise_multiplier).rounds == rounds


@pytest.mark.parametrize("multiplier", [multiplier_exact, multiplier_renyi])
def test_the_rounds_that_fit_are_right_where_rounding_decides(multiplier):
    calibration = multiplier.__name__.removeprefix("multiplier_")
    costs = {"exact": epsilon_exact, "renyi": epsilon_renyi}[calibration]
    for rounds in range(2, 120):
        z = multiplier(3.0, 1e-5, rounds)  # not rounded up: T is on the edge
        fit = plan(epsilon=3.0, delta=1e-5, noise_multiplier=z, calibration=calibration).rounds
        assert costs(z, fit, 1e-5) <= 3.0 < costs(z, fit + 1, 1e-5)


@pytest.mark.parametrize("calibration", ["exact", "renyi"])
def test_delta_follows_from_the_three_others(calibration):
    forward = plan(delta=1e-5, rounds=100, noise_multiplier=20.0, calibration=calibration)
    back = plan(epsilon=forward.epsilon, rounds=100, noise_multiplier=20.0, calibration=calibration)
    assert back.delta == pytest.approx(1e-5, rel=1e-6)
    assert back.derived == ("delta",)


def test_sigma_stands_for_the_noise_multiplier():
    federation = {"clients": 300, "byzantine": 15, "clip_norm": 2.0, "delta": 1e-3, "rounds": 100}
    forward = plan(epsilon=20.0, **federation)
    assert forward.sigma == pytest.approx(forward.noise_multiplier * 2 * 2.0 / 270, rel=1e-12)
    back = plan(sigma=forward.sigma, **federation)
    assert back.epsilon == pytest.approx(20.0, rel=1e-7)
    assert back.sigma == forward.sigma


def test_the_epsilons_by_round_are_all_in_the_json_and_thinned_for_people():
    given = ("--epsilon", 8, "--delta", 1e-5, "--rounds", 800)
    by_round = planned(*given)["epsilon_by_round"]
    assert [row["rounds"] for row in by_round] == list(range(1, 801))
    exact = [row["epsilon_exact"] for row in by_round]
    assert exact == sorted(exact)
    assert exact[-1] == pytest.approx(8.0, rel=1e-6)
    table = output(*given).split("ε after so many rounds")[1].splitlines()[2:12]
    assert [int(line.split()[0]) for line in table] == list(range(80, 801, 80))


def test_no_noise_is_no_privacy_and_null_in_the_json():
    found = planned("--noise-multiplier", 0, "--delta", 1e-5, "--rounds", 5, "--clients", 20, "--parameters", 10)
    assert found["epsilon"] is found["epsilon_exact"] is found["epsilon_renyi"] is found["signal_to_noise"] is None
    assert found["sigma"] == 0
    assert {row["epsilon_exact"] for row in found["epsilon_by_round"]} == {None}
    assert "no privacy" in found["warnings"][0]


@pytest.mark.parametrize("z", [5e-324, 1e-300, 1e-10, 1e6, 1e300])
def test_huge_and_tiny_noise_gives_numbers_or_null(z):
    found = planned("--noise-multiplier", z, "--delta", 1e-5, "--rounds", 3)
    assert (found["epsilon"] is None) == (z < 1e-100)
    assert found["epsilon"] is None or found["epsilon"] >= 0
    if z <= 1e6:
        federation = ("--clients", 100, "--byzantine", 5, "--parameters", 1000)
        assert planned("--noise-multiplier", z, "--delta", 1e-5, "--rounds", 3, *federation)["sigma"] >= 0


def test_noise_that_the_parameter_server_would_refuse_is_refused():
    with pytest.raises(PrivacyError, match="more digits than exact sums allow"):
        plan(noise_multiplier=1e300, delta=1e-5, rounds=3, clients=100)


@pytest.mark.parametrize("eps", [1e-300, 1e-9, 1e9, 1e200])
def test_huge_and_tiny_epsilons_give_noise(eps):
    found = planned("--epsilon", eps, "--delta", 1e-5, "--rounds", 3)
    assert found["noise_multiplier"] > 0


# -------------------------------------------------------------------- what the parameter server would do


RULES = [
    ("trimmed_mean", {}),
    ("mean", {}),
    ("median", {}),
    ("normalized_mean", {}),
    ("krum", {}),
    ("multi_krum", {}),
    ("centered_clipping", {"radius": 0.3}),
    ("geometric_median", {}),
]


def experiment_with(tmp_path: Path, *lines: str, rule: str = "trimmed_mean", **parameters: object) -> Path:
    """An experiment with 40 clients, 3 of them Byzantine, ε = 6."""
    path = tmp_path / "planned.toml"
    own = "\n".join(f"{key} = {value}" for key, value in parameters.items())
    path.write_text(
        f"[federation]\nclients = 40\nbyzantine = 3\n[training]\nrounds = 50\nclip_norm = 0.7\n"
        f"[privacy]\nepsilon = 6.0\ndelta = 1e-3\n[model]\nname = 'logistic'\n"
        f"[aggregation]\nrule = '{rule}'\n{own}\n" + "\n".join(lines)
    )
    return path


def mechanism_for(experiment: Experiment) -> Mechanism:
    return mechanism_of(experiment, budget_of(experiment), lambda: pytest.fail("labels are not needed"))


@pytest.mark.parametrize(("rule", "parameters"), RULES, ids=[rule for rule, _ in RULES])
@pytest.mark.parametrize("premise", ["independent", "strict"])
def test_a_plan_says_what_the_parameter_server_will_use(tmp_path, rule, parameters, premise):
    path = experiment_with(tmp_path, rule=rule, **parameters)
    timing = ["privacy.premise=strict", "privacy.round_timing=fixed"] if premise == "strict" else []
    mechanism = mechanism_for(load_experiment(path, timing))
    found = planned(path, *(word for override in timing for word in ("--set", override)))
    assert found["parameters"] == 7850
    assert found["noise_multiplier"] == mechanism.noise_multiplier
    assert found["sensitivity"] == mechanism.charged_sensitivity(7850) == found[f"sensitivity_{premise}"]
    assert found["sigma"] == pytest.approx(mechanism.charged_sigma(7850), rel=1e-14)
    assert found["noise_norm"] == pytest.approx(mechanism.charged_sigma(7850) * math.sqrt(7850), rel=1e-12)


def test_flags_alone_say_the_same_as_the_experiment(tmp_path):
    from_file = planned(experiment_with(tmp_path))
    from_flags = planned(
        *("--epsilon", 6, "--delta", 1e-3, "--rounds", 50, "--clients", 40, "--byzantine", 3, "--clip-norm", 0.7),
        *("--server-momentum", 0.9, "--rule", "trimmed_mean", "--calibration", "exact", "--parameters", 7850),
    )
    assert from_flags.pop("assumed") == ["learning_rate"]
    from_file.pop("assumed")
    assert from_flags == from_file


@pytest.mark.parametrize(("rule", "factor"), [("trimmed_mean", 0.1), ("krum", 0.1), ("normalized_mean", 1.0)])
def test_inside_the_rule_server_momentum_shrinks_what_is_released_where_that_is_proved(tmp_path, rule, factor):
    path = experiment_with(tmp_path, rule=rule)
    inside = planned(path, "--server-momentum-form", "inside")
    outside = planned(path)
    experiment = load_experiment(path, ["training.server_momentum_form=inside"])
    charged = mechanism_for(experiment).charged_sensitivity(7850, Shift(0.9, torch.zeros(1)))
    assert inside["sensitivity"] == charged
    assert inside["sensitivity"] == pytest.approx(factor * outside["sensitivity"], rel=0.03)


def test_the_ratio_is_the_same_in_both_forms_of_server_momentum():
    given = {"epsilon": 8.0, "delta": 1e-4, "rounds": 60, "clients": 300, "byzantine": 20, "parameters": 10}
    ratios = [plan(**given, server_momentum_form=form).signal_to_noise for form in ("outside", "inside")]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.02)  # inside, rounding is charged


def test_weights_of_identities_count(tmp_path):
    path = experiment_with(tmp_path, rule="normalized_mean")
    path.write_text(path.read_text().replace("byzantine = 3", f"byzantine = 3\nweights = {[1.0] * 39 + [39.0]}"))
    found = planned(path)
    assert found["sensitivity"] == mechanism_for(load_experiment(path)).charged_sensitivity(7850)
    assert found["sensitivity"] > 2 * 0.5


def test_a_ready_experiment_needs_no_data_to_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no ./data here
    found = planned("mnist")
    assert (found["parameters"], found["clients"], found["epsilon"]) == (D, 300, 20.0)
    assert found["learning_rate"] == found["server_momentum"] == 0.5


def test_noise_given_beside_an_experiment_replaces_its_epsilon_or_with_epsilon_its_rounds():
    assert planned("mnist", "--noise-multiplier", 5)["derived"] == ["epsilon"]
    both = planned("mnist", "--noise-multiplier", 5, "--epsilon", 3)
    assert both["derived"] == ["rounds"]
    assert both["rounds"] == plan(epsilon=3.0, delta=1e-3, noise_multiplier=5.0).rounds
    assert planned("mnist", "--epsilon", 3)["derived"] == ["noise_multiplier"]


def test_without_a_rule_in_the_question_torch_is_not_loaded():
    code = (
        "import sys; from ps.privacy.plan import plan; plan(epsilon=8.0, delta=1e-5, rounds=800); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -------------------------------------------------------------------- signal and noise


SCHEDULES = [
    (0.3, 0.0),
    (0.3, 0.9),
    ([0.5, 0.4, 0.1], [0.0, 0.9, 0.5]),
    ({"kind": "inverse_sqrt", "a": 1.0, "b": 2.0, "c": 0.3}, {"kind": "power", "a": 1.0, "c": 3.0, "p": 1.0}),
]


@pytest.mark.parametrize(("learning_rate", "server_momentum"), SCHEDULES)
def test_the_effective_steps_are_those_that_the_server_takes(learning_rate, server_momentum):
    rounds = 12
    eta, beta = parse_schedule(learning_rate), parse_schedule(server_momentum).clamped()
    state = ServerState(0, torch.zeros(rounds), torch.zeros(rounds))
    theta, momentum = state.theta.double(), state.momentum.double()
    for t in range(rounds):  # round t releases the t-th unit vector, so θ ends at minus all the steps
        momentum = beta(t) * momentum + (1 - beta(t)) * torch.eye(rounds, dtype=torch.float64)[t]
        theta = theta - eta(t) * momentum
    found = effective_steps(eta, beta, rounds)
    assert found.total == pytest.approx(float(-theta.sum()), rel=1e-12)
    assert found.root_square == pytest.approx(float(theta.norm()), rel=1e-12)


def test_the_server_itself_moves_the_model_by_the_effective_steps():
    rounds = 12
    state = ServerState(0, torch.zeros(rounds), torch.zeros(rounds))
    for t in range(rounds):
        state = advance(state, torch.eye(rounds)[t], 0.3, 0.9)
    found = effective_steps(parse_schedule(0.3), parse_schedule(0.9), rounds)
    assert found.total == pytest.approx(float(-state.theta.sum()), rel=1e-5)
    assert found.root_square == pytest.approx(float(state.theta.norm()), rel=1e-5)


def test_a_constant_rate_and_a_list_of_it_are_the_same_schedule():
    constant, listed = (
        effective_steps(eta, Schedule("constant", (0.95,)), 3000)
        for eta in (Schedule("constant", (0.2,)), Schedule("list", (0.2,)))
    )
    assert constant.total == pytest.approx(listed.total, rel=1e-10)
    assert constant.root_square == pytest.approx(listed.root_square, rel=1e-10)


def test_over_many_rounds_noise_and_signal_are_those_of_the_simple_formula():
    eta, T, n, f, C = 0.1, 20_000, 300, 15, 0.5
    found = plan(
        epsilon=8.0, delta=1e-5, rounds=T, clients=n, byzantine=f, clip_norm=C, learning_rate=eta, parameters=D
    )
    assert found.noise_displacement == pytest.approx(
        eta * found.noise_multiplier * found.sensitivity * math.sqrt(T * D), rel=1e-3
    )
    assert found.signal_displacement == pytest.approx(eta * T * C * math.sqrt(n / (n - f)), rel=1e-3)
    unbounded = plan(epsilon=8.0, delta=1e-5, clients=n, byzantine=f, parameters=D)
    assert found.signal_to_noise == pytest.approx(unbounded.signal_to_noise, rel=1e-3)


def test_neither_clip_norm_nor_learning_rate_changes_the_ratio():
    given = {"epsilon": 8.0, "delta": 1e-5, "rounds": 50, "clients": 300, "byzantine": 15, "parameters": D}
    reference = plan(**given).signal_to_noise
    assert plan(**given, clip_norm=7.0).signal_to_noise == pytest.approx(reference, rel=1e-9)
    assert plan(**given, learning_rate=3.0).signal_to_noise == pytest.approx(reference, rel=1e-9)


NEEDED = [
    ("trimmed_mean", {}, 4),
    ("trimmed_mean", {}, Fraction(1, 5)),
    ("trimmed_mean", {}, Fraction(29, 100)),
    ("trimmed_mean", {}, Fraction(45, 100)),
    ("trimmed_mean", {"before": ["bucketing"]}, 3),
    ("mean", {}, 0),
    ("normalized_mean", {}, Fraction(1, 10)),
    ("multi_krum", {}, 2),
    ("centered_clipping", {"radius": 0.1}, 3),
]


@pytest.mark.parametrize(("rule", "parameters", "byzantine"), NEEDED)
@pytest.mark.parametrize("d", [500, 200_000])
def test_the_clients_needed_are_enough_and_one_fewer_is_not(rule, parameters, byzantine, d):
    given = {
        "epsilon": 8.0,
        "delta": 1e-7,
        "rounds": 30,
        "rule": rule,
        "rule_parameters": parameters,
        "byzantine": byzantine,
        "parameters": d,
    }
    needed = plan(**given).clients_needed
    assert needed is not None

    def enough(n: int) -> bool:
        try:
            ratio = plan(**given, clients=n, signal_to_noise=1e-9).signal_to_noise  # a search that ends at once
        except (RuleError, PrivacyError):
            return False
        return ratio is not None and ratio >= 1

    assert enough(needed)
    assert not any(enough(n) for n in range(max(1, needed - 12), needed))


def test_no_number_of_clients_is_enough_for_a_rule_whose_sensitivity_does_not_fall():
    for rule in ("krum", "median", "geometric_median"):
        found = plan(epsilon=8.0, delta=1e-5, rule=rule, byzantine=2, clients=100, parameters=D)
        assert found.clients_needed is None
        assert "No number of clients helps" in found.warnings[0]
    assert "no number is enough" in output("--epsilon", 8, "--delta", 1e-5, "--rule", "krum", "--parameters", D)


def test_what_rounding_can_add_limits_how_far_more_clients_help_in_a_million_dimensions():
    given = {"epsilon": 8.0, "delta": 1e-7, "parameters": 2_000_000, "rule": "normalized_mean"}
    ratios = [plan(**given, clients=n, signal_to_noise=1e-9).signal_to_noise for n in (10**4, 10**5, 10**6)]
    assert ratios == sorted(ratios)
    assert ratios[-1] < 1.2 * ratios[0]


def test_epsilon_delta_and_d_are_enough_to_ask_for_clients():
    found = planned("--epsilon", 8, "--delta", 1e-5, "--parameters", D, "--byzantine", "20%")
    assert found["clients_needed"] == 288
    assert found["byzantine_share"] == "20%"
    assert found["noise_multiplier"] is found["sensitivity"] is found["byzantine"] is None
    # once more by hand: mu (n - 2f) sqrt(n / (n - f)) / (2 sqrt(d)) with mu of (8, 1e-5)
    mu = 1 / plan(epsilon=8.0, delta=1e-5, rounds=1).noise_multiplier
    by_hand = next(
        n for n in range(1, 1000) if mu * (n - 2 * (n // 5)) * math.sqrt(n / (n - n // 5)) >= 2 * math.sqrt(D)
    )
    assert by_hand == 288


def test_a_share_is_taken_exactly():
    assert (
        planned("--epsilon", 8, "--delta", 1e-5, "--rounds", 3, "--clients", 100, "--byzantine", "29%")["byzantine"]
        == 29
    )


def test_a_larger_ratio_needs_more_clients():
    given = ("--epsilon", 8, "--delta", 1e-7, "--parameters", D)
    one, three = (planned(*given, "--signal-to-noise", ratio)["clients_needed"] for ratio in (1, 3))
    assert three == pytest.approx(3 * one, abs=3)


def test_too_large_a_delta_for_the_clients_needed_is_said():
    assert "delta must be below" in planned("--epsilon", 1, "--delta", 1e-2, "--parameters", D)["warnings"][0]


# -------------------------------------------------------------------- warnings before a run


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "fed_nga_private"])
def test_no_warning_before_a_ready_experiment_that_learns(name):
    experiment = load_experiment(name)
    assert warnings_of(experiment, mechanism_for(experiment), D) == []
    assert planned(name)["warnings"] == []


def test_no_warning_before_a_run_without_noise():
    experiment = load_experiment("mnist_no_dp")
    assert warnings_of(experiment, mechanism_for(experiment), D) == []


@pytest.mark.parametrize(("epsilon", "words"), [(4.5, []), (3.0, ["learn well:"]), (0.5, ["learn:"])])
def test_the_warning_says_how_little_is_expected(epsilon, words):
    experiment = load_experiment("mnist", [f"privacy.epsilon={epsilon}"])
    found = warnings_of(experiment, mechanism_for(experiment), D)
    assert len(found) == len(words)
    assert all(f"not expected to {word}" in sentence for word, sentence in zip(words, found, strict=True))


def test_a_run_that_cannot_learn_is_warned_of_with_the_clients_it_would_take():
    overrides = ["federation.clients=20", "federation.byzantine=4"]
    experiment = load_experiment("mnist", overrides)
    (sentence,) = warnings_of(experiment, mechanism_for(experiment), D)
    assert "not expected to learn:" in sentence
    found = plan(
        epsilon=20.0,
        delta=1e-3,
        rounds=100,
        byzantine=Fraction(1, 5),
        server_momentum=0.5,
        learning_rate=0.5,
        parameters=D,
        clients=20,
    )
    assert found.signal_to_noise is not None
    assert found.signal_to_noise < LEARNS
    assert f"{found.clients_needed} clients, 20% of them Byzantine" in sentence
    assert f"ratio of {found.signal_to_noise:.3g}" in sentence
    assert found.warnings == (sentence,)
    enough = load_experiment(
        "mnist",
        [f"federation.clients={found.clients_needed}", f"federation.byzantine={found.clients_needed // 5}"],
    )
    assert warnings_of(enough, mechanism_for(enough), D) == []


# -------------------------------------------------------------------- what is refused


FEDERATION = {"clients": 20, "byzantine": 4}
BUDGET = {"epsilon": 8.0, "delta": 1e-5, "rounds": 100}

REFUSED = [
    ({}, "given: none"),
    ({"epsilon": 8.0}, "given: epsilon"),
    ({"epsilon": 8.0, "rounds": 100}, "three are needed; given: epsilon, rounds"),
    ({"epsilon": 8.0, "delta": 1e-5}, "epsilon, delta and parameters for the clients needed"),
    ({"delta": 1e-5, "rounds": 10, "parameters": 10}, "given: delta, rounds"),
    ({"delta": 1e-5, "rounds": 10, "sigma": 0.1}, "sigma = 0.1 says nothing without the sensitivity: give clients"),
    ({**BUDGET, "noise_multiplier": 3.0}, "contradiction: 100 rounds with noise multiplier 3 cost"),
    ({**BUDGET, "noise_multiplier": 300.0}, "contradiction"),
    ({"noise_multiplier": 1.0, "sigma": 1.0, "delta": 1e-5, "rounds": 1, **FEDERATION}, "contradiction: sigma = 1"),
    ({"epsilon": 0.1, "delta": 1e-5, "noise_multiplier": 1.0}, "contradiction: one round"),
    ({"epsilon": 1e-9, "rounds": 10**6, "noise_multiplier": 1e-3}, "no delta inside"),
    ({**BUDGET, "clients": 4, "byzantine": 4}, "expected fewer than clients = 4"),
    ({**BUDGET, "delta": 0.1, **FEDERATION}, "below 1/clients = 0.05"),
    ({**BUDGET, "delta": 1.5}, "inside \\(0, 1\\)"),
    ({**BUDGET, "epsilon": math.nan}, "epsilon = nan"),
    ({**BUDGET, "epsilon": -1.0}, "expected more than 0"),
    ({**BUDGET, "rounds": 0}, "expected more than 0"),
    ({**BUDGET, "rounds": 10**8}, "at most 10000000"),
    ({**BUDGET, "rounds": 1.5}, "whole number"),
    ({**BUDGET, "parameters": 0}, "expected more than 0"),
    ({**BUDGET, "calibration": "best"}, "'exact' or 'renyi'"),
    ({**BUDGET, "premise": "paranoid"}, "'independent' or 'strict'"),
    ({**BUDGET, "server_momentum": 1.0}, "expected a number in \\[0, 1\\)"),
    ({**BUDGET, "server_momentum_form": "beside"}, "'outside' or 'inside'"),
    ({**BUDGET, "byzantine": 0.2}, "a Fraction inside"),
    ({**BUDGET, **FEDERATION, "clip_norm": "none"}, "needs training.clip_norm"),
    ({**BUDGET, **FEDERATION, "clip_norm": -1.0}, "positive, finite number"),
    ({**BUDGET, "signal_to_noise": 0.0, "parameters": 10}, "expected more than 0"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_insufficient_contradictory_or_out_of_range_is_refused_with_what_would_do(given, message):
    with pytest.raises(PrivacyError, match=message):
        plan(**given)


def test_a_rule_that_n_and_f_do_not_allow_is_refused():
    with pytest.raises(RuleError, match="needs at least 9 rows"):
        plan(**BUDGET, clients=8, byzantine=4)
    with pytest.raises(RuleError, match="did you mean 'krum'"):
        plan(**BUDGET, **FEDERATION, rule="crum")


@pytest.mark.parametrize(
    "words", [["--byzantine", "many"], ["--byzantine", "0.2"], ["--byzantine", "x%"], ["--clip-norm", "big"]]
)
def test_words_that_are_no_numbers_are_refused_by_the_command(words):
    result = CliRunner().invoke(app, ["--epsilon", "8", "--delta", "1e-5", "--rounds", "3", *words])
    assert isinstance(result.exception, ConfigError)


def test_a_refusal_of_the_command_is_an_error_of_the_tree():
    result = CliRunner().invoke(app, ["--epsilon", "8"])
    assert isinstance(result.exception, ByzULDPError)
    assert result.stdout == ""
    assert CliRunner().invoke(app, ["--set", "training.rounds=3"]).exit_code == 2


def test_the_json_has_every_value_of_the_plan():
    found = planned("mnist")
    assert set(found) == {*Plan.__dataclass_fields__, "epsilon_by_round"}
    assert {"noise_multiplier", "sensitivity", "sigma", "epsilon_exact", "epsilon_renyi"} < set(found)


def test_what_was_assumed_is_said():
    text = output("--epsilon", 8, "--delta", 1e-5, "--rounds", 100, "--clients", 300, "--parameters", D)
    assert "clip norm C             1                 default" in text
    assert "noise multiplier z" in text
    assert "  derived\n" in text

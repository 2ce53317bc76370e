"""``byzuldp bench``: quantiles, comparisons and tables with known answers; what cannot be measured is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.errors import ConfigError, RunFailed, StoreUnwritable
from deploy import cli
from deploy.bench import statistics
from deploy.bench.asked import Load, Setting, grid, numbers, refuse_too_large
from deploy.bench.comparing import compared
from deploy.bench.elsewhere import commands
from deploy.bench.links import links_of
from deploy.bench.load import momentum
from deploy.bench.measuring import warning_of
from deploy.bench.result import Measurement, Run, point_of, read, write
from deploy.bench.tables import milliseconds, render_comparison, render_measurement
from deploy.bench.task import dataset, model_name
from ps.records import RoundMetrics, Span

SETTING = Setting(4, 100, 0, rounds=40, warm_up=2, processes=2, rule="mean", epsilon=10.0, delta=1e-5)


def correlated(rounds: int, phi: float, generator: np.random.Generator, *, spread: float = 0.1) -> list[float]:
    """Round latencies, each φ times as far from the mean as the one before, and something of its own."""
    value, found = 0.0, []
    for own in generator.standard_normal(rounds + 50):
        value = phi * value + (1 - phi**2) ** 0.5 * own
        found.append(float(np.exp(spread * value)))
    return found[50:]


def measured(runs_s: list[list[float]], setting: Setting = SETTING, **facts: str) -> Measurement:
    def record(number: int, seconds: float) -> RoundMetrics:
        segments = {"open": 0.25 * seconds, "commit": 0.75 * seconds}
        return RoundMetrics(number, 1e9, seconds, segments, answered=4, bytes_down=1600, bytes_up=1700)

    spans = [Span("upload", 0, 0.0, 0.001, 400), Span("upload", 1, 0.0, 0.003, 400), Span("noise", None, 0.0, 0.5)]
    runs = [Run([record(k, s) for k, s in enumerate(run)], [spans] * len(run)) for run in runs_s]
    machine = {"processor": "one", **facts}
    point = point_of(setting, runs, processes=2)
    return Measurement("2026-01-01T00:00:00Z", 1.0, ["byzuldp"], "loopback", 1, machine, [0.0, 0.5], [point])


def shown(renderable: object) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    console.file.close()
    return console.export_text()


# -------------------------------------------------------------------- statistics


def test_quantiles_of_one_to_a_hundred_are_known():
    assert statistics.quantiles(list(range(1, 102))) == {"p50": 51, "p95": 96, "p99": 100, "max": 101, "mean": 51}
    with pytest.raises(ValueError, match="nothing"):
        statistics.quantiles([])


def test_blocks_never_span_two_runs_and_leave_out_what_is_left_over():
    blocks = statistics.block_medians([[1, 2, 3, 9, 9], [4, 5, 6, 7, 8, 9, 1]], 3)
    assert blocks.tolist() == [2, 5, 8]


def test_rounds_that_resemble_those_before_make_longer_blocks():
    generator = np.random.default_rng(1)
    lengths = [statistics.block_length([correlated(400, phi, generator)]) for phi in (0.0, 0.6, 0.9)]
    assert lengths[0] == statistics.SHORTEST_BLOCK
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_fifth_more_is_found_and_its_size_is_right():
    generator = np.random.default_rng(2)
    a, b = correlated(200, 0.5, generator), correlated(200, 0.5, generator)
    found = statistics.difference([a], [[1.2 * value for value in b]])
    assert found.enough
    assert found.p < statistics.LEVEL
    assert found.low < 1.2 < found.high
    assert found.ratio == pytest.approx(1.2, rel=0.05)
    assert found.low > 1.0


@pytest.mark.system  # for the time it takes
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_the_same_process_is_told_apart_as_seldom_as_is_stated(phi):
    """300 pairs: at 1% more than 9 happen with probability 0.001; the seed is fixed, so it holds or it does not."""
    generator = np.random.default_rng(3)
    found = [
        statistics.difference([correlated(200, phi, generator)], [correlated(200, phi, generator)]) for _ in range(300)
    ]
    assert sum(one.p < statistics.LEVEL for one in found) <= 9
    assert sum(one.enough for one in found) > 250


def test_too_few_rounds_are_no_ground_for_a_verdict():
    found = statistics.difference([[1.0] * 20], [[2.0] * 20])
    assert (found.enough, found.p, found.ratio) == (False, 1.0, 2.0)


def test_runs_that_differ_among_themselves_by_as_much_hide_a_difference_of_rounds():
    generator = np.random.default_rng(4)
    a = [[level * value for value in correlated(60, 0, generator)] for level in (1.0, 1.5, 1.1)]
    b = [[level * value for value in correlated(60, 0, generator)] for level in (1.5, 1.2, 1.6)]
    found = statistics.difference(a, b)
    assert found.p_blocks < statistics.LEVEL
    assert found.p_runs is not None
    assert found.p == found.p_runs > 0.05


def test_corrected_p_values_are_holms():
    assert statistics.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


# -------------------------------------------------------------------- comparing


def test_a_slower_measurement_is_called_slower_and_a_faster_one_faster():
    generator = np.random.default_rng(5)
    a = measured([correlated(100, 0, generator)])
    b = measured([[1.5 * value for value in correlated(100, 0, generator)]])
    assert [one.verdict for one in compared(a, b).points] == ["slower"]
    assert [one.verdict for one in compared(b, a).points] == ["faster"]
    assert [one.verdict for one in compared(a, a).points] == ["no difference beyond the noise"]
    assert compared(a, b).slower
    assert not compared(b, a).slower


def test_other_machines_and_lonely_points_are_remarked_upon():
    run = [[1.0] * 10]
    a, b = measured(run), measured(run, processor="another")
    b = replace(b, points=[*b.points, replace(b.points[0], clients=5)])
    text = " ".join(compared(a, b).remarks)
    assert "processor differs: one; another" in text
    assert "1 of the points" in text
    with pytest.raises(ConfigError, match="no setting in common"):
        compared(a, replace(b, points=b.points[1:]))


def test_compare_exits_with_0_whatever_it_finds_unless_asked_otherwise(tmp_path, monkeypatch):
    generator = np.random.default_rng(6)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, factor in zip(files, (1.0, 2.0), strict=True):
        write(path, measured([[factor * value for value in correlated(60, 0, generator)]]))
    names = [str(path) for path in files]
    found = CliRunner().invoke(cli.app, ["bench", "compare", *names])
    assert found.exit_code == 0
    assert "slower" in found.output
    machine = CliRunner().invoke(cli.app, ["bench", "compare", "--json", *names])
    assert json.loads(machine.stdout)["points"][0]["verdict"] == "slower"
    monkeypatch.setattr(sys, "argv", ["byzuldp", "bench", "compare", "--fail-if-slower", *names])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == RunFailed.exit_code
    assert CliRunner().invoke(cli.app, ["bench", "compare", "--fail-if-slower", *names[::-1]]).exit_code == 0


# -------------------------------------------------------------------- results


def test_phases_are_of_the_round_and_spans_of_all_clients():
    (point,) = measured([[0.1, 0.2, 0.3]]).points
    assert point.round_s["p50"] == 0.2
    assert point.phases_s["open"]["p50"] + point.phases_s["commit"]["p50"] == pytest.approx(0.2)
    assert point.spans_s["upload"]["p50"] == pytest.approx(0.002)
    assert point.bytes == {"down": 1600, "up": 1700}
    assert (point.rounds, point.warm_up, point.runs_s) == (3, 2, [[0.1, 0.2, 0.3]])


def test_a_measurement_is_read_as_it_was_written_and_a_single_point_is_at_the_top_too(tmp_path):
    measurement = measured([[0.1, 0.2], [0.3]])
    write(tmp_path / "a.json", measurement)
    again = read(tmp_path / "a.json")
    assert again.points[0].runs_s == [[0.1, 0.2], [0.3]]
    assert again.points[0].key == measurement.points[0].key
    tree = json.loads((tmp_path / "a.json").read_text())
    assert tree["round_s"]["p50"] == 0.2
    assert list(tree["phases_s"]) == ["open", "commit"]
    two = replace(measurement, points=measurement.points * 2)
    assert "round_s" not in two.as_json()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "format is 'list'"),
        ('{"format": "other 3"}', "other 3"),
        ('{"format": "byzuldp bench latency 1"}', "damaged"),
    ],
)
def test_another_file_is_refused(tmp_path, text, reason):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read(path)


def test_a_round_that_took_no_time_is_damage(tmp_path):
    write(tmp_path / "a.json", measured([[0.1, 0.2]]))
    path = tmp_path / "a.json"
    path.write_text(path.read_text().replace("0.1,\n     0.2", "0.0,\n     0.2"))
    with pytest.raises(ConfigError, match="no time"):
        read(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StoreUnwritable, match="--json"):
        write(tmp_path, measured([[0.1]]))


def test_the_table_says_what_adds_up_and_what_does_not():
    text = shown(render_measurement(measured([[0.1, 0.2, 0.3]])))
    lines = [line.split() for line in text.splitlines()]
    assert ["round", "200", "290", "298", "300"] in [line[:5] for line in lines]
    assert ["commit", "150"] in [line[:2] for line in lines]
    assert "these overlap, and do not add up" in text
    assert text.index("commit") < text.index("beside it") < text.index("upload")
    assert "3 rounds in 1 run, 2 of each left out before" in text
    assert "little else than the longest" in text


def test_the_comparison_says_its_error_rate_and_how_many_rounds_would_do():
    a = measured([[0.1 + 0.001 * (k % 3) for k in range(20)]])
    text = shown(render_comparison(compared(a, a)))
    assert "with probability 1% at most" in text
    assert "too few rounds to tell" in text
    assert "--rounds 30" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234, "1,234"), (0.0123, "12.3"), (0.00012, "0.12"), (0.0000456, "0.046")]
)
def test_milliseconds_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


# -------------------------------------------------------------------- what is asked for


def test_a_grid_is_every_n_with_every_d():
    settings = grid_of("4,20", "1e2,26_010")
    assert [(one.clients, one.dimension, one.byzantine) for one in settings] == [
        (4, 100, 0),
        (4, 26010, 0),
        (20, 100, 4),
        (20, 26010, 4),
    ]
    experiment = settings[-1].experiment()
    assert experiment.training.rounds == 12
    assert experiment.privacy.epsilon == 10.0
    assert experiment.federation.clients_per_process == 1
    assert settings[0].experiment().fingerprint() != experiment.fingerprint()


def grid_of(clients: str, dimension: str, **changes: object) -> list[Setting]:
    asked = {"byzantine": None, "rounds": 10, "warm_up": 2, "processes": None, "rule": "trimmed_mean"}
    asked |= {"epsilon": 10.0, "delta": 1e-5, "load": Load()}
    return grid(clients, dimension, **(asked | changes))


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "a", "4,,5", "nan", "inf", "4,4", "20000"])
def test_other_numbers_of_clients_are_refused(text):
    with pytest.raises(ConfigError, match="--clients"):
        numbers(text, "--clients", most=10_000)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"byzantine": 2}, "--byzantine 2"),
        ({"processes": 5}, "--processes 5"),
        ({"load": Load(compute_s=float("nan"))}, "--compute-s"),
        ({"load": Load(compute_s=-1.0)}, "--compute-s"),
        ({"epsilon": -1.0}, "privacy.epsilon"),
        ({"overrides": ["network.no_such=1"]}, "no_such"),
    ],
)
def test_an_impossible_point_is_refused_by_its_option(changes, option):
    with pytest.raises(ConfigError, match=option):
        grid_of("4", "100", **changes)


def test_what_does_not_fit_into_memory_is_refused(monkeypatch):
    monkeypatch.setattr("deploy.bench.asked.available_bytes", lambda: 2**30)
    refuse_too_large(SETTING)
    with pytest.raises(ConfigError, match="GiB free"):
        refuse_too_large(replace(SETTING, dimension=20_000_000))


def test_links_are_loopback_unless_something_is_asked_of_them():
    nothing = {"delay_ms": 0.0, "jitter_ms": 0.0, "rate_mbit": None, "loss": 0.0, "backend": None}
    assert links_of(**nothing).backend is None
    asked = links_of(**nothing | {"delay_ms": 20.0, "rate_mbit": 8.0})
    assert asked.backend == "auto"
    assert (asked.conditions.delay_s, asked.conditions.rate_bytes_s) == (0.02, 1e6)
    assert str(asked) == "20 ms each way, 8 Mbit/s each way"
    for wrong in ({"delay_ms": -1.0}, {"loss": 1.0}, {"rate_mbit": 0.0}, {"jitter_ms": float("nan")}):
        with pytest.raises(ConfigError, match="--"):
            links_of(**nothing | wrong)
    with pytest.raises(ConfigError, match="no links"):
        links_of(**nothing | {"delay_ms": 1.0, "backend": "loopback"})


def test_the_commands_for_other_hosts_name_every_identity_once():
    setting = replace(SETTING, clients=5, processes=2, load=Load(0.5, 7))
    first, second = commands(setting, "10.0.0.1:7000", insecure=True)
    assert "--ids 0-2 --compute-s 0.5 --seed 7 --insecure" in first
    assert "--ids 3-4" in second


# -------------------------------------------------------------------- the load


def test_the_task_has_as_many_parameters_as_its_name_says(tmp_path):
    from common.learning.task import build_task

    task = build_task(SETTING.experiment())
    assert task.num_parameters == 100
    assert len(dataset(tmp_path).train.labels) >= 10_000
    with pytest.raises(AttributeError):
        __import__("deploy.bench.task", fromlist=["x"]).numbers_0  # noqa: B018
    assert model_name(7).endswith("numbers_7")


def test_momenta_are_within_the_clip_norm_and_differ():
    one, other = (momentum(1, client, 10_000) for client in (0, 1))
    assert one.dtype == np.float32
    assert float(np.linalg.norm(one)) == pytest.approx(0.5, rel=0.05)
    assert not np.array_equal(one, other)
    assert np.array_equal(one, momentum(1, 0, 10_000))


def test_that_nothing_will_be_learned_is_no_warning_here():
    assert warning_of({"event": "warning", "message": "this run is not expected to learn: …"}) is None
    assert warning_of({"event": "warning", "message": "client-1 died"}) == "warning: client-1 died"
    assert warning_of({"event": "round", "round": 1}) is None


# -------------------------------------------------------------------- the comparison with peers


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import latency_report

    yield latency_report
    sys.modules.pop("latency_report", None)


def row(**changes: object) -> dict[str, object]:
    echo = {"calls": [[0.1], [0.1]], "stream": [[0.05]], "unary": [[0.2]]}
    tree = {"clients": 20, "dimension": 26010, "ours": [[0.1], [0.19]], "echo": echo, "flower": [0.9], "superlink": []}
    tree |= {"segments": {"commit": 0.001}, "cpu_s": {"ours": 0.1}, "idle_rss": 0, "peak_rss": 1 << 20}
    tree |= {"measured": "now", "seconds": 1.0, "load": [0.0, 0.0], "machine": {"processor": "one"}}
    return tree | changes


def test_a_target_that_is_missed_says_so(report):
    met = report.page({"rows": {"20x26010": row()}})
    assert "| 20; 26,010 | 145 | 900: 6.2× | not measured |" in met
    assert "100: 1.45 (target ≤ 1.5)" in met
    assert "missed" not in met
    missed = report.page({"rows": {"20x26010": row(flower=[0.5], peak_rss=10 << 30, ours=[[0.16]])}})
    assert missed.count("**missed**") == 3


def test_the_memory_bound_is_the_stated_one(report):
    assert report.bound(20, 10_000_000) == 20 * 40_000_000 + 8 * 40_000_000 + 40 * 2 * (1 << 20) + 64_000_000

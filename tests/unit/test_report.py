"""A report says what the run folder says, to whom it may."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import sqlite3
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import small_experiment
from reported_run import SEGMENTS, add_chaos, make_reported_run, measure
from typer.testing import CliRunner

from common.config import load_experiment
from common.errors import StoreDamaged
from deploy import cli
from deploy.report import palette
from deploy.report.collect import collect, labels_of
from deploy.report.described import command_of, differences
from deploy.report.drawing import Drawing
from deploy.report.operations import DISTURBED, VERDICT
from deploy.report.page import Figures, figures_of, render
from deploy.report.sampling import blocks, spread, telling
from deploy.report.waterfalls import MOST_CLIENTS, waterfall_of
from deploy.report.writing import write_report
from ps.journal import next_head
from ps.privacy.ledger import Ledger
from ps.reader import RunReader
from ps.records import RoundMetrics, Span

ROUNDS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rounds, the last client slow and sometimes missing, and faults beside it."""
    place = tmp_path_factory.mktemp("chaos")
    folder = make_reported_run(place / DISTURBED, rounds=ROUNDS, attack={"name": "alie", "adversaries": 1})
    add_chaos(place, folder, ROUNDS)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def words(html: str) -> str:
    """What a reader sees: no markup, no style, no script."""
    html = re.sub(r"<(style|script)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def without_figures(folder: Path, *, public: bool = False) -> str:
    return words(render([collect(folder, public=public)], Figures((), ((),)), public=public))


def change(folder: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(folder / "run.sqlite") as database:
        database.execute(statement, values)


# ------------------------------------------------------------------- what it says


def test_a_report_says_what_was_run_how_it_ended_and_what_it_cost(run, page):
    said, ledger = words(page), Ledger.restored((text, head) for _, text, head in RunReader(run).ledger_rows())
    for part in (
        "completed, 12 of 12 rounds",
        "byzuldp run experiment.toml",
        f"ε = {ledger.epsilon_spent(1e-3):.3g}",
        "user-level (ε = 3, δ = 0.001)-DP under premises P1-P4",
        "P4: what Byzantine clients send",
        ledger.head.hex(),
        "alie",
        "late 2",
        "made &lt;up&gt;",
    ):
        assert part in said, part


def test_epsilon_is_recomputed_from_the_ledger_whatever_a_summary_says(copied):
    before = collect(copied)
    summary = {"epsilon": 0.01, "epsilon_spent": 0.02, "rounds": ROUNDS, "final_accuracy": 0.5, "private": False}
    (copied / "summary.json").write_text(json.dumps(summary))
    after = collect(copied)
    assert after.privacy == before.privacy
    assert after.privacy.spent_now == pytest.approx(3.0, rel=1e-3)
    assert after.final.accuracy == 0.5


def test_the_odometer_grows_from_nothing_to_what_the_ledger_says(run):
    facts = collect(run).privacy
    ledger = Ledger.restored((text, head) for _, text, head in RunReader(run).ledger_rows())
    assert (facts.rounds[0], facts.spent[0]) == (0, 0.0)
    assert list(facts.spent) == sorted(facts.spent)
    assert facts.spent[-1] == ledger.epsilon_spent(1e-3)
    half = Ledger.restored(ledger.rows()[:7])
    assert facts.spent[6] == half.epsilon_spent(1e-3)


def test_a_changed_ledger_gets_no_report(copied):
    with sqlite3.connect(copied / "run.sqlite") as database:
        database.executescript("DROP TRIGGER ledger_rows_stay")
        database.execute(
            "UPDATE ledger SET entry = replace(entry, '\"answers\":5', '\"answers\":4') WHERE round_id = 3"
        )
    with pytest.raises(StoreDamaged, match="ledger row 3 was changed"):
        collect(copied)


def test_a_run_that_has_not_ended_says_so(copied):
    change(copied, "UPDATE run SET status = 'running', message = ''")
    assert "This run has not ended: it is going on, or its server was killed" in without_figures(copied)


def test_a_run_that_failed_says_why_in_escaped_text(copied):
    change(copied, "UPDATE run SET status = 'failed', message = ?", "client 3 said <script>alert(1)</script>")
    html = render([collect(copied)], Figures((), ((),)), public=False)
    assert "This run ended before its last round: <b>failed</b>: client 3 said &lt;script&gt;alert" in html
    assert "<script>alert" not in html


def test_a_folder_of_an_older_version_without_spans_works(copied):
    with sqlite3.connect(copied / "operator" / "metrics.sqlite") as database:
        database.execute("ALTER TABLE rounds DROP COLUMN spans")
        database.execute('UPDATE rounds SET segments = \'{"collect": 0.05, "strange": 0.01}\'')
    facts = collect(copied).operations
    assert list(facts.segments) == ["collect", "strange"]
    assert facts.waterfall.spans == ()
    assert {client.arrival_p50 for client in facts.clients} == {None}
    assert all(drawing.svg() for drawing in figures_of([collect(copied)]).all if drawing.name == "phases")


def test_a_run_of_which_nothing_is_recorded_works(copied):
    shutil.rmtree(copied / "operator")
    said = without_figures(copied)
    assert "No round was recorded" in said
    assert "No model has been evaluated" in said


def test_a_configuration_of_another_version_is_shown_as_it_is(copied):
    tree = json.loads(sqlite3.connect(copied / "run.sqlite").execute("SELECT configuration FROM run").fetchone()[0])
    tree["training"]["forgotten_key"] = 7
    change(copied, "UPDATE run SET configuration = ?", json.dumps(tree))
    said = without_figures(copied)
    assert "The configuration is of another version of byzuldp" in said
    assert "training.forgotten_key 7" in said


def test_faults_are_those_of_the_disturbed_run_alone(run):
    from deploy.chaos import play, verdict

    assert (VERDICT, DISTURBED) == (verdict.FILE, play.DISTURBED)
    facts = collect(run).operations
    assert [(fault.do, fault.began_round) for fault in facts.faults][:2] == [("delay", 2), ("kill", 6)]
    other = Path(shutil.copytree(run, run.parent / "undisturbed"))
    assert collect(other).operations.faults == ()


# ------------------------------------------------------------------- for whom


def disturb(folder: Path) -> None:
    """Another run for the operator, the same for everybody else."""
    for name in ("", "-wal", "-shm"):
        (folder / "operator" / f"metrics.sqlite{name}").unlink(missing_ok=True)
    measure(folder, ROUNDS, clients=5, seed=99, offset=3.0)
    with sqlite3.connect(folder / "operator" / "metrics.sqlite") as database:
        database.execute("UPDATE rounds SET missing = '[2, 3]', answered = 3")
        database.execute("DELETE FROM refusals WHERE kind = 'late'")
        database.execute("DELETE FROM evaluations")
    with sqlite3.connect(folder / "run.sqlite") as database:
        database.executescript("DROP TRIGGER ledger_rows_stay; DROP TRIGGER ledger_rows_live;")
        database.execute("UPDATE run SET created_at = 5, updated_at = 99, message = 'client 4 was late'")
        database.execute("UPDATE models SET answered = 3, committed_at = 7")
        head = bytes(32)
        for round_id, text in database.execute("SELECT round_id, entry FROM ledger ORDER BY round_id").fetchall():
            tree = json.loads(text) | {"at": 17.5, "nonce": "ab" * 32} | ({"answers": 3} if round_id else {})
            text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
            head = next_head(head, text)
            database.execute("UPDATE ledger SET entry = ?, head = ? WHERE round_id = ?", (text, head, round_id))


def test_a_public_report_does_not_depend_on_what_only_the_operator_may_see(run, copied):
    disturb(copied)
    with sqlite3.connect(run / "operator" / "metrics.sqlite") as database:
        scores = database.execute("SELECT * FROM evaluations").fetchall()
    with sqlite3.connect(copied / "operator" / "metrics.sqlite") as database:
        database.executemany("INSERT INTO evaluations VALUES (?, ?, ?, ?)", scores)
    pages = []
    for folder in (run, copied):
        data = replace(collect(folder, public=True), label="run")  # figures are drawn of this, and of nothing else
        pages.append((repr(data) + render([data], Figures((), ((),)), public=True)).replace(data.privacy.head, "HEAD"))
    assert pages[0] == pages[1]
    operators = [replace(collect(folder), label="run") for folder in (run, copied)]
    assert operators[0].operations.latency_s.mean() != operators[1].operations.latency_s.mean(), "it was disturbed"


def test_a_public_report_has_no_client_and_no_time_in_it(run):
    path = write_report(run, public=True)
    assert path == run / "public" / "report.html"
    html = path.read_text(encoding="utf-8")
    said = words(html).lower()
    for word in ("refus", "arriv", "latency", "waterfall", "missed", "began", "traffic", "fault", "upload", "p95"):
        assert word not in said, word
    assert not re.search(r"\d\s?(ms|µs|s|min|h)\b", said)
    assert not re.search(r"\bclient[ -]\d", said)
    assert "application/json" not in html
    assert "network." not in said, "addresses are settings of a machine"


def test_an_operators_report_is_not_for_others_to_read(run, page):
    assert page
    assert (run / "report.html").stat().st_mode & 0o077 == 0


def test_with_rescaling_the_public_noise_is_left_out(tmp_path):
    folder = make_reported_run(tmp_path / "run", rounds=2, privacy={"missing": "rescale"})
    assert collect(folder).signal is not None
    public = collect(folder, public=True)
    assert public.signal is None
    assert "tells who answered" in public.no_signal_because


# ------------------------------------------------------------------- what it is made of


def test_a_page_needs_nothing_from_elsewhere(page):
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|<link(?! rel=\"icon\" href=\"data:,\")|\bsrc=", page)
    policy = re.search(r"script-src 'sha256-([^']+)'", page)[1]
    script = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)[-1]
    assert b64encode(sha256(script.encode()).digest()).decode() == policy


def test_ids_of_a_page_are_unique_and_what_is_referred_to_is_there(page):
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    drawn = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', drawn)) <= set(ids)


def test_every_axis_has_its_unit(run):
    counted = {"round"}  # what has no unit but itself
    for drawing in figures_of([collect(run)]).all:
        labels = axis_labels(drawing)
        assert labels, drawing.name
        for label in labels:
            assert label in counted or re.search(r"\(.+\)$", label), f"{drawing.name}: {label}"


def axis_labels(drawing: Drawing) -> list[str]:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots(len(drawing.panels), 1, squeeze=False)[:, 0]
    drawing.plot(figure, list(axes))
    found = [axes[-1].get_xlabel(), axes[0].get_ylabel()]
    named = [tick.get_text() for tick in axes[0].get_yticklabels()]
    assert found[1] or "whole round" in named, f"{drawing.name}: its ordinate says nothing"
    return [label for label in found if label]


def test_no_colour_has_two_meanings():
    light = [colour for _, colour, _ in palette._all()]
    assert len(set(light)) == len(light)
    neighbours = [(palette.SERIES[k % 8], palette.DASHES[k % 5]) for k in range(20)]
    assert len(set(neighbours)) == 20
    assert all(a != b and p != q for (a, p), (b, q) in pairwise(neighbours))


def test_the_segments_in_the_csv_add_up_to_the_latency(run):
    drawings = {drawing.name: drawing for drawing in figures_of([collect(run)]).all}
    phases, latency = (list(csv.DictReader(drawings[name].csv().splitlines())) for name in ("phases", "latency"))
    assert len(phases) == len(latency) == ROUNDS
    for row, whole in zip(phases, latency, strict=True):
        total = sum(float(value) for name, value in row.items() if name != "round")
        assert total == pytest.approx(float(whole["latency_s"]), rel=1e-9)


def test_the_bytes_of_each_client_are_those_of_its_transfers(run, page):
    facts = collect(run).operations
    reader = RunReader(run)
    for client in facts.clients:
        for name, found in (("download", client.bytes_down), ("upload", client.bytes_up)):
            spans = [span for round_id in range(ROUNDS) for span in reader.spans(round_id)]
            assert found == sum(s.num_bytes for s in spans if (s.name, s.client_id) == (name, client.client_id))
    assert facts.clients[0].bytes_up == 40 * ROUNDS > facts.clients[-1].bytes_up  # the last misses rounds
    (drawing,) = [figure for figure in figures_of([collect(run)]).all if figure.name == "arrivals"]
    rows = list(csv.DictReader(drawing.csv().splitlines()))
    assert [int(row["bytes_up"]) for row in rows] == [client.bytes_up for client in facts.clients]
    assert [int(row["bytes_down"]) for row in rows] == [client.bytes_down for client in facts.clients]
    assert f"<td>{40 * ROUNDS} B</td>" in re.sub(r"<td[^>]*>", "<td>", page)


def test_the_waterfall_data_of_a_round_are_its_records(run):
    facts = collect(run).operations.waterfall
    assert [shown["r"] for shown in facts.rounds] == list(range(ROUNDS))
    shown, reader = facts.rounds[4], RunReader(run)
    assert shown["m"] == [4]
    assert list(facts.segments) == [name for name in SEGMENTS if name not in ("transfer", "hold")], "these took no time"
    assert sum(shown["s"][1::2]) == pytest.approx(1e6 * reader.rounds()[4].latency_s, abs=12)
    spans = reader.spans(4)
    assert len(shown["p"]) == 5 * len(spans)
    for place, span in enumerate(spans):
        name, client, start, took, size = shown["p"][5 * place : 5 * place + 5]
        assert (facts.spans[name], client, size) == (
            span.name,
            -1 if span.client_id is None else span.client_id,
            span.num_bytes,
        )
        assert (start, took) == (round(1e6 * span.start_s), round(1e6 * span.seconds))


def test_a_long_run_of_many_clients_has_a_small_waterfall_with_its_slowest_rounds():
    many = 1000
    spans = [
        Span(name, client, client / many, 0.1) for client in range(many) for name in ("download", "training", "upload")
    ]
    records = {
        k: RoundMetrics(k, 0.0, 9.0 if k in (77, 123) else 1.0 + k / 1e6, {"collect": 1.0}, many) for k in range(200)
    }
    found = waterfall_of(records, dict.fromkeys(records, spans), range(990, many), 10_000)
    assert len(json.dumps(found.rounds)) < 2e6
    assert {0, 77, 123, 199} <= {shown["r"] for shown in found.rounds}
    last = found.rounds[0]
    assert (last["k"], last["c"]) == (MOST_CLIENTS, many)
    clients = set(last["p"][1::5])
    assert {0, 998, 999} <= clients
    assert "of 10000 rounds" in found.how
    assert f"at most {MOST_CLIENTS} clients" in found.how


def test_samples_keep_both_ends_and_blocks_keep_the_mean():
    assert spread(10, 20) == list(range(10))
    assert spread(1000, 3) == [0, 500, 999] or spread(1000, 3) == [0, 499, 999]
    latency = np.ones(500)
    latency[[3, 77]] = 5.0
    chosen = telling(latency, 50)
    assert {0, 3, 77, 499} <= set(chosen)
    assert len(chosen) <= 50
    xs, ys = blocks(np.arange(1000), np.arange(1000.0), lambda part: float(part.mean()), 10)
    assert len(xs) == 10
    assert ys.mean() == pytest.approx(499.5)
    assert np.array_equal(xs, ys)


# ------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mnist", []),
        ("mnist", ["training.rounds=7", "network.heartbeat_s=2.5", "data.root=some folder/of mine"]),
        ("mnist_attacked", ["attack.name=ipm", "attack.tau=0.5"]),
        ("mnist_no_dp", ['aggregation.rule="median"', "training.clip_norm=none"]),
    ],
)
def test_the_command_starts_the_same_run(name, overrides):
    experiment = load_experiment(name, overrides)
    command, toml = command_of(experiment)
    program, verb, source, *changes = shlex.split(command)
    assert (program, verb, toml) == ("byzuldp", "run", "")
    assert set(changes[::2]) <= {"--set"}
    again = load_experiment(source, changes[1::2])
    assert again.model_dump(mode="json") | {"folder": None} == experiment.model_dump(mode="json") | {"folder": None}


def test_an_experiment_that_is_like_no_ready_one_comes_as_a_file(tmp_path):
    experiment = small_experiment(privacy={"epsilon": 3.0, "delta": 1e-3})
    command, toml = command_of(experiment)
    (tmp_path / "experiment.toml").write_text(toml)
    assert command == "byzuldp run experiment.toml"
    again = load_experiment(tmp_path / "experiment.toml")
    assert again.model_dump(mode="json") | {"folder": None} == experiment.model_dump(mode="json") | {"folder": None}
    assert "address" not in command_of(experiment, public=True)[1]


def test_several_runs_are_compared_by_what_differs(run, tmp_path):
    other = make_reported_run(tmp_path / "other", rounds=ROUNDS, made=5, aggregation={"rule": "median"})
    out = tmp_path / "both.html"
    figures = tmp_path / "figures"
    arguments = ["report", str(run), str(other), "--public", "--out", str(out), "--figures", str(figures)]
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code, result.output.strip()) == (0, str(out))
    names = ("accuracy", "epsilon", "loss", *(f"run{k}-{name}" for k in (1, 2) for name in ("displacement", "release")))
    assert sorted(path.name for path in figures.iterdir()) == [
        f"{n}.{e}" for n in sorted(names) for e in ("csv", "png")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.glob("*.png"))
    assert (figures / "accuracy.csv").read_text().startswith("run,round,accuracy_percent\n")
    said = words(out.read_text(encoding="utf-8"))
    assert "aggregation.rule trimmed_mean median" in said
    assert "rounds 12 of 12 5 of 12" in said
    assert "This run ended before its last round: interrupted" in said
    assert differences([{"a": 1, "b": 2}, {"a": 1, "c": None}]) == {"b": [2, None], "c": [None, None]}


def test_runs_of_one_name_are_told_apart_by_their_folders():
    paths = [Path("/x/split/disturbed"), Path("/x/wan/disturbed"), Path("/x/wan/other")]
    assert labels_of(paths) == ["split/disturbed", "wan/disturbed", "wan/other"]
    assert labels_of([Path("/x/a"), Path("/x/a")]) == ["a (1)", "a (2)"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere"], 42, "not a run folder"),
        (["{run}", "{run}"], 2, "--out"),
        (["{run}", "--public", "--out", "{run}/no/such/place.html"], 43, "cannot be written"),
        ([], 2, "RUN"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_its_exit_code(run, monkeypatch, capsys, arguments, code, said):
    monkeypatch.setattr("sys.argv", ["byzuldp", "report", *(part.format(run=run) for part in arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err

"""What a user sees of a run: lines, the live view, the final table."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from deploy.display import LineDisplay, LiveDisplay, open_display
from deploy.plots import bar, plot, sparkline
from deploy.progress import Progress, missing_words, seconds_words
from deploy.results import render_summary, save_picture

LISTENING = {"event": "listening", "address": "127.0.0.1:41234", "wiretap": None, "run_id": "ab12", "run_dir": "runs/x"}
WAITING = {
    "event": "wait",
    "message": "1 of 20 clients have joined; starts with at least 16 in 120 s",
    "seconds": 120.0,
}


def round_event(number: int, **changes: object) -> dict:
    event = {
        "event": "round",
        "round": number,
        "of": 100,
        "latency_s": 0.5,
        "answered": 18,
        "clients": 20,
        "missing": [3, 7],
        "epsilon": 1.5,
    }
    return event | changes


SUMMARY = {
    "status": "completed",
    "message": "all 100 rounds are done",
    "private": True,
    "private_because": "user-level (ε = 20, δ = 0.001)-DP under premises P1-P4",
    "rounds": 100,
    "final_accuracy": 0.8312,
    "accuracy_last": {"mean": 0.82, "std": 0.004, "rounds": 20},
    "accuracy_max": 0.84,
    "accuracy_curve": [[0, 0.1], [50, 0.6], [100, 0.83]],
    "epsilon": 20.0,
    "epsilon_spent": 20.0,
    "delta": 1e-3,
    "noise_multiplier": 2.46,
    "round_latency_s": {
        "p50": 0.6,
        "p95": 0.9,
        "max": 2.0,
        "phases": {"collect": 0.57, "aggregate": 0.02, "odd": 0.01},
    },
    "bytes_down": 1_234_567,
    "bytes_up": 3.1e9,
    "refusals": {"stale_round": 2, "late": 1},
    "startup_s": 3.2,
    "seconds": 75.0,
    "run_dir": "runs/mnist-1",
    "model_file": "runs/mnist-1/public/model.safetensors",
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines_display(clock: Clock) -> tuple[LineDisplay, list[str]]:
    lines: list[str] = []
    return LineDisplay("mnist", 100, lines.append, clock), lines


def drawn(renderable: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


# -------------------------------------------------------------------- lines


def test_a_wait_is_said_with_how_many_are_there_and_when_it_ends(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show(WAITING)
    assert lines == ["waiting: 1 of 20 clients have joined; starts with at least 16 in 120 s"]


def test_three_hundred_joins_are_a_few_lines_and_the_latest_is_among_them(clock: Clock) -> None:
    display, lines = lines_display(clock)
    for joined in range(300):
        clock.now += 0.01
        display.show(
            {"event": "wait", "message": f"{joined} of 300 clients have joined, gives up in 9 s", "seconds": 9}
        )
    clock.now += 5
    display.tick()
    assert len(lines) <= 4
    assert lines[-1].startswith("waiting: 299 of 300")
    assert lines[-1].endswith("in 4 s")


def test_a_wait_that_is_over_is_not_said_later(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show(WAITING)
    display.show(WAITING | {"message": "19 of 20 clients have joined; in 119 s"})
    display.show(round_event(1))
    clock.now += 60
    display.tick()
    assert not any("19 of 20" in line for line in lines)


def test_rounds_are_a_line_every_few_seconds_and_one_at_each_evaluation(clock: Clock) -> None:
    display, lines = lines_display(clock)
    for number in range(1, 41):
        clock.now += 0.5
        display.show(round_event(number))
    assert len(lines) == 4
    display.show({"event": "evaluation", "round": 40, "accuracy": 0.712, "loss": 1.0})
    assert len(lines) == 5
    for words in ("round 40/100", "71.2% (round 40)", "ε = 1.5 spent", "500 ms a round", "18 of 20, missing 3, 7"):
        assert words in lines[-1]


def test_without_dp_the_line_says_so(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show(round_event(1, epsilon=None))
    assert "no DP" in lines[-1]


def test_a_wiretap_is_never_shown_beside_an_epsilon(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show(LISTENING | {"wiretap": "127.0.0.1:5"})
    display.show(round_event(1))
    assert any("not private" in line for line in lines[:2])
    assert "NOT PRIVATE" in lines[-1]
    assert "ε" not in lines[-1]


def test_a_flood_of_warnings_is_cut_short_and_counted(clock: Clock) -> None:
    display, lines = lines_display(clock)
    for number in range(1000):
        display.show({"event": "client_error", "message": f"client 3, round {number}: ValueError"})
    assert len(lines) == 20
    clock.now += 60
    display.tick()
    assert lines[-1].startswith("warning: 980 more warnings")


def test_the_same_warning_from_two_sides_is_shown_once(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show({"event": "warning", "message": "client 3 failed"})
    display.show({"event": "client_error", "message": "client 3 failed"})
    assert lines == ["warning: client 3 failed"]


def test_the_end_is_said_with_its_status(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show({"event": "end", "status": "quorum_lost", "message": "12 of 16 answered"})
    assert lines == ["quorum_lost: 12 of 16 answered"]


def test_an_unknown_event_does_no_harm(clock: Clock) -> None:
    display, lines = lines_display(clock)
    display.show({"event": "of a later version"})
    assert lines == []


# -------------------------------------------------------------------- live


def test_the_live_view_has_round_accuracy_privacy_latency_and_who_is_missing(clock: Clock) -> None:
    display = LiveDisplay("mnist", 100, Console(file=io.StringIO()), clock)
    display.show(LISTENING)
    display.show(round_event(37))
    display.show({"event": "evaluation", "round": 35, "accuracy": 0.7, "loss": 1.0})
    text = drawn(display.render())
    for words in (
        "37 of 100",
        "70.0% (round 35)",
        "ε = 1.5",
        "500 ms",
        "18 of 20, missing 3, 7",
        "31.5 s left",
        "ab12",
    ):
        assert words in text


def test_the_live_view_counts_a_wait_down(clock: Clock) -> None:
    display = LiveDisplay("mnist", 100, Console(file=io.StringIO()), clock)
    display.show(WAITING)
    clock.now += 83
    assert "16 in 37 s" in drawn(display.render())
    clock.now += 1000
    assert "16 in 0 s" in drawn(display.render())


def test_nothing_is_drawn_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display("mnist", 100) as display:
        display.show(round_event(1))
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err
    assert "round 1/100" in shown.err
    assert not shown.out


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display("mnist", 100, quiet=True) as display:
        display.show(LISTENING)
        display.show({"event": "warning", "message": "x"})
        display.tick()
    assert capsys.readouterr() == ("", "")


# -------------------------------------------------------------------- the table


def test_the_table_says_what_the_summary_says() -> None:
    text = drawn(render_summary(SUMMARY))
    for words in (
        "completed: all 100 rounds are done",
        "83.1% of the test set",
        "82.0% ± 0.4%",
        "ε = 20, δ = 0.001; noise multiplier 2.46",
        "premises P1-P4",
        "median 600 ms",
        "1.23 MB to the clients, 3.1 GB from them",
        "late 1, stale_round 2",
        "runs/mnist-1/public/model.safetensors",
        "75 s",
        "start-up 3.2 s",
    ):
        assert words in text, words


def test_the_table_shows_where_the_time_of_a_round_went() -> None:
    text = drawn(render_summary(SUMMARY))
    collect = next(line for line in text.splitlines() if "clients compute and send" in line)
    other = next(line for line in text.splitlines() if " odd " in line)
    assert "95%" in collect
    assert collect.count("█") > 20 > other.count("█")


def test_a_run_that_is_not_private_shows_no_epsilon() -> None:
    text = drawn(
        render_summary(SUMMARY | {"private": False, "private_because": "not private: the wiretap showed momenta"})
    )
    assert "NOT PRIVATE: the wiretap showed momenta" in text
    assert "ε" not in text


@pytest.mark.parametrize("key", sorted(SUMMARY))
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_summary_with_a_hole_still_makes_a_table(key: str, how: str) -> None:
    summary = dict(SUMMARY)
    if how == "null":
        summary[key] = None
    else:
        del summary[key]
    assert "╭" in drawn(render_summary(summary))


def test_the_table_fits_a_narrow_terminal() -> None:
    assert max(map(len, drawn(render_summary(SUMMARY), width=80).splitlines())) <= 80
    assert "…" not in drawn(render_summary(SUMMARY), width=80)


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    assert "[bold]x[/nonsense]" in drawn(render_summary(SUMMARY | {"message": "[bold]x[/nonsense]"}))


def test_the_picture_is_whole_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    save_picture(json.loads(json.dumps(SUMMARY)), path)
    text = path.read_text()
    ET.fromstring(text)  # noqa: S314 - our own file
    assert "83.1%" in text.replace("&#160;", " ")
    assert "@font-face" not in text
    assert "cdn" not in text


# -------------------------------------------------------------------- the parts


def test_the_remaining_time_follows_the_latest_rounds() -> None:
    progress = Progress("x", 100)
    assert progress.left_s is None
    for number in range(1, 61):
        progress.take(round_event(number, latency_s=9.0 if number < 40 else 0.25), 0.0)
    assert progress.left_s == pytest.approx(10.0)


def test_many_missing_ids_are_cut_short() -> None:
    assert missing_words([]) == ""
    assert missing_words([4, 9]) == ", missing 4, 9"
    assert missing_words(range(20)) == ", missing 0, 1, 2, 3, 4, 5 and 14 others"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.2e-6, "4.2 µs"), (0.0432, "43.2 ms"), (1.274, "1.27 s"), (200, "3:20"), (7322, "2:02:02"), (None, "–")],
)
def test_durations_are_written_as_one_reads_them(seconds: float | None, words: str) -> None:
    assert seconds_words(seconds) == words


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 2], 2) == "▁█"
    assert sparkline([1, float("nan"), 2], 9) == "▁·█"
    assert len(sparkline([3, 3], 9)) == 2
    assert sparkline([], 9) == ""


def test_a_bar_is_as_long_as_its_share() -> None:
    assert bar(0.5, 10) == "█" * 5
    assert bar(1.7, 3) == "███"
    assert bar(float("nan"), 3) == bar(-1, 3) == ""


def test_a_plot_is_high_where_the_values_are() -> None:
    rows = plot([(0, 0.0), (1, 1.0)], width=2, height=3)
    assert rows == [" █", " █", " █"]
    assert plot([(0, 0.5)], width=1, height=2) == [" ", "█"]
    assert plot([(0, float("nan"))], width=4, height=2) == []

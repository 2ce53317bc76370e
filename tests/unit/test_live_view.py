"""The live view of a run: what is on it, at any size; what it leaves; how it is drawn."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from screen import Screen

from deploy.display import LineDisplay, LiveDisplay
from deploy.panel import panel_of
from deploy.progress import POINTS, Curve, Progress

SEGMENTS = {"open": 0.001, "first": 0.1, "collect": 0.25, "grace": 0.05, "aggregate": 0.06, "commit": 0.04, "hold": 0.0}
LISTENING = {"event": "listening", "address": "127.0.0.1:41234", "wiretap": None, "run_id": "ab12", "run_dir": "x"}
PAGE = {"event": "status_page", "url": "http://h:1/", "operator_url": f"http://h:1/operator/?token={'t' * 32}"}
WAIT = {"event": "wait", "message": "18 of 20 answered; 16 must, gives up in 30 s", "seconds": 30.0}


def a_round(number: int, **changes: object) -> dict:
    event = {
        "event": "round",
        "round": number,
        "of": 100,
        "latency_s": 0.5,
        "segments": SEGMENTS,
        "live": 19,
        "answered": 18,
        "clients": 20,
        "missing": [3, 7],
        "epsilon": number / 10,
    }
    return event | changes


def evaluation(number: int) -> dict:
    return {"event": "evaluation", "round": number, "accuracy": number / 100, "loss": 1.0}


def everything() -> Progress:
    progress = Progress("mnist", 100, budget=12.0)
    rounds = [event for number in range(1, 38) for event in (a_round(number), evaluation(number))]
    refused = {"event": "refusals", "counts": {"late": 3, "equivocation": 5}}
    warned = [{"event": kind, "message": "x"} for kind in ("warning", "warning", "suspended")]
    for event in [LISTENING, PAGE, *rounds, refused, *warned, WAIT]:
        progress.take(event, 0.0)
    return progress


def drawn(progress: Progress, width: int, height: int, *, colour: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(panel_of(progress, 4.0, width=width, height=height, colour=colour))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_fits_and_is_whole(width: int) -> None:
    lines = drawn(everything(), width, 23)
    assert {len(line) for line in lines} == {width}
    assert len(lines) <= 23
    text = "\n".join(lines)
    assert "…" not in text
    for words in (
        "37 of 100",
        "31.5 s left",
        "37.0% (round 37)  ▁",
        "ε = 3.7 of 12 spent  ▁",
        "500 ms (median)  ▄",
        "collect 250 ms",
        "18 of 20, missing 3, 7",
        "19 of 20 live",
        "equivocation 5, late 3",
        "2 warnings, 1 suspension",
        "18 of 20 answered; 16 must, gives up in",
        "run ab12 at 127.0.0.1:41234",
    ):
        assert words in text, words
    assert PAGE["operator_url"] in re.sub(r"[│\s]", "", text)
    assert re.search(r"gives up in[│\s]+26 s", text)


def test_a_low_terminal_keeps_what_matters_most() -> None:
    lines = drawn(everything(), 80, 7)
    assert len(lines) == 7
    text = "\n".join(lines)
    for words in ("37 of 100", "37.0%", "ε = 3.7", "18 of 20, missing", "gives up in 26 s"):
        assert words in text, words
    assert "refusals" not in text


@pytest.mark.parametrize("width", [1, 2, 7, 20, 40])
@pytest.mark.parametrize("height", [1, 3, 24])
def test_no_terminal_is_too_small(width: int, height: int) -> None:
    lines = drawn(everything(), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(3, height)


def test_the_bar_of_the_last_round_is_divided_as_its_time_was() -> None:
    lines = drawn(everything(), 80, 23, colour=False)
    bar = next(line for line in lines if "last round" in line)
    shares = {mark: bar.count(mark) for mark in "█▓▒░▚·"}
    assert sum(shares.values()) == 64
    expected = {"█": 0.1, "▓": 0.25, "▒": 0.05, "░": 0.06, "▚": 0.04}
    for mark, seconds in expected.items():
        assert abs(shares[mark] - 64 * seconds / sum(SEGMENTS.values())) <= 1, mark
    legend = "\n".join(lines)
    for words in ("█ first 100 ms", "▓ collect 250 ms", "▒ grace 50 ms", "░ aggregate 60 ms", "▚ commit 40 ms"):
        assert words in legend
    assert "· others 1 ms" in legend
    assert "hold" not in legend


def test_before_the_first_round_it_says_what_it_is_doing() -> None:
    progress = Progress("mnist", 100)
    progress.take({"event": "note", "message": "loading PyTorch"}, 0.0)
    text = "\n".join(drawn(progress, 80, 23))
    assert "loading PyTorch" in text
    assert "0 of 100" in text
    assert "last round" not in text


def test_a_round_without_segments_or_members_is_shown_too() -> None:
    progress = Progress("mnist", 100)
    progress.take({key: value for key, value in a_round(1).items() if key not in ("segments", "live")}, 0.0)
    text = "\n".join(drawn(progress, 80, 23))
    assert "1 of 100" in text
    assert "live" not in text


def test_markup_in_names_and_messages_is_shown_as_it_is() -> None:
    progress = Progress("[red]x[/nonsense]", 100)
    progress.take(WAIT | {"message": "[bold]a\nb[/]"}, 0.0)
    text = "\n".join(drawn(progress, 80, 23))
    assert "[red]x[/nonsense]" in text
    assert "[bold]a b[/]" in text


def test_a_curve_is_of_the_whole_run_and_stays_small() -> None:
    curve = Curve()
    for value in range(100_000):
        curve.add(value)
        assert len(curve.values) <= POINTS + 1
        assert curve.values[-1] == value
    steps = [after - before for before, after in zip(curve.values, curve.values[1:], strict=False)]
    assert curve.values[0] < 2000
    assert max(steps) <= 2 * sorted(steps)[len(steps) // 2]


# -------------------------------------------------------------------- on a screen


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A live view on a screen of 24 lines."""

    def __init__(self, width: int = 80, *, stays: bool = True, **environment: str) -> None:
        self.screen, self.clock = Screen(width), Clock()
        self.console = Console(
            file=self.screen,
            width=width,
            height=24,
            force_terminal=True,
            color_system="truecolor",
            _environ=environment,
        )
        self.view = LiveDisplay("mnist", 100, self.console, self.clock, budget=12.0, stays=stays)

    def show(self, *events: dict) -> None:
        for event in events:
            self.clock.now += 1
            self.view.show(event)

    def resize(self, width: int) -> None:
        self.screen.resize(width)
        self.console.width = width
        self.clock.now += 1
        self.view.tick()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    stage.screen.write("$ byzuldp run mnist\n")
    with stage.view:
        yield stage


def frames(lines: list[str]) -> int:
    return sum(line.startswith("╭") for line in lines)


def test_it_is_redrawn_in_place_below_its_warnings(stage: Stage) -> None:
    stage.show(LISTENING, PAGE, *map(a_round, range(1, 9)), {"event": "warning", "message": "a slow disk"}, a_round(9))
    shown = stage.screen.shown
    assert shown[0] == "$ byzuldp run mnist"
    assert shown[1] == "warning: a slow disk"
    assert shown[2].startswith("╭─ mnist")
    assert frames(shown) == 1
    assert "9 of 100" in shown[3]


@pytest.mark.parametrize("width", [40, 79, 81, 160])
def test_another_width_leaves_one_whole_panel_and_what_was_above_it(stage: Stage, width: int) -> None:
    stage.show(LISTENING, PAGE, a_round(8), {"event": "warning", "message": "a slow disk"}, a_round(9))
    stage.resize(width)
    stage.show(a_round(10))
    shown = stage.screen.shown
    assert shown[:2] == ["$ byzuldp run mnist", "warning: a slow disk"]
    assert frames(shown) == 1
    assert {len(line) for line in shown[2:]} == {width}
    assert "10 of 100" in shown[3]


def test_a_redrawing_is_one_write(stage: Stage) -> None:
    stage.show(LISTENING, a_round(1))
    before = stage.screen.writes
    stage.show(a_round(2))
    assert stage.screen.writes - before == 1


def test_it_is_not_redrawn_for_each_of_a_thousand_events(stage: Stage) -> None:
    before = stage.screen.writes
    for number in range(1000):
        stage.clock.now += 0.001
        stage.view.show(a_round(number % 100))
    assert stage.screen.writes - before <= 5


@pytest.mark.parametrize("stays", [True, False])
def test_the_last_state_is_left_on_the_screen_where_that_is_wanted(stays: bool) -> None:
    stage = Stage(stays=stays)
    with stage.view:
        stage.show(LISTENING, a_round(99), WAIT)
        stage.clock.now += 1e-3
        stage.view.show(a_round(100))
        stage.view.show({"event": "end", "status": "completed", "message": "all 100 rounds are done"})
    stage.screen.write("after\n")
    *shown, last = stage.screen.shown
    assert last == "after"
    if stays:
        assert frames(shown) == 1
        assert "100 of 100" in shown[1]
        assert any("completed: all 100 rounds are done" in line for line in shown)
        assert shown[-1].startswith("╰")
    else:
        assert not any(shown)


def test_no_color_is_honoured() -> None:
    colours = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-9]|38;[0-9;]+)m")
    for environment, coloured in (({"NO_COLOR": "1"}, False), ({}, True)):
        stage = Stage(**environment)
        said: list[str] = []
        write = stage.screen.write
        stage.screen.write = lambda text, write=write, said=said: said.append(text) or write(text)  # type: ignore[method-assign]
        with stage.view:
            stage.show(LISTENING, a_round(1), WAIT)
        assert bool(colours.search("".join(said))) == coloured
        assert ("▓" in "".join(said)) != coloured


def test_the_lines_name_the_status_page_and_are_otherwise_as_they_were() -> None:
    lines: list[str] = []
    display = LineDisplay("mnist", 100, lines.append, Clock())
    for event in (PAGE, {"event": "refusals", "counts": {"late": 1}}, a_round(1)):
        display.show(event)
    assert lines == [
        f"status page: {PAGE['operator_url']}",
        "round 1/100  accuracy not evaluated yet  ε = 0.1 spent  500 ms a round  answered 18 of 20, missing 3, 7",
    ]

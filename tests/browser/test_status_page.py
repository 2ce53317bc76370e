"""The status page in a real browser, of a real parameter server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import OpenPage, chromium, missing
from federations import ServerProcess, small_experiment
from stock_client import Federation
from system_needs import needed

pytestmark = pytest.mark.system

WAYS = [(1280, False), (1280, True), (390, False), (390, True)]
CLIENTS, ROUNDS = 12, 30
EXPERIMENT: dict[str, Any] = {
    "federation": {"clients": CLIENTS, "byzantine": 2},
    "training": {"rounds": 60, "learning_rate": 0.2},
    "aggregation": {"rule": "trimmed_mean"},
    "privacy": {"epsilon": 8.0, "delta": 1e-3},
    "evaluation": {"every": 3},
    "monitoring": {"status": "127.0.0.1:0"},
    "network": {"grace_floor_s": 0.5, "liveness_s": 2.0},
}


class Run:
    """A run that goes on as it is told to."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self.federation, self.rounds = server, Federation(server), 0
        event = server.wait_for("status_page")
        self.urls = {"public": event["url"], "operator": event["operator_url"]}

    def make(self, rounds: int) -> None:
        """Some more rounds; every fourth lacks a client."""
        for _ in range(rounds):
            self.federation.clients[0].pull(self.rounds)
            late = [7] if self.rounds % 4 == 3 else []
            self.federation.push_all(self.rounds, self.federation.rows(self.rounds), but=late)
            self.rounds += 1
        self.federation.clients[0].pull(self.rounds)


@contextmanager
def running(folder: Path, **changes: Any) -> Iterator[Run]:
    with ServerProcess(small_experiment(**EXPERIMENT | changes), folder).listening() as server:
        run = Run(server)
        yield run
        run.federation.close()


@pytest.fixture(scope="module")
def open_page() -> Iterator[OpenPage]:
    needed(missing())
    with chromium() as opener:
        yield opener


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Thirty rounds, and messages that were refused."""
    with ExitStack() as resources:
        run = resources.enter_context(running(tmp_path_factory.mktemp("status")))
        run.make(ROUNDS)
        liar = run.federation.clients[11]
        for _ in range(3):
            liar.push(500, run.federation.rows(0)[11])
        liar.push(run.rounds, run.federation.rows(0)[11][:-1])
        yield run


def drawn(page: Any) -> None:
    page.wait_for_function("() => document.querySelectorAll('.tile').length > 2")


@pytest.mark.parametrize("part", ["public", "operator"])
@pytest.mark.parametrize(("width", "dark"), WAYS)
def test_the_page_fits_its_window_and_no_labels_collide(open_page: OpenPage, run: Run, part: str, width, dark):
    with open_page(run.urls[part], width, dark=dark) as shown:
        drawn(shown.page)
        shown.page.wait_for_function("() => document.querySelectorAll('#accuracy path').length > 0")
        assert (shown.errors, shown.outside) == ([], [])
        assert shown.overflow() <= 0
        assert shown.collisions() == []
        contrast, text = shown.contrast()
        assert contrast >= 4.5, text


@pytest.mark.parametrize("part", ["public", "operator"])
def test_every_figure_is_there_with_units_on_its_axes(open_page: OpenPage, run: Run, part: str) -> None:
    with open_page(run.urls[part]) as shown:
        drawn(shown.page)
        labels: dict[str, list[str]] = shown.page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll('figure')].filter((f) => f.querySelector('svg'))"
            ".map((f) => [f.id, [...f.querySelectorAll('.chart text')].map((t) => t.textContent)]))"
        )
    expected = {"accuracy": ("accuracy (%)", "round"), "epsilon": ("ε (no unit)", "round")}
    if part == "operator":
        expected |= {"phases": (r"time \((µs|ms|s|min)\)", "round"), "waterfall": (r"time since .* \((µs|ms|s|min)\)",)}
    assert set(labels) == set(expected)
    for name, axes in expected.items():
        for axis in axes:
            pattern = axis if "|" in axis else re.escape(axis)
            assert any(re.fullmatch(pattern, label) for label in labels[name]), (name, axis, labels[name])


def test_the_public_page_has_no_word_of_members_times_and_refusals(open_page: OpenPage, run: Run) -> None:
    with open_page(run.urls["public"]) as shown:
        drawn(shown.page)
        text = shown.page.locator("body").inner_text()
        for word in ("Members", "Refused", "Time left", "Time per round", "waiting"):
            assert word not in text
        assert shown.page.locator("#members tr").count() == 0
        assert "Accuracy" in text


def test_the_operators_page_shows_who_missed_rounds_and_what_was_refused(open_page: OpenPage, run: Run) -> None:
    with open_page(run.urls["operator"]) as shown:
        drawn(shown.page)
        assert "token" not in shown.page.url, "the token does not stay in the address"
        rows = shown.page.locator("#members tr")
        assert rows.count() == CLIENTS + 1
        assert f"7 of {min(ROUNDS, 40)}" in rows.nth(8).inner_text()
        refusals = shown.page.locator("#refusals")
        shown.page.wait_for_function("() => document.querySelectorAll('#refusals tr').length > 2")
        assert re.search(r"future_round\s+3", refusals.inner_text())
        bars = shown.page.evaluate(
            "() => new Set([...document.querySelectorAll('#phases rect[data-segment]')].map((r) => r.getAttribute('x'))"
            ").size"
        )
        assert bars == min(ROUNDS, 40)


def test_the_page_updates_by_itself_and_says_when_the_server_is_gone(open_page: OpenPage, tmp_path: Path) -> None:
    with running(tmp_path) as run, open_page(run.urls["operator"]) as shown:
        page = shown.page
        drawn(page)
        for rounds in (3, 2):
            run.make(rounds)
            page.wait_for_function(f"() => document.querySelector('.tile b').textContent === '{run.rounds} of 60'")
        assert page.locator("#lamp").inner_text() == "live"
        assert shown.errors == []
        page.reload()
        page.wait_for_function(f"() => document.querySelector('.tile b')?.textContent === '{run.rounds} of 60'")
        assert page.locator("#members tr").count() == CLIENTS + 1, "the cookie has the token now"
        os.kill(run.server.pid, signal.SIGSTOP)
        try:
            page.wait_for_function(
                "() => /does not answer since \\d+ s/.test(document.querySelector('#banner').textContent)"
            )
            assert page.locator("#lamp").inner_text() == "no answer"
        finally:
            os.kill(run.server.pid, signal.SIGCONT)
        page.wait_for_function("() => document.querySelector('#lamp').textContent === 'live'")
        run.server.kill()
        page.wait_for_function("() => document.querySelector('#lamp').textContent === 'no answer'")
        assert page.locator(".tile b").first.inner_text() == f"{run.rounds} of 60", "what was known stays"


def test_the_page_says_how_the_run_ended_and_asks_no_more(open_page: OpenPage, tmp_path: Path) -> None:
    training = EXPERIMENT["training"] | {"rounds": 4}
    with running(tmp_path, training=training) as run, open_page(run.urls["public"]) as shown:
        drawn(shown.page)
        run.make(3)
        run.federation.push_all(3, run.federation.rows(3))
        run.server.finish()
        shown.page.wait_for_function("() => document.querySelector('#lamp').textContent === 'completed'")
        text = shown.page.locator("#banner").inner_text()
        assert text == "The run has ended: completed (all rounds are done)."
        asked: list[str] = []
        shown.page.on("request", lambda request: asked.append(request.url))
        shown.page.wait_for_timeout(2500)
        assert asked == []
        assert shown.errors == []


def test_a_waiting_server_is_said_to_wait_and_for_how_long(open_page: OpenPage, tmp_path: Path) -> None:
    with (
        ServerProcess(small_experiment(**EXPERIMENT), tmp_path).listening() as server,
        open_page(server.wait_for("status_page")["operator_url"], 390) as shown,
    ):
        drawn(shown.page)
        shown.page.wait_for_function(
            "() => /^Waiting: .* in [\\d.]+ (s|min)\\)?\\.$/.test(document.querySelector('#banner').textContent)"
        )
        assert "never joined" in shown.page.locator("#members").inner_text()
        assert shown.overflow() <= 0
        assert shown.errors == []


def test_a_run_without_privacy_says_so_and_has_no_curve_of_it(open_page: OpenPage, tmp_path: Path) -> None:
    with running(tmp_path, privacy={}) as run, open_page(run.urls["operator"]) as shown:
        run.make(2)
        shown.page.wait_for_function("() => document.querySelectorAll('#phases rect').length > 0")
        assert "promises no privacy" in shown.page.locator("#epsilon").inner_text()
        assert not shown.page.locator("#premises").is_visible()
        assert (shown.errors, shown.collisions()) == ([], [])

"""The report's page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import OpenPage, chromium, missing
from reported_run import add_chaos, make_reported_run
from system_needs import needed

from deploy.report.writing import write_report, write_reports

pytestmark = pytest.mark.system

ROUNDS = 30
FEDERATION = {"clients": 12, "byzantine": 2}
WAYS = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def open_page() -> Iterator[OpenPage]:
    needed(missing())
    with chromium() as opener:
        yield opener


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of an operator's report, a public one, and one of several runs."""
    place = tmp_path_factory.mktemp("report")
    attacked = make_reported_run(
        place / "disturbed", rounds=ROUNDS, federation=FEDERATION, attack={"name": "alie", "adversaries": 2}
    )
    add_chaos(place, attacked, ROUNDS)
    plain = make_reported_run(
        place / "a_run_with_quite_a_long_name_of_its_own",
        rounds=ROUNDS,
        made=17,
        seed=2,
        federation=FEDERATION,
        spans=False,
    )
    written = {
        "one": write_report(attacked),
        "public": write_report(attacked, public=True),
        "several": write_reports([attacked, plain], place / "several.html"),
    }
    return {name: path.as_uri() for name, path in written.items()}


@pytest.mark.parametrize("name", ["one", "public", "several"])
@pytest.mark.parametrize(("width", "dark"), WAYS)
def test_a_page_fits_its_window_and_no_labels_collide(open_page: OpenPage, pages: dict[str, str], name, width, dark):
    with open_page(pages[name], width, dark=dark) as shown:
        assert (shown.errors, shown.outside) == ([], [])
        assert shown.overflow() <= 0
        assert shown.collisions() == []
        contrast, text = shown.contrast()
        assert contrast >= 4.5, text


def test_the_page_of_a_run_has_every_figure(open_page: OpenPage, pages: dict[str, str]):
    with open_page(pages["one"]) as shown:
        drawn = shown.page.evaluate(
            "() => [...document.querySelectorAll('figure')].map((f) => [f.id, f.querySelectorAll('svg path, svg rect')"
            ".length, f.querySelector('svg').getBoundingClientRect().height])"
        )
    names = "accuracy loss epsilon release displacement latency phases percentiles waterfall answers arrivals"
    assert [name for name, _, _ in drawn] == names.split()
    assert all(parts > 10 and height > 100 for _, parts, height in drawn)


def test_colours_follow_the_scheme(open_page: OpenPage, pages: dict[str, str]):
    colours = []
    for dark in (False, True):
        with open_page(pages["one"], dark=dark) as shown:
            colours.append(
                shown.page.evaluate(
                    "() => [getComputedStyle(document.body).backgroundColor,"
                    "getComputedStyle(document.querySelector('#accuracy text')).fill]"
                )
            )
    (paper, ink), (dark_paper, dark_ink) = colours
    assert paper != dark_paper
    assert ink != dark_ink


def test_the_waterfall_shows_the_round_that_is_chosen(open_page: OpenPage, pages: dict[str, str]):
    with open_page(pages["one"]) as shown:
        page = shown.page
        said, chart = page.locator("#waterfall .said"), page.locator("#waterfall .chart")
        last = ROUNDS - 1
        assert said.text_content().startswith(f"Round {last}:")
        spans = chart.locator("rect[data-span=upload]")
        assert spans.count() == 11, "client 11 was missing in round 29"
        first_look = chart.inner_html()
        page.locator("#waterfall select").select_option(index=3)
        assert said.text_content().startswith("Round 3:")
        assert spans.count() == 12
        assert chart.inner_html() != first_look
        assert page.locator("#waterfall input").input_value() == "3"
        page.locator("#waterfall button").first.click()
        assert said.text_content().startswith("Round 2:")
        page.locator("#waterfall input").fill("11")
        assert said.text_content().startswith("Round 11:")
        assert page.locator("#waterfall select").input_value() == "11"
        assert shown.errors == []


def test_the_waterfalls_segments_fill_the_round_and_training_is_marked_unverified(
    open_page: OpenPage, pages: dict[str, str]
):
    with open_page(pages["one"]) as shown:
        widths = shown.page.evaluate(
            "() => [...document.querySelectorAll('#waterfall rect[data-segment]')].map((r) => +r.getAttribute('width'))"
        )
        line = shown.page.evaluate(
            "() => { const l = [...document.querySelectorAll('#waterfall .chart > svg > line')].pop();"
            "return l.getAttribute('x1') - document.querySelector('#waterfall rect[data-segment]').getAttribute('x'); }"
        )
        assert sum(widths) == pytest.approx(line, abs=0.5 * len(widths))
        assert "training, by its own account (unverified)" in shown.page.locator("#waterfall .legend").text_content()


def test_a_run_without_spans_has_a_waterfall_of_its_segments(open_page: OpenPage, pages: dict[str, str]):
    with open_page(pages["several"]) as shown:
        assert "no spans were recorded" in shown.page.locator("#run2-waterfall .said").text_content()
        assert shown.page.locator("#run2-waterfall rect[data-segment]").count() == 10


def test_the_waterfall_is_drawn_anew_for_another_width(open_page: OpenPage, pages: dict[str, str]):
    with open_page(pages["one"]) as shown:
        shown.page.set_viewport_size({"width": 390, "height": 800})
        shown.page.wait_for_function(
            "() => document.querySelector('#waterfall .chart svg').getAttribute('width') < 390"
        )
        assert shown.overflow() <= 0
        assert shown.collisions() == []


def test_a_printed_page_has_no_controls(open_page: OpenPage, pages: dict[str, str], tmp_path: Path):
    with open_page(pages["one"], dark=True) as shown:
        shown.page.emulate_media(media="print")
        assert not shown.page.locator("#waterfall .controls").is_visible()
        assert shown.page.locator("#waterfall .chart svg").is_visible()
        ink = shown.page.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--ink')")
        assert ink.strip() == "#1b2026", "a dark screen must not make a dark print"
        printed = shown.page.pdf(path=tmp_path / "report.pdf")
        assert printed.startswith(b"%PDF")

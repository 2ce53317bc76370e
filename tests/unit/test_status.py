"""The parts of the status page that need no server."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federations import small_experiment

import ps.status
from common.config import digest_of, experiment_from, load_experiment
from common.errors import ConfigError
from common.rpc.addresses import Address
from deploy.report.described import shown_publicly
from deploy.report.palette import variables
from ps.records import RoundMetrics
from ps.roster import Member
from ps.status.access import Access, Tokens, tokens_in
from ps.status.curve import MOST, Curve
from ps.status.facts import RunFacts
from ps.status.listening import listen
from ps.status.members import MOST_ROWS, Look, rows_of
from ps.status.view import RECENT, View

STATIC = Path(ps.status.__file__).parent / "static"


# ---------------------------------------------------------------- configuration


def test_where_a_run_is_watched_is_neither_public_nor_part_of_what_row_0_fixes() -> None:
    plain = load_experiment("mnist")
    watched = load_experiment("mnist", ["monitoring.status=127.0.0.1:8080", "monitoring.otlp=http://127.0.0.1:4317"])
    assert watched.fingerprint() == plain.fingerprint()
    assert digest_of(watched.model_dump(mode="json")) == digest_of(plain.model_dump(mode="json"))
    before = {key: value for key, value in plain.model_dump(mode="json").items() if key != "monitoring"}
    assert digest_of(before) == digest_of(plain.model_dump(mode="json")), "a run of an earlier version goes on"
    assert experiment_from(before).monitoring.status == "127.0.0.1:0"
    assert not [key for key in shown_publicly({"monitoring.status": "", "training.rounds": 1}) if "monitoring" in key]


@pytest.mark.parametrize("text", ["127.0.0.1", "8080", "127.0.0.1:99999", "::1:80", "192.0.2.1:80"])
def test_an_address_that_is_none_or_not_this_machines_is_refused_by_the_name_of_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.status = "):
        listen(text)


def test_two_pages_cannot_have_one_port() -> None:
    listener, address = listen("127.0.0.1:0")
    with listener, pytest.raises(ConfigError, match="in use"):
        listen(str(address))


def test_without_a_page_its_libraries_are_not_imported() -> None:
    code = "import sys, ps.status; print([name for name in ('aiohttp', 'prometheus_client') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- access


def test_tokens_are_kept_from_one_life_to_the_next_unless_others_could_read_them(tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path)
    assert tokens.operator != tokens.page
    assert tokens_in(tmp_path) == tokens
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    (tmp_path / "status_token").chmod(0o644)
    (tmp_path / "status_page_token").write_text("")
    again = tokens_in(tmp_path)
    assert not {again.operator, again.page} & {tokens.operator, tokens.page, ""}
    assert tokens.operator not in repr(tokens)


def test_no_token_opens_what_an_empty_one_must_not() -> None:
    access = Access(Tokens("o" * 32, "p" * 32), Address("192.0.2.1", 1))
    for given in (None, "", "\udcff", "p" * 31):
        for part in ("public", "operator"):
            assert access.refuse(part, given) is not None  # type: ignore[arg-type]
    assert access.refuse("operator", "p" * 32) == (403, "This is not the operator's token of this run.")
    assert access.refuse("public", "p" * 32) is access.refuse("public", "o" * 32) is None


# ---------------------------------------------------------------- what is shown


def facts_of(**sections: Any) -> RunFacts:
    genesis = SimpleNamespace(premises=("P1: one",), neighbouring="one", epsilon=None, delta=None)
    return RunFacts(
        run_id="run",
        experiment=small_experiment(**sections),
        ledger=SimpleNamespace(next_round=0, genesis=genesis),  # type: ignore[arg-type]
        folder=Path("nowhere"),
        rule="mean",
        parameters=10,
    )


def test_a_curve_of_any_length_stays_small_and_keeps_both_ends() -> None:
    curve = Curve((k, float(k)) for k in range(100_000))
    assert len(curve.points) <= MOST + 1
    assert (curve.points[0], curve.points[-1]) == ((0, 0.0), (99_999, 99_999.0))
    gaps = {b[0] - a[0] for a, b in zip(curve.points[:-2], curve.points[1:-1], strict=True)}
    assert len(gaps) == 1, "evenly thinned"
    curve.add(99_999, 7.0)
    assert curve.last == (99_999, 99_999.0), "what is not new is left out"


def test_only_the_last_rounds_are_kept_and_their_spans_not_at_all_but_the_latests() -> None:
    view = View(facts_of())
    for round_id in range(3 * RECENT):
        view.take_round(RoundMetrics(round_id, 0.0, 0.1, {"open": 0.1}, spans=[("upload", 1, 0.0, 0.1, 4)]))  # type: ignore[list-item]
    assert [metrics.round_id for metrics in view.recent] == list(range(2 * RECENT, 3 * RECENT))
    assert not any(metrics.spans for metrics in view.recent)
    assert view.latest is not None
    assert view.latest.spans


def test_the_public_part_says_how_a_run_ended_by_its_status_alone() -> None:
    view = View(facts_of())
    view.take_event({"event": "wait", "message": "client 3 is missing", "seconds": 9.0}, 0.0)
    view.take_event({"event": "warning", "message": "client 4 is slow"}, 0.0)
    view.take_event({"event": "end", "status": "quorum_lost", "message": "clients 3 and 4 are gone"}, 1.0)
    public, operator = view.public(), view.operator(2.0, None, [])
    assert (public["status"], public["ended"]) == ("quorum_lost", True)
    assert public["message"] == "Too few clients answered, for too long."
    assert "operator" not in public
    assert "3" not in public["message"]
    assert operator["operator"]["end"] == "clients 3 and 4 are gone"
    assert operator["operator"]["warnings"] == ["client 4 is slow"]
    assert operator["operator"]["wait"] is None


def test_a_server_that_goes_without_a_word_is_not_said_to_have_completed() -> None:
    view = View(facts_of())
    view.stop()
    assert (view.public()["status"], view.public()["ended"]) == ("stopped", True)


def test_what_is_not_finite_is_left_out_of_curves() -> None:
    view = View(facts_of())
    view.take_event({"event": "evaluation", "round": 1, "accuracy": float("nan"), "loss": 0.0}, 0.0)
    view.take_event({"event": "round", "round": 1, "epsilon": float("inf")}, 0.0)
    assert view.public()["accuracy"] == view.public()["privacy"]["spent"] == []


def test_members_in_trouble_come_first_where_not_all_can_be_shown() -> None:
    members = [Member(k, b"", 0.0, 10.0 - 0.001 * k, k != 7, 1) for k in range(1000) if k not in (3, 5)]
    look = Look(members, frozenset(range(1000)) - {3}, 12.0)
    rows, left_out = rows_of(look, 1000, suspended={5: 3.0}, missed={9: 2}, refusals={9: 1})
    assert (len(rows), left_out) == (MOST_ROWS, 1000 - MOST_ROWS)
    assert [(row["client"], row["state"]) for row in rows[:4]] == [
        (3, "never joined"),
        (5, "suspended"),
        (7, "dead"),
        (9, "live"),
    ]
    assert rows[3] | {"seen_s": 0} == {"client": 9, "state": "live", "seen_s": 0, "lives": 1, "missed": 2, "refused": 1}
    assert rows[3]["seen_s"] == pytest.approx(2.009)
    rows, left_out = rows_of(
        Look(members[:4], frozenset({0, 1, 2, 3, 4}), 12.0), 5, suspended={}, missed={}, refusals={}
    )
    assert ([row["state"] for row in rows], left_out) == (["live", "live", "live", "left", "live"], 0)


# ---------------------------------------------------------------- the page's files


def test_the_colours_are_those_of_the_report() -> None:
    light, _, dark = (STATIC / "page.css").read_text().partition("@media screen and (prefers-color-scheme: dark)")
    for sheet, expected in ((light, variables(dark=False)), (dark, variables(dark=True))):
        given = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", sheet))
        assert dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", expected)).items() <= given.items()


def test_the_page_names_nothing_outside_and_has_no_inline_script_or_style() -> None:
    page = (STATIC / "page.html").read_text()
    assert not re.findall(r"https?:|<style|style=|\son\w+=|<script(?! src=)", page)
    for name in ("page.js", "draw.js"):
        text = (STATIC / name).read_text()
        assert "innerHTML" not in text, "what a client may have said is text, never markup"
        assert [*re.findall(r"https?://[^\"]*", text)] == (["http://www.w3.org/2000/svg"] if name == "draw.js" else [])

"""An un-noised value stays in its box, and a run is called private only with its reasons."""

import ast
import copy
import json
import logging
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from common.errors import PrivacyError
from ps.privacy.premises import premises_of, privacy_status
from ps.privacy.released import Unreleased, open_for_mechanism

SECRET = 31337.25
ROOT = Path(__file__).parents[2]


@pytest.fixture
def box() -> Unreleased[float]:
    return Unreleased(SECRET)


def test_the_mechanism_opens_a_box_and_finds_what_was_put_in(box):
    assert open_for_mechanism(box) is SECRET


def test_only_a_box_can_be_opened():
    with pytest.raises(TypeError, match="given float: nothing here is waiting for noise"):
        open_for_mechanism(SECRET)


@pytest.mark.parametrize(
    "shown",
    [repr, str, lambda box: "%s %r" % (box, box), lambda box: str([box]), lambda box: f"{box!r}"],  # noqa: UP031
)
def test_no_text_shows_the_content(box, shown):
    assert "unreleased" in shown(box)
    assert "31337" not in shown(box)


def test_no_log_line_shows_the_content(box, caplog):
    logging.getLogger("test").warning("norm %s", box)
    assert caplog.messages == ["norm <unreleased>"]


@pytest.mark.parametrize(
    "leak",
    [
        lambda box: f"{box}",
        lambda box: f"{box:.3f}",
        lambda box: "{}".format(box),  # noqa: UP032
        json.dumps,
        lambda box: json.dumps({"norm": box}),
        float,
        int,
        complex,
        bool,
        bytes,
        round,
        math.floor,
        abs,
        iter,
        len,
        list,
        np.asarray,
        lambda box: np.asarray(box, dtype=float),
        lambda box: np.float64(1.0) + box,
        lambda box: np.ones(3) * box,
        lambda box: box + 1,
        lambda box: box < 1,
        lambda box: box[0],
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda box: box.__getstate__(),
        vars,
    ],
)
def test_no_conversion_lets_the_content_out(box, leak):
    with pytest.raises(TypeError) as refusal:
        leak(box)
    assert "31337" not in str(refusal.value)


def test_a_box_has_no_attribute_with_the_content_and_compares_by_identity(box):
    assert not hasattr(box, "content")
    assert not hasattr(box, "__dict__")
    assert box != SECRET
    assert box != Unreleased(SECRET)
    with pytest.raises(AttributeError):
        box.note = SECRET


def test_only_the_mechanism_opens_boxes():
    allowed = {"ps/privacy/released.py", "ps/release.py"}
    callers = {
        str(path.relative_to(ROOT))
        for package in ("common", "ps", "client", "adversary", "deploy")
        for path in (ROOT / package).rglob("*.py")
        if "open_for_mechanism" in path.read_text(encoding="utf-8") or _reaches_inside(path)
    }
    assert callers <= allowed


def test_only_the_wiretap_opens_boxes_for_an_adversary():
    callers = {
        str(path.relative_to(ROOT))
        for package in ("common", "ps", "client", "adversary", "deploy")
        for path in (ROOT / package).rglob("*.py")
        if "open_for_wiretap" in path.read_text(encoding="utf-8")
    }
    assert callers == {"ps/privacy/released.py", "ps/wiretap.py"}


def _reaches_inside(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.Attribute) and node.attr == "_Unreleased__content" for node in ast.walk(tree))


def test_every_premise_is_stated_unless_it_was_removed():
    def names(**given):
        return [sentence[:2] for sentence in premises_of(**given)]

    assert names() == ["P1", "P2", "P3", "P4"]
    assert names(round_timing="fixed") == ["P1", "P3", "P4"]
    assert names(strict=True, round_timing="fixed") == ["P1", "P3"]
    with pytest.raises(PrivacyError, match="use 'fixed'"):
        premises_of(strict=True)
    with pytest.raises(PrivacyError, match="round_timing = 'soon'"):
        premises_of(round_timing="soon")


@pytest.mark.parametrize(
    ("given", "private", "because"),
    [
        ({"epsilon": 20.0, "delta": 1e-3}, True, "user-level (ε = 20, δ = 0.001)-DP under premises P1-P4"),
        (
            {"epsilon": 0.5, "delta": 1e-5, "premises": premises_of(strict=True, round_timing="fixed")},
            True,
            "user-level (ε = 0.5, δ = 1e-05)-DP under premises P1, P3",
        ),
        ({"epsilon": None}, False, "not private: no noise was asked for (privacy.epsilon is not set)"),
        (
            {"epsilon": 20.0, "delta": 1e-3, "wiretap": True},
            False,
            "not private: the wiretap showed honest momenta to the adversary",
        ),
        (
            {"epsilon": 20.0, "delta": 1e-3, "noise_secret": False},
            False,
            "not private: privacy.noise_seed fixes the noise",
        ),
        (
            {"epsilon": 20.0, "delta": 1e-3, "noise_secret": False, "wiretap": True},
            False,
            "not private: the wiretap showed honest momenta to the adversary; privacy.noise_seed fixes the noise",
        ),
    ],
)
def test_a_run_is_called_private_only_with_its_reasons(given, private, because):
    assert privacy_status(**given) == (private, because)


def test_epsilon_without_delta_is_no_claim():
    with pytest.raises(PrivacyError, match="without delta"):
        privacy_status(epsilon=1.0)

"""Many connections, each a client of its own, against a real parameter server: no momentum is lost.

How long it takes is measured by ``make bench-scale``, and asserted nowhere.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from common.config import Network
from ps.limits import limits_of, options_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scale(monkeypatch):
    """The benchmark; this process may have as many files open as it needs, and as few as before afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, limit = set(sys.modules), resource.getrlimit(resource.RLIMIT_NOFILE)
    import scale

    yield scale
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    for name in set(sys.modules) - before:
        if name.startswith("scale"):
            del sys.modules[name]


def needing(setting, scale):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = setting.clients + scale.SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{needed} files have to be open in one process, and the hard limit is {hard}")
    return setting


def check(found, setting):
    assert found.lost == []
    assert found.answers == setting.clients * setting.rounds
    assert found.peak.files >= setting.clients  # a connection for each
    for rounds in found.echo.values():
        assert len(rounds) == 2 * setting.echo_rounds
    assert found.peak.rss - found.idle.rss <= found.formula.total


@pytest.mark.system  # for the time it takes
def test_no_momentum_of_many_connections_is_lost(scale, tmp_path):
    setting = needing(scale.Setting(60, "small", rounds=3, processes=1, echo_rounds=0), scale)
    check(scale.measure(setting, tmp_path), setting)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_momentum_of_a_thousand_connections_is_lost(scale, tmp_path):
    setting = needing(scale.Setting(1000, "paper", rounds=5, echo_rounds=1), scale)
    check(scale.measure(setting, tmp_path), setting)


def test_as_many_calls_may_wait_for_the_event_loop_as_may_be_open():
    """gRPC cancels calls that wait while a thousand others do, and a thousand clients open two each at once."""
    limits = limits_of(Network(), 1000)
    options = dict(options_of(limits, Network()))
    assert options["grpc.server.max_pending_requests"] >= limits.streams
    assert options["grpc.server.max_pending_requests_hard_limit"] >= limits.streams


def test_too_few_files_are_refused_before_anything_starts(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "raise_file_limit", lambda: 64)
    with pytest.raises(SystemExit, match="raise the hard limit"):
        scale.measure(scale.Setting(60, "small", rounds=3), tmp_path)
    assert list(tmp_path.iterdir()) == []

"""Segments partition a round; spans do not, and survive being written down."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from federations import small_experiment, until
from hypothesis import given
from hypothesis import strategies as st
from made_run import make_run

from common.errors import StoreProblem
from common.noise import NoiseAhead
from ps.records import EvaluationRecord, Records, RoundMetrics, rounds
from ps.round_maker import RoundMaker
from ps.rounds import CloseRound
from ps.spans import NAMES, Packed, Span, pack, unpack
from ps.store import CommittedRound
from ps.timing import SEGMENTS, RoundTiming

TIMES = st.floats(0.0, 1e6)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.sampled_from(SEGMENTS), TIMES), min_size=1))
def test_segments_add_up_to_the_latency_whatever_is_said_to_have_ended_when(
    available_at: float, ends: list[tuple[str, float]]
) -> None:
    timing = RoundTiming(0, available_at)
    for name, after_s in ends:
        timing.ends(name, available_at + after_s)
    assert all(seconds >= 0.0 for seconds in timing.segments.values())
    assert sum(timing.segments.values()) == pytest.approx(timing.latency_s, abs=1e-9 * max(1.0, abs(available_at)))
    assert timing.latency_s == pytest.approx(max(after_s for _, after_s in ends), abs=1e-6)


def test_a_segment_ends_now_unless_it_is_said_when() -> None:
    timing = RoundTiming(3, time.monotonic())
    timing.ends("open")
    assert 0.0 <= timing.segments["open"] < 10.0
    assert list(timing.segments) == ["open"]


spans = st.builds(
    Span,
    st.sampled_from(NAMES),
    st.none() | st.integers(0, 2**31 - 1),
    st.floats(-1e4, 1e6, width=32),
    st.floats(0.0, 1e6, width=32),
    st.integers(0, 2**64 - 1),
)


@given(st.lists(spans))
def test_spans_are_read_as_they_were_packed(given_spans: list[Span]) -> None:
    data = pack(given_spans)
    assert unpack(data) == given_spans
    later = Packed(data)
    assert (len(later), list(later), later[-2:]) == (len(given_spans), given_spans, given_spans[-2:])
    assert pack(later) == data


def test_a_span_of_no_known_kind_is_refused_when_it_is_said() -> None:
    with pytest.raises(KeyError, match="lunch"):
        RoundTiming(0, 0.0).span("lunch", 3, 1.0, 0.5)


@pytest.mark.parametrize("damage", [b"\0", b"\xff" * 21])
def test_bytes_that_are_no_spans_are_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"no whole number|no name"):
        unpack(damage)


@pytest.mark.parametrize(
    "segments", [{}, {"collect": 1 / 3, "commit": 1e-9}, {'100% "odd"\n': 1e6, "zero": 0.0, "of a later version": 2.5}]
)
def test_segments_are_recorded_to_nine_digits_whatever_they_are_called(
    segments: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "operator").mkdir()
    records = Records(tmp_path / "operator" / "metrics.sqlite")
    records.round(RoundMetrics(0, 0.0, 1.0, segments))
    (found,) = records.read(rounds)
    records.close()
    assert list(found.segments) == list(segments)
    assert found.segments == pytest.approx(segments, rel=1e-8, abs=0.0)


def test_the_log_of_the_records_is_moved_into_the_database_now_and_then_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.records.MOVE_EVERY", 8)
    path = tmp_path / "metrics.sqlite"
    records = Records(path)
    size = path.stat().st_size
    for round_id in range(40):
        records.round(RoundMetrics(round_id, 0.0, 1.0, {}, spans=[Span("upload", k, 0.0, 1.0, 40) for k in range(60)]))
    records.flush()
    assert path.stat().st_size > size  # before it is closed, which would do the same
    assert len(records.read(rounds)) == 40
    records.close()


def test_rounds_are_written_without_being_asked_for_and_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever records a round does not wait for the disk; others see it soon."""
    writers, write_all = set(), Records._write_all

    def noted(records: Records, writes: Sequence[object]) -> object:
        writers.add(threading.current_thread())
        return write_all(records, writes)

    monkeypatch.setattr(Records, "_write_all", noted)
    path = tmp_path / "metrics.sqlite"
    records = Records(path)
    records.round(RoundMetrics(0, 0.0, 1.0, {}))
    until(lambda: _rounds_in(path) == 1, "a round to be in the database")
    records.close()
    assert writers
    assert threading.current_thread() not in writers


def test_what_was_handed_over_before_closing_is_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "metrics.sqlite")
    for round_id in range(100):
        records.round(RoundMetrics(round_id, 0.0, 1.0, {}))
    records.close()
    assert _rounds_in(tmp_path / "metrics.sqlite") == 100


def test_a_record_that_could_not_be_written_is_told_to_the_next_who_records(tmp_path: Path) -> None:
    records = Records(tmp_path / "metrics.sqlite")
    records._connection.execute("DROP TABLE rounds")
    records.round(RoundMetrics(0, 0.0, 1.0, {}))
    with pytest.raises(StoreProblem, match="no such table"):
        records.flush()
    records.evaluation(EvaluationRecord(1, 0.5, 0.1, 10))  # told once
    records.close()


def test_a_record_that_nothing_can_write_is_told_too_and_the_next_one_is_written(tmp_path: Path) -> None:
    """A thread that died of it would be waited for without end."""
    records = Records(tmp_path / "metrics.sqlite")
    records.round(RoundMetrics(1 << 70, 0.0, 1.0, {}))  # more than SQLite has room for
    with pytest.raises(OverflowError):
        records.flush()
    records.round(RoundMetrics(1, 0.0, 1.0, {}))
    records.flush()
    records.close()
    assert _rounds_in(tmp_path / "metrics.sqlite") == 1


def _rounds_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM rounds").fetchone()
    return int(count)


def test_who_does_the_same_again_and_again_in_a_round_is_recorded_once() -> None:
    timing = RoundTiming(0, 0.0)
    for number in range(1000):
        timing.span("download", 3, float(number), 0.5, 40)
    timing.span("download", 4, 1.0, 0.5, 40)
    assert list(timing.spans) == [Span("download", 3, 999.0, 0.5, 40), Span("download", 4, 1.0, 0.5, 40)]


class Slow:
    """Normals that take a while, and say when they are there."""

    secret = False

    def __init__(self) -> None:
        self.done = threading.Event()

    def standard_normal(self, d: int, *, round_id: int | None = None) -> np.ndarray:  # noqa: ARG002  (see NoiseSource)
        time.sleep(0.1)
        self.done.set()
        return np.zeros(d)


@pytest.mark.parametrize("ahead", [True, False])
def test_noise_has_a_span_and_the_round_waits_for_it_only_if_it_was_not_drawn_ahead(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, kept, make = Slow(), [], RoundMaker.make

    def timed(maker: RoundMaker, closing: CloseRound, _timing: RoundTiming) -> CommittedRound:
        timing = RoundTiming(closing.round_id, time.monotonic())
        if ahead:
            maker.foresee(closing.round_id)
            assert slow.done.wait(10)  # the clients compute meanwhile
        kept.append(timing)
        return make(maker, closing, timing)

    monkeypatch.setattr("made_run.noise_of", lambda *_: NoiseAhead(slow))
    monkeypatch.setattr(RoundMaker, "make", timed)
    make_run(tmp_path / "run", small_experiment(training={"rounds": 1}, privacy={"epsilon": 3.0, "delta": 1e-3}))
    (timing,) = kept
    (span,) = timing.spans
    assert (span.name, span.client_id) == ("noise", None)
    assert span.seconds >= 0.099
    if ahead:  # it overlaps what the clients do, and is over before the round is made
        assert span.start_s + span.seconds <= timing.segments["close"] + 1e-3
        assert timing.segments["noise"] < span.seconds
    else:
        assert timing.segments["close"] <= span.start_s + 1e-3
        assert timing.segments["noise"] >= span.seconds - 1e-3
    assert sum(timing.segments.values()) == pytest.approx(timing.latency_s)  # the span is in no sum


def test_exact_noise_is_drawn_while_the_aggregate_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, make = [], RoundMaker.make

    def timed(maker: RoundMaker, closing: CloseRound, _timing: RoundTiming) -> CommittedRound:
        kept.append(RoundTiming(closing.round_id, time.monotonic()))
        return make(maker, closing, kept[-1])

    monkeypatch.setattr(RoundMaker, "make", timed)
    privacy = {"epsilon": 3.0, "delta": 1e-3, "noise": "discrete", "calibration": "renyi"}
    make_run(tmp_path / "run", small_experiment(training={"rounds": 2}, privacy=privacy))
    for timing in kept:
        (span,) = timing.spans
        before = sum(timing.segments[name] for name in ("close", "noise", "transfer"))
        assert before <= span.start_s + 1e-4
        assert span.start_s + span.seconds <= before + timing.segments["aggregate"] + 1e-4


def test_a_recorded_round_of_twenty_costs_little() -> None:
    """Not a benchmark: what is recorded for a client is a few small objects, and 21 bytes a span."""
    timing = RoundTiming(0, 0.0)
    for client_id in range(20):
        for name in ("download", "training", "upload"):
            timing.span(name, client_id, 1.0, 0.5, 104_040)
    assert len(pack(timing.spans)) == 21 * 60
    assert np.isclose(timing.spans[0].start_s, 1.0)

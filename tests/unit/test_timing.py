"""Segments partition a round; spans do not, and survive being written down."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.spans import NAMES, Span, pack, unpack
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
    assert unpack(pack(given_spans)) == given_spans


@pytest.mark.parametrize("damage", [b"\0", b"\xff" * 21])
def test_bytes_that_are_no_spans_are_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"no whole number|no name"):
        unpack(damage)


def test_who_does_the_same_again_and_again_in_a_round_is_recorded_once() -> None:
    timing = RoundTiming(0, 0.0)
    for number in range(1000):
        timing.span("download", 3, float(number), 0.5, 40)
    timing.span("download", 4, 1.0, 0.5, 40)
    assert timing.spans == (Span("download", 3, 999.0, 0.5, 40), Span("download", 4, 1.0, 0.5, 40))


def test_a_recorded_round_of_twenty_costs_little() -> None:
    """Not a benchmark: what is recorded for a client is a few small objects, and 21 bytes a span."""
    timing = RoundTiming(0, 0.0)
    for client_id in range(20):
        for name in ("download", "training", "upload"):
            timing.span(name, client_id, 1.0, 0.5, 104_040)
    assert len(pack(timing.spans)) == 21 * 60
    assert np.isclose(timing.spans[0].start_s, 1.0)

"""Frames against the stock protobuf runtime, and against peers that send anything at all."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.rpc.frames import MOST_FIELDS, Frame, Malformed, decode_frame, encode_frame
from common.rpc.v1 import parameter_server_pb2 as pb

STRICTER = {
    "wire type 3 does not exist here",  # a stock runtime skips groups it does not know
    "a number is longer than 64 bits",  # it drops the bits beyond
    f"more than {MOST_FIELDS} fields in one frame",  # it takes its time
}

uint64 = st.integers(0, 2**64 - 1)
callers = st.builds(
    pb.Caller, run_id=st.text(max_size=20), client_id=st.integers(0, 2**32 - 1), incarnation=st.binary(max_size=20)
)
headers = st.builds(
    pb.MomentumHeader,
    caller=st.none() | callers,
    round_id=uint64,
    schema_hash=st.binary(max_size=40),
    element_count=uint64,
)
trailers = st.builds(pb.Trailer, element_count=uint64, digest=st.binary(max_size=40))
messages = st.builds(
    pb.MomentumMessage,
    header=st.none() | headers,
    trailer=st.none() | trailers,
    offset=uint64,
    payload=st.binary(max_size=300),
)


def stock(data: bytes) -> pb.MomentumMessage | None:
    try:
        return pb.MomentumMessage.FromString(data)
    except DecodeError:
        return None


def assert_same(found: Frame[pb.MomentumHeader] | Malformed, message: pb.MomentumMessage) -> None:
    assert isinstance(found, Frame)
    assert found.header == (message.header if message.HasField("header") else None)
    assert found.trailer == (message.trailer if message.HasField("trailer") else None)
    assert found.offset == message.offset
    assert bytes(found.payload) == message.payload


@given(message=messages)
def test_what_a_stock_runtime_writes_is_read_to_equal_fields(message: pb.MomentumMessage) -> None:
    assert_same(decode_frame(message.SerializeToString(), pb.MomentumHeader), message)


@given(message=messages)
def test_what_is_written_here_is_read_by_a_stock_runtime_to_equal_fields(message: pb.MomentumMessage) -> None:
    data = encode_frame(
        header=message.header if message.HasField("header") else None,
        trailer=message.trailer if message.HasField("trailer") else None,
        offset=message.offset,
        payload=message.payload,
    )
    assert pb.MomentumMessage.FromString(data) == message
    assert len(data) == message.ByteSize()


@settings(max_examples=50)
@given(first=messages, second=messages)
def test_one_message_after_another_merges_as_in_a_stock_runtime(
    first: pb.MomentumMessage, second: pb.MomentumMessage
) -> None:
    data = first.SerializeToString() + second.SerializeToString()
    assert_same(decode_frame(data, pb.MomentumHeader), pb.MomentumMessage.FromString(data))


@given(data=st.binary(max_size=200))
@example(data=b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(data=b"\x0a" * 50)
def test_no_bytes_at_all_make_the_reader_raise(data: bytes) -> None:
    assert isinstance(decode_frame(data, pb.MomentumHeader), Frame | Malformed)


def test_a_frame_has_so_many_fields_and_no_more() -> None:
    """Half a million empty headers fit a message, and would take a second to read."""
    for field in (b"\x0a\x00", b"\x12\x00", b"\x18\x00", b"\x98\x01\x00"):
        assert isinstance(decode_frame(field * MOST_FIELDS, pb.MomentumHeader), Frame)
        found = decode_frame(field * 500_000, pb.MomentumHeader)
        assert isinstance(found, Malformed)
        assert str(MOST_FIELDS) in found.reason


@given(message=messages, edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_what_a_stock_runtime_still_reads_after_an_edit_is_read_alike(
    message: pb.MomentumMessage, edits: list[tuple[float, int]]
) -> None:
    data = bytearray(message.SerializeToString() or b"\0")
    for place, value in edits:
        data[int(place * (len(data) - 1))] = value
    found, expected = decode_frame(bytes(data), pb.MomentumHeader), stock(bytes(data))
    if expected is None:
        assert isinstance(found, Malformed)
    elif isinstance(found, Malformed):
        assert found.reason in STRICTER
    else:
        assert_same(found, expected)


@given(message=messages, kept=st.floats(0, 1))
def test_a_message_that_is_cut_off_is_read_as_a_stock_runtime_reads_it(
    message: pb.MomentumMessage, kept: float
) -> None:
    data = message.SerializeToString()
    data = data[: int(kept * len(data))]
    found, expected = decode_frame(data, pb.MomentumHeader), stock(data)
    if expected is None:
        assert isinstance(found, Malformed)
    else:
        assert_same(found, expected)

"""The hand-written frames are the protobuf encoding, both ways; and the generated code is the contract's."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from common.rpc import frames, methods
from common.rpc.digests import digest_of
from common.rpc.frames import Frame, Malformed, decode_frame, encode_frame, tensor_bytes, tensor_frames
from common.rpc.refusals import kind_name, refusal
from common.rpc.tensors import Incomplete, receive_tensor
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap

ROOT = Path(frames.__file__).resolve().parents[2]
GENERATED = ROOT / "common" / "rpc" / "v1"

HEADER = pb.MomentumHeader(
    caller=pb.Caller(run_id="a1b2", client_id=300, incarnation=b"\1" * 16),
    round_id=2**40,
    schema_hash=b"\xff" * 32,
    element_count=3,
)
TRAILER = pb.Trailer(element_count=3, digest=b"\2" * 16)


@pytest.mark.parametrize("header", [None, HEADER, pb.MomentumHeader()], ids=["none", "full", "empty"])
@pytest.mark.parametrize("trailer", [None, TRAILER], ids=["no_trailer", "trailer"])
@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**32, 2**64 - 1])
@pytest.mark.parametrize("payload", [b"", b"\0", b"x" * 127, b"x" * 128, b"x" * 20_000])
def test_a_frame_is_what_a_stock_runtime_writes_byte_for_byte(
    header: pb.MomentumHeader | None, trailer: pb.Trailer | None, offset: int, payload: bytes
) -> None:
    stock = pb.MomentumMessage(header=header, trailer=trailer, offset=offset, payload=payload)
    assert encode_frame(header=header, trailer=trailer, offset=offset, payload=payload) == stock.SerializeToString()


def test_the_payload_is_a_view_and_not_a_copy() -> None:
    data = encode_frame(header=HEADER, payload=b"x" * 1000)
    frame = decode_frame(data, pb.MomentumHeader)
    assert isinstance(frame, Frame)
    assert frame.payload.obj is data


def test_an_empty_message_is_an_empty_frame() -> None:
    assert decode_frame(b"", pb.MomentumHeader) == Frame(None, None, 0, memoryview(b""))


def _field(number: int, kind: int, content: bytes) -> bytes:
    return frames._varint(number << 3 | kind) + content


UNKNOWN = {
    "varint": _field(9, 0, b"\x96\x01"),
    "fixed64": _field(10, 1, b"\0" * 8),
    "bytes": _field(11, 2, b"\x03abc"),
    "fixed32": _field(12, 5, b"\0" * 4),
    "a_high_number": _field(2**28, 0, b"\1"),
    "the_header_as_a_number": _field(1, 0, b"\7"),
    "the_offset_as_bytes": _field(3, 2, b"\1x"),
    "the_payload_as_fixed32": _field(15, 5, b"\0" * 4),
}


@pytest.mark.parametrize("unknown", UNKNOWN)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_fields_of_later_versions_are_skipped(unknown: str, first: bool) -> None:
    known = encode_frame(header=HEADER, trailer=TRAILER, offset=7, payload=b"abcd")
    data = UNKNOWN[unknown] + known if first else known + UNKNOWN[unknown]
    frame = decode_frame(data, pb.MomentumHeader)
    assert isinstance(frame, Frame)
    assert (frame.header, frame.trailer, frame.offset, bytes(frame.payload)) == (HEADER, TRAILER, 7, b"abcd")
    stock = pb.MomentumMessage.FromString(data)
    assert (stock.header, stock.trailer, stock.offset, stock.payload) == (HEADER, TRAILER, 7, b"abcd")


def test_a_field_given_twice_counts_as_a_stock_runtime_counts_it() -> None:
    one = encode_frame(header=pb.MomentumHeader(round_id=1, element_count=5), trailer=TRAILER, offset=1, payload=b"a")
    two = encode_frame(
        header=pb.MomentumHeader(round_id=2), trailer=pb.Trailer(element_count=9), offset=2, payload=b"b"
    )
    assert _same(decode_frame(one + two, pb.MomentumHeader), pb.MomentumMessage.FromString(one + two))


BROKEN = {
    "a_number_cut_off": b"\x18\xff",
    "a_tag_cut_off": b"\xff",
    "a_number_beyond_64_bits": b"\x18" + b"\xff" * 10 + b"\1",
    "a_length_beyond_the_end": b"\x7a\x05abcd",
    "a_length_of_2_to_the_63": b"\x7a" + b"\x80" * 9 + b"\x01",
    "a_fixed64_cut_off": _field(10, 1, b"\0" * 7),
    "a_fixed32_cut_off": _field(12, 5, b"\0" * 3),
    "a_wire_type_that_does_not_exist": b"\x0e",
    "an_end_of_a_group_that_did_not_begin": b"\x0c",
    "a_header_that_is_none": b"\x0a\x01\xff",
    "a_run_id_that_is_not_utf_8": b"\x0a\x05\x0a\x03\x0a\x01\xff",
    "a_trailer_that_is_none": b"\x12\x02\x0a\x05",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_a_stock_runtime_cannot_read_is_malformed_and_says_why(broken: str) -> None:
    with pytest.raises(Exception, match=r"Error parsing"):
        pb.MomentumMessage.FromString(BROKEN[broken])
    found = decode_frame(BROKEN[broken], pb.MomentumHeader)
    assert isinstance(found, Malformed)
    assert found.reason


def test_a_frame_cut_anywhere_is_what_a_stock_runtime_makes_of_it() -> None:
    data = encode_frame(header=HEADER, trailer=TRAILER, offset=300, payload=b"x" * 300)
    for length in range(len(data)):
        assert _same(decode_frame(data[:length], pb.MomentumHeader), _stock(data[:length])), length


def _stock(data: bytes) -> pb.MomentumMessage | None:
    try:
        return pb.MomentumMessage.FromString(data)
    except Exception:
        return None


def _same(found: Frame[pb.MomentumHeader] | Malformed, stock: pb.MomentumMessage | None) -> bool:
    if isinstance(found, Malformed) or stock is None:
        return isinstance(found, Malformed) and stock is None
    return (
        found.header == (stock.header if stock.HasField("header") else None)
        and found.trailer == (stock.trailer if stock.HasField("trailer") else None)
        and found.offset == stock.offset
        and bytes(found.payload) == stock.payload
    )


# ---------------------------------------------------------------- whole tensors


@pytest.mark.parametrize("chunk_bytes", [4, 12, 39, 40, 41, 1 << 20])
def test_a_tensor_is_a_frame_a_chunk_with_the_header_in_the_first_and_the_trailer_in_the_last(chunk_bytes: int) -> None:
    tensor = np.arange(10, dtype=np.float32)
    stock = [pb.MomentumMessage.FromString(data) for data in tensor_frames(HEADER, tensor, chunk_bytes)]
    assert len(stock) == -(-40 // chunk_bytes)
    assert b"".join(message.payload for message in stock) == tensor.astype("<f4").tobytes()
    assert all(len(message.payload) <= chunk_bytes for message in stock)
    assert [message.HasField("header") for message in stock] == [True] + [False] * (len(stock) - 1)
    assert [message.HasField("trailer") for message in stock] == [False] * (len(stock) - 1) + [True]
    assert stock[-1].trailer == pb.Trailer(element_count=10, digest=digest_of(tensor.astype("<f4").tobytes()))
    sent = 0
    for message in stock:
        assert message.offset == sent
        sent += len(message.payload)


def test_a_tensor_that_is_no_contiguous_float32_travels_as_one() -> None:
    strided = np.arange(20, dtype=np.float64)[::2]
    assert bytes(tensor_bytes(strided)) == strided.astype("<f4").tobytes()


@pytest.mark.parametrize("chunk_bytes", [4, 12, 1 << 20])
async def test_a_received_tensor_is_the_one_that_was_sent(chunk_bytes: int) -> None:
    tensor = np.array([0.0, -0.0, np.nan, np.inf, 1e-45], dtype=np.float32)
    header = pb.MomentumHeader(element_count=5)
    found, received = await _receive(tensor_frames(header, tensor, chunk_bytes), 5)
    assert found == header
    assert received.tobytes() == tensor.tobytes()


def _bad_tensors() -> dict[str, list[bytes]]:
    header, tensor = pb.MomentumHeader(element_count=5), np.arange(5, dtype=np.float32)
    data = tensor_bytes(tensor)
    chunks = [encode_frame(offset=start, payload=data[start : start + 8]) for start in range(0, 20, 8)]
    end = encode_frame(trailer=pb.Trailer(element_count=5, digest=digest_of(data)))
    whole = [encode_frame(header=header), *chunks, end]  # each part apart, which is as good
    other = encode_frame(trailer=pb.Trailer(element_count=5, digest=bytes(16)))
    return {
        "nothing": [],
        "no header": whole[1:],
        "no trailer": whole[:-1],
        "a gap": [*whole[:2], *whole[3:]],
        "a repetition": [*whole[:2], *whole[1:]],
        "too much": [*whole[:-1], encode_frame(offset=20, payload=b"\0"), whole[-1]],
        "too little": [*whole[:-2], whole[-1]],
        "another digest": [*whole[:-1], other],
        "another count": [*whole[:-1], encode_frame(trailer=pb.Trailer(element_count=4))],
        "another size": list(tensor_frames(pb.MomentumHeader(element_count=6), np.zeros(6, dtype=np.float32), 8)),
        "garbage": [whole[0], b"\xff"],
    }


@pytest.mark.parametrize("bad", _bad_tensors())
async def test_a_tensor_that_is_not_whole_is_never_returned(bad: str) -> None:
    with pytest.raises(Incomplete):
        await _receive(_bad_tensors()[bad], 5)


async def _receive(encoded: object, expected: int) -> tuple[pb.MomentumHeader, np.ndarray]:
    async def stream():
        for data in encoded:
            yield decode_frame(data, pb.MomentumHeader)

    return await receive_tensor(stream(), expected, lambda header: header.element_count)


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("message", [pb.ModelMessage, pb.MomentumMessage, tap.TapMessage])
def test_every_message_that_carries_a_tensor_has_the_frames_fields(message: type[Message]) -> None:
    fields = {field.number: (field.name, field.type) for field in message.DESCRIPTOR.fields}
    assert fields == {
        1: ("header", FieldDescriptor.TYPE_MESSAGE),
        2: ("trailer", FieldDescriptor.TYPE_MESSAGE),
        3: ("offset", FieldDescriptor.TYPE_UINT64),
        15: ("payload", FieldDescriptor.TYPE_BYTES),
    }


@pytest.mark.parametrize("file", [pb.DESCRIPTOR, tap.DESCRIPTOR], ids=["parameter_server", "wiretap"])
def test_the_method_tables_are_the_contracts_services(file: object) -> None:
    for service in file.services_by_name.values():
        table = methods._TABLE[service.full_name]
        assert {method.name: (method.client_streaming, method.server_streaming) for method in service.methods} == {
            name: row[:2] for name, row in table.items()
        }


def test_every_refusal_has_a_name_and_a_number_that_stays() -> None:
    names = [kind_name(number) for number in pb.RefusalKind.values()]
    assert names == [
        *("refusal_unspecified", "protocol_version", "wrong_run", "unknown_client", "bad_token", "configuration"),
        *("wrong_schema", "not_a_member", "superseded", "stale_round", "future_round", "late", "equivocation"),
        *("too_large", "truncated", "checksum", "malformed", "run_is_over", "row_busy", "too_many_calls"),
        *("wrong_certificate", "revoked", "suspended"),
    ]
    assert pb.RefusalKind.values() == list(range(len(names)))
    assert kind_name(77) == "unknown_77"
    assert refusal(pb.LATE, "why", next_round=3) == pb.Refusal(kind=pb.LATE, message="why", next_round=3)


def test_the_generated_code_is_that_of_the_contract(tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    if not (shutil.which("protoc-gen-mypy", path=binaries) and importlib.util.find_spec("grpc_tools")):
        pytest.skip("needs grpcio-tools and mypy-protobuf: pip install 'byzuldp[dev]'")
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"),
        *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        f"--plugin=protoc-gen-mypy={binaries / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={binaries / 'protoc-gen-mypy_grpc'}",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.proto")),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "common" / "rpc" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2*")}
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"


def test_the_generated_code_imports_without_a_warning() -> None:
    modules = [f"common.rpc.v1.{path.stem}" for path in sorted(GENERATED.glob("*_pb2*.py"))]
    assert len(modules) == 4
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import " + ", ".join(modules)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_root_of_the_wire_imports_no_grpc() -> None:
    code = "import sys, common.rpc, common.rpc.addresses; sys.exit(any(m.startswith('grpc') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

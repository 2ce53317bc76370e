"""Messages that nobody should send: recipes drawn by hypothesis, cooked with what is true at the moment.

A recipe starts from a message that would be right now (the identity's token and incarnation, the open round), because
nonsense alone is refused at the door and reaches nothing behind it. Then some of its fields get hostile values, and its
bytes some hostile changes. Recipes are plain values: one that found something is printed, and can be sent again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from hypothesis import strategies as st

from common.rpc import PROTOCOL_VERSION
from common.rpc.digests import digest_of
from common.rpc.methods import PARAMETER_SERVER, WIRETAP
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap

Path = tuple[str, ...]


@dataclass
class Live:
    """What a message needs to be right, now."""

    run_id: str
    client_id: int
    token: str
    schema_hash: bytes
    fingerprint: str
    num_parameters: int
    incarnation: bytes = b""
    round_id: int = 0

    @property
    def caller(self) -> pb.Caller:
        return pb.Caller(run_id=self.run_id, client_id=self.client_id, incarnation=self.incarnation)

    @property
    def payload(self) -> bytes:
        return np.linspace(-1.0, 1.0, self.num_parameters, dtype="<f4").tobytes()

    @property
    def model(self) -> pb.Model:
        return pb.Model(
            round_id=self.round_id,
            element_count=self.num_parameters,
            schema_hash=self.schema_hash,
            ledger_head=sha256(b"head %d" % self.round_id).digest(),
        )

    @property
    def trailer(self) -> pb.Trailer:
        return pb.Trailer(element_count=self.num_parameters, digest=digest_of(self.payload))

    @property
    def header(self) -> pb.MomentumHeader:
        return pb.MomentumHeader(
            caller=self.caller,
            round_id=self.round_id,
            schema_hash=self.schema_hash,
            element_count=self.num_parameters,
        )


def _join(live: Live) -> pb.JoinRequest:
    return pb.JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        client_id=live.client_id,
        token=live.token,
        run_id=live.run_id,
        schema_hash=live.schema_hash,
        fingerprint=live.fingerprint,
        previous=live.incarnation,
    )


RIGHT: dict[str, Callable[[Live], Message]] = {
    "join": _join,
    "attending": lambda live: pb.AttendRequest(attending=pb.Attending(callers=[live.caller])),
    "heartbeat": lambda _live: pb.AttendRequest(heartbeat=pb.Heartbeat()),
    "error": lambda live: pb.AttendRequest(
        error=pb.ClientError(client_id=live.client_id, round_id=live.round_id, kind="ValueError", message="none")
    ),
    "pull": lambda live: pb.PullModelRequest(caller=live.caller, round_id=live.round_id, wait_s=0.1),
    "momentum": lambda live: pb.MomentumMessage(header=live.header, payload=live.payload, trailer=live.trailer),
    "header": lambda live: pb.MomentumMessage(header=live.header),
    "first half": lambda live: pb.MomentumMessage(payload=live.payload[: len(live.payload) // 2]),
    "second half": lambda live: pb.MomentumMessage(
        offset=len(live.payload) // 2, payload=live.payload[len(live.payload) // 2 :]
    ),
    "trailer": lambda live: pb.MomentumMessage(trailer=live.trailer),
    "leave": lambda live: pb.LeaveRequest(caller=live.caller),
    "check": lambda _live: health_pb2.HealthCheckRequest(service=PARAMETER_SERVER),
    "tap": lambda live: tap.TapRequest(caller=live.caller, round_id=live.round_id, wait_s=0.1),
}
"""A right request of every kind, but for what is not true (any more)."""

_REFUSAL = pb.Refusal(kind=pb.NOT_A_MEMBER, message="join first", next_round=1)
_END = pb.RunFinished(status="completed", message="the run is complete")
RIGHT_ANSWERS: dict[str, Callable[[Live], Message]] = {
    "joined": lambda live: pb.JoinReply(
        joined=pb.Joined(
            run_id=live.run_id,
            incarnation=live.incarnation,
            next_round=live.round_id,
            heartbeat_s=0.2,
            chunk_bytes=16_384,
            noise_multiplier=1.0,
            rounds=100,
            liveness_s=1.0,
        ),
        public_configuration="{}",
    ),
    "not joined": lambda _live: pb.JoinReply(
        refusal=pb.Refusal(kind=pb.CONFIGURATION, message="another"), public_configuration='{"training.seed": 5}'
    ),
    "over": lambda _live: pb.JoinReply(refusal=pb.Refusal(kind=pb.RUN_IS_OVER), run_finished=_END),
    "evicted": lambda live: pb.AttendEvent(evicted=pb.Evicted(client_id=live.client_id + 1)),
    "finished": lambda _live: pb.AttendEvent(run_finished=_END),
    "event refusal": lambda _live: pb.AttendEvent(refusal=_REFUSAL),
    "beat": lambda _live: pb.AttendEvent(heartbeat=pb.Heartbeat()),
    "model": lambda live: pb.ModelMessage(
        header=pb.ModelHeader(model=live.model), payload=live.payload, trailer=live.trailer
    ),
    "model header": lambda live: pb.ModelMessage(header=pb.ModelHeader(model=live.model)),
    "model payload": lambda live: pb.ModelMessage(payload=live.payload),
    "model trailer": lambda live: pb.ModelMessage(trailer=live.trailer),
    "not yet": lambda live: pb.ModelMessage(
        header=pb.ModelHeader(not_yet=pb.NotYet(round_id=live.round_id, waiting_for="the others"))
    ),
    "model finished": lambda _live: pb.ModelMessage(header=pb.ModelHeader(run_finished=_END)),
    "model refusal": lambda _live: pb.ModelMessage(header=pb.ModelHeader(refusal=_REFUSAL)),
    "accepted": lambda _live: pb.PushReply(accepted=pb.Accepted()),
    "push refusal": lambda live: pb.PushReply(
        refusal=pb.Refusal(kind=pb.STALE_ROUND, message="over", next_round=live.round_id + 1)
    ),
    "left": lambda _live: pb.LeaveReply(),
}
"""A right answer of every kind, for the fuzzing of clients."""
_ALL = RIGHT | RIGHT_ANSWERS


class Method(NamedTuple):
    """One RPC: where it is, what is sent, and the type of its answers."""

    path: str
    usual: tuple[tuple[str, ...], ...]
    reply: type[Message]


METHODS: dict[str, Method] = {
    "Join": Method(f"/{PARAMETER_SERVER}/Join", (("join",),), pb.JoinReply),
    "Attend": Method(
        f"/{PARAMETER_SERVER}/Attend",
        (("attending",), ("attending", "heartbeat"), ("attending", "error", "heartbeat")),
        pb.AttendEvent,
    ),
    "PullModel": Method(f"/{PARAMETER_SERVER}/PullModel", (("pull",),), pb.ModelMessage),
    "PushMomentum": Method(
        f"/{PARAMETER_SERVER}/PushMomentum",
        (("momentum",), ("header", "first half", "second half", "trailer"), ("header", "second half"), ("header",)),
        pb.PushReply,
    ),
    "Leave": Method(f"/{PARAMETER_SERVER}/Leave", (("leave",),), pb.LeaveReply),
    "Tap": Method(f"/{WIRETAP}/Tap", (("tap",),), tap.TapMessage),
    "Check": Method("/grpc.health.v1.Health/Check", (("check",),), health_pb2.HealthCheckResponse),
}


def refusal_in(reply: Message) -> pb.Refusal | None:
    """The refusal that an answer holds."""
    holder = getattr(reply, "header", reply)
    if "refusal" in holder.DESCRIPTOR.fields_by_name and holder.HasField("refusal"):
        found: pb.Refusal = holder.refusal
        return found
    return None


# ---------------------------------------------------------------- hostile values of fields


class Long(str):
    """A text of one character, so often; its repr is short, since recipes are printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self[0]!r} * {len(self)}"


class LongBytes(bytes):
    """The same in bytes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self[:1]!r} * {len(self)}"


NUMBERS = (0, 1, 2, 3, 5, 9, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
DOUBLES = (0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 5e-324, 1e-300, 0.2, 1e9, 1.7e308)
TEXTS = (
    "", "\0", "-1", Long("x" * 300), Long("y" * 70_000), "\x1b[2J\u202e\r\n", "é" * 40, "\U0001f600", "%s%n{}",
)  # fmt: skip
BLOBS = (b"", b"\0", bytes(15), bytes(16), bytes(17), bytes(32), b"\xff" * 40, b"\xc3\x28", LongBytes(b"\x7a" * 70_000))

_HIGHEST = {FieldDescriptor.TYPE_UINT32: 2**32, FieldDescriptor.TYPE_UINT64: 2**64}


class Edit(NamedTuple):
    """One field of a message, and what it is to be: a value, nothing (None), or so many copies of it."""

    path: Path
    value: Any
    copies: int = 0


def _fields(kind: Descriptor, before: Path = ()) -> Iterator[tuple[Path, FieldDescriptor]]:
    for field in kind.fields:
        yield (*before, field.name), field
        if field.message_type is not None and not field.is_repeated:
            yield from _fields(field.message_type, (*before, field.name))


def _values(path: Path, field: FieldDescriptor) -> st.SearchStrategy[Edit]:
    if field.is_repeated:
        return st.sampled_from([0, 2, 5, 6, 2_000]).map(lambda copies: Edit(path, None, copies))
    if field.message_type is not None:
        return st.sampled_from([None, True]).map(lambda value: Edit(path, value))
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE:
            values: st.SearchStrategy[Any] = st.sampled_from(DOUBLES) | st.floats()
        case FieldDescriptor.TYPE_STRING:
            values = st.sampled_from(TEXTS) | st.text(max_size=12)
        case FieldDescriptor.TYPE_BYTES:
            values = st.sampled_from(BLOBS) | st.binary(max_size=40)
        case FieldDescriptor.TYPE_BOOL:
            values = st.booleans()
        case FieldDescriptor.TYPE_ENUM:  # an open one: any number will do
            values = st.sampled_from([-(2**31), -1, 0, 8, 17, 99, 2**31 - 1])
        case _:
            highest = _HIGHEST[field.type]
            values = st.sampled_from([n for n in NUMBERS if n < highest]) | st.integers(0, highest - 1)
    return values.map(lambda value: Edit(path, value))


def edits_of(kind: Descriptor) -> st.SearchStrategy[Edit]:
    """A hostile value of any field of a message, at any depth. Setting one member of a oneof clears the others."""
    found = list(_fields(kind))
    if not found:
        return st.nothing()
    return st.sampled_from(range(len(found))).flatmap(lambda number: _values(*found[number]))


def edit(message: Message, change: Edit) -> None:
    """Carry out one edit."""
    *outer, name = change.path
    for part in outer:
        message = getattr(message, part)
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        held = getattr(message, name)
        first = held[0] if held else field.message_type._concrete_class()
        copied = [first] * change.copies
        message.ClearField(name)
        held.extend(copied)
    elif field.message_type is None:
        setattr(message, name, change.value)
    elif change.value is None:
        message.ClearField(name)
    else:
        getattr(message, name).SetInParent()


# ---------------------------------------------------------------- hostile bytes


class Change(NamedTuple):
    """One change of a message's bytes: what, where (0 to 1), and with what."""

    what: str
    where: float = 0.0
    number: int = 0
    data: bytes = b""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _lengths(data: bytes) -> list[tuple[int, int, int]]:
    """Of each top-level field with a length: where its length is, where its content begins, and the length."""
    found, position = [], 0
    while position < len(data):
        tag, position = _number(data, position)
        start = position
        value, position = _number(data, position) if tag & 7 in (0, 2) else (0, position + {1: 8, 5: 4}.get(tag & 7, 1))
        if tag & 7 == 2:
            found.append((start, position, value))
            position += value
    return found


def _number(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    return value, position


def change(data: bytes, how: Change) -> bytes:
    """Carry out one change."""
    at = int(how.where * len(data))
    match how.what:
        case "flip" if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes((data[at] ^ 1 << how.number % 8,)) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "drop":
            return data[:at] + data[at + how.number :]
        case "insert":
            return data[:at] + how.data + data[at:]
        case "twice":
            return data + data
        case "lie" if lengths := _lengths(data):
            start, end, length = lengths[int(how.where * (len(lengths) - 1))]
            said = (length + how.number) % 2**64 if abs(how.number) < 100 else how.number % 2**64
            return data[:start] + varint(said) + data[end:]
        case "unknown":
            fields = {0: varint(how.number), 1: bytes(8), 2: varint(len(how.data)) + how.data, 5: bytes(4)}
            kind = how.number % 8
            return data + varint((16 + how.number % 2**20) << 3 | kind) + fields.get(kind, b"")
        case "group":
            return data + b"\xa3\x01" * how.number + b"\xa4\x01" * (how.number if how.where < 0.7 else 0)
        case "nest":
            inner = b""
            for _ in range(how.number % 200):
                inner = b"\x0a" + varint(len(inner)) + inner
            return data + inner
        case "junk":
            return data + (how.data[:3] or b"\x98\x01\x00") * (how.number % 20_000)
    return data


_NOWHERE, _ZERO, _NOTHING = st.just(0.0), st.just(0), st.just(b"")


def _change(
    what: str,
    where: st.SearchStrategy[float] = _NOWHERE,
    number: st.SearchStrategy[int] = _ZERO,
    data: st.SearchStrategy[bytes] = _NOTHING,
) -> st.SearchStrategy[Change]:
    return st.tuples(where, number, data).map(lambda values: Change(what, *values))


_where = st.sampled_from(range(101)).map(lambda percent: percent / 100)
changes: st.SearchStrategy[Change] = st.one_of(
    _change("flip", _where, st.integers(0, 7)),
    _change("cut", _where),
    _change("drop", _where, st.integers(1, 20)),
    _change("insert", _where, data=st.binary(min_size=1, max_size=20)),
    _change("twice"),
    _change("lie", _where, st.sampled_from([-5, -1, 1, 2, 40, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
    _change("unknown", _NOWHERE, st.integers(0, 2**64 - 1), st.binary(max_size=20)),
    _change("group", _where, st.sampled_from([1, 3, 99, 101, 5_000])),
    _change("nest", _NOWHERE, st.sampled_from([1, 99, 101, 199])),
    _change("junk", _NOWHERE, st.sampled_from([10, 63, 64, 65, 19_999]), st.binary(max_size=3)),
)


# ---------------------------------------------------------------- whole calls


class Part(NamedTuple):
    """One message of a call."""

    kind: str
    edits: tuple[Edit, ...] = ()
    changes: tuple[Change, ...] = ()

    def bytes(self, live: Live) -> bytes:
        message = _ALL[self.kind](live)
        for one in self.edits:
            edit(message, one)
        data = message.SerializeToString()
        for other in self.changes:
            data = change(data, other)
        return data


class Call(NamedTuple):
    """One call: its method, its messages, and how it ends. The last of the metadata is for its size alone."""

    method: str
    parts: tuple[Part, ...]
    ending: str = "half-close"
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    compressed: bool = False


WEIGHTED = (*METHODS, "Attend", "Attend", "PullModel", *("PushMomentum",) * 4, "Tap")
"""Methods, as often as there is something behind them."""
ENDINGS = ("half-close",) * 6 + ("hang", "cancel", "cancel after the answer")
DEMANDING = (("note", Long("x" * 5_000)), ("note", Long("x" * 20_000)), ("note-bin", bytes(range(256))))


def parts_of(kind: str) -> st.SearchStrategy[Part]:
    """A message of a kind, made wrong in none, one or several ways."""
    edits = st.lists(edits_of(_DESCRIPTORS[kind]), max_size=3).map(tuple)
    return st.tuples(edits, st.lists(changes, max_size=2).map(tuple)).map(lambda wrong: Part(kind, *wrong))


def wrong_once(kind: str) -> st.SearchStrategy[Part]:
    """A message of a kind that is wrong in one way."""
    by_field = edits_of(_DESCRIPTORS[kind]).map(lambda one: Part(kind, (one,)))
    return st.one_of(by_field, by_field, changes.map(lambda one: Part(kind, (), (one,))))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of any method: mostly the messages it is for, now and then those of another."""
    method = draw(st.sampled_from(WEIGHTED))
    kinds = draw(
        st.sampled_from(METHODS[method].usual) | st.lists(st.sampled_from(list(RIGHT)), max_size=5).map(tuple)
        if draw(st.integers(0, 4)) == 0
        else st.sampled_from(METHODS[method].usual)
    )
    wrong = draw(st.sampled_from(["nothing", "one thing", "one thing", "anything"]))
    at = draw(st.integers(0, max(len(kinds) - 1, 0)))
    parts = tuple(
        draw(parts_of(kind))
        if wrong == "anything"
        else draw(wrong_once(kind))
        if wrong == "one thing" and number == at
        else Part(kind)
        for number, kind in enumerate(kinds)
    )
    metadata = (draw(st.sampled_from(DEMANDING)),) if draw(st.integers(0, 9)) == 0 else ()
    return Call(method, parts, draw(st.sampled_from(ENDINGS)), metadata, draw(st.integers(0, 9)) == 0)


_NOBODY = Live("", 0, "", b"", "", 1)
_DESCRIPTORS = {kind: right(_NOBODY).DESCRIPTOR for kind, right in _ALL.items()}


def framed(data: bytes, *, compressed: int = 0, lie: int = 0) -> bytes:
    """A message as gRPC frames it in HTTP/2's DATA; ``lie`` is added to its length."""
    return bytes((compressed,)) + struct.pack(">I", (len(data) + lie) % 2**32) + data


def shown(batch: Sequence[object]) -> str:
    """Recipes, one a line."""
    return "\n".join(f"  {recipe!r}" for recipe in batch)

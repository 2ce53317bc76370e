"""What the misbehaviours put on the wire, message by message. What a server makes of it is tested between processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from federations import small_experiment

from adversary.misbehaviour import Ground, Misbehaviour, make_misbehaviours
from client.push import Push, Reply
from common.errors import AttackError
from common.rpc.digests import digest_of
from common.rpc.frames import Frame, Malformed, decode_frame, tensor_bytes
from common.rpc.v1 import parameter_server_pb2 as pb

D, CHUNK = 1000, 1024
MOMENTUM = np.random.default_rng(1).normal(size=D).astype(np.float32)
BYTES = bytes(tensor_bytes(MOMENTUM))
GROUND = Ground(
    address="127.0.0.1:1",
    experiment=small_experiment(federation={"clients": 8, "byzantine": 2}, network={"grace_floor_s": 0.01}),
    tokens={6: "", 7: ""},
    schema_hash=b"schema",
    num_parameters=D,
    callers=dict,
    channel=lambda _: pytest.fail("opened a connection"),
)

Message = Frame[pb.MomentumHeader]


def made(name: str, **parameters: Any) -> Misbehaviour:
    return make_misbehaviours([name], parameters)[name].build(GROUND)


@dataclass
class Listener:
    """A server that takes so many messages of each call, and answers each call the same."""

    reply: pb.PushReply = field(default_factory=lambda: pb.PushReply(accepted=pb.Accepted()))
    most: int = 1000
    calls: list[list[Message]] = field(default_factory=list)

    async def PushMomentum(self, messages: AsyncIterator[bytes], timeout: float) -> Reply:  # noqa: N802, ASYNC109, ARG002
        heard: list[Message] = []
        self.calls.append(heard)
        async for data in messages:
            frame = decode_frame(data, pb.MomentumHeader)
            assert not isinstance(frame, Malformed), frame
            heard.append(frame)
            if len(heard) == self.most:
                break
        return self.reply


def push(stub: Any, *, client_id: int = 6, round_id: int = 4, momentum: np.ndarray = MOMENTUM) -> Push:
    caller = pb.Caller(run_id="run", client_id=client_id, incarnation=bytes([client_id]))
    return Push(caller, round_id, momentum, b"schema", CHUNK, 5.0, stub)


async def broken(name: str, **parameters: Any) -> list[Message]:
    """The messages of the call that is to be refused; a right one must follow it."""
    listener = Listener()
    await made(name, **parameters).deliver(push(listener))
    first, second = listener.calls
    assert (announced(second), payload(second), ends(second)) == (D, BYTES, (D, True))
    return first


def announced(messages: list[Message]) -> int:
    assert messages[0].header is not None
    assert not any(message.header for message in messages[1:])
    return messages[0].header.element_count


def payload(messages: list[Message]) -> bytes:
    return b"".join(message.payload for message in messages)


def ends(messages: list[Message]) -> tuple[int, bool]:
    """The count in the last message, and whether its digest is that of what was sent."""
    trailer = messages[-1].trailer
    assert trailer is not None
    return trailer.element_count, trailer.digest == digest_of(payload(messages))


def in_order(messages: list[Message]) -> bool:
    position = 0
    for message in messages:
        if len(message.payload):
            if message.offset != position:
                return False
            position += len(message.payload)
    return True


@pytest.mark.parametrize(
    ("where", "by", "header", "sent", "trailer"),
    [
        ("header", -1, D - 1, D, D),
        ("header", 1, D + 1, D, D),
        ("trailer", -1, D, D, D - 1),
        ("payload", -1, D, D - 1, D),
        ("payload", 3, D, D + 3, D),
    ],
)
async def test_a_count_is_wrong_in_one_place(where: str, by: int, header: int, sent: int, trailer: int) -> None:
    messages = await broken("wrong_count", where=where, by=by)
    assert (announced(messages), len(payload(messages)), ends(messages)) == (header, 4 * sent, (trailer, True))
    assert in_order(messages)


async def test_a_wrong_digest_is_all_that_is_wrong() -> None:
    messages = await broken("wrong_digest")
    assert (announced(messages), payload(messages), ends(messages)) == (D, BYTES, (D, False))
    assert in_order(messages)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float16", 2)])
async def test_another_dtype_says_so_nowhere(dtype: str, size: int) -> None:
    messages = await broken("wrong_dtype", dtype=dtype)
    assert (announced(messages), len(payload(messages)), ends(messages)) == (D, size * D, (D, True))
    np.testing.assert_array_equal(np.frombuffer(payload(messages), dtype), MOMENTUM.astype(dtype))


async def test_another_schema_comes_with_as_many_elements() -> None:
    messages = await broken("wrong_schema")
    assert messages[0].header is not None
    assert messages[0].header.schema_hash != b"schema"
    assert (announced(messages), payload(messages), ends(messages)) == (D, BYTES, (D, True))


@pytest.mark.parametrize("order", ["reversed", "swapped"])
async def test_shuffled_chunks_are_all_there_with_their_right_offsets(order: str) -> None:
    messages = await broken("shuffled_chunks", order=order)
    assert not in_order(messages)
    whole = bytearray(len(BYTES))
    for message in messages[1:-1]:
        whole[message.offset : message.offset + len(message.payload)] = message.payload
    assert bytes(whole) == BYTES
    assert ends(messages)[0] == D


async def test_overlapping_chunks_hold_the_right_bytes_some_of_them_twice() -> None:
    messages = await broken("overlapping_chunks", by=7)
    chunks = messages[1:-1]
    assert all(BYTES[chunk.offset :][: len(chunk.payload)] == chunk.payload for chunk in chunks)
    assert sum(len(chunk.payload) for chunk in chunks) == len(BYTES) + 7 * (len(chunks) - 1)


async def test_a_push_for_the_future_names_a_later_round_and_is_right_otherwise() -> None:
    messages = await broken("future_round", ahead=3)
    assert messages[0].header is not None
    assert (messages[0].header.round_id, payload(messages), ends(messages)) == (7, BYTES, (D, True))


async def test_a_replay_of_itself_is_its_first_momentum_byte_for_byte() -> None:
    listener, replay = Listener(), made("replay")
    for round_id in (4, 5, 6):
        await replay.deliver(push(listener, round_id=round_id, momentum=MOMENTUM * round_id))
    first, second, again, third, and_again = listener.calls
    assert again == and_again == first
    assert [messages[0].header.round_id for messages in (first, second, third)] == [4, 5, 6]  # type: ignore[union-attr]


async def test_a_replay_of_another_is_a_colluders_bytes_and_ones_own_under_an_honest_name() -> None:
    listener, replay = Listener(), made("replay", of="another")
    await replay.deliver(push(listener, client_id=7, momentum=-MOMENTUM))
    listener.calls.clear()
    await replay.deliver(push(listener))
    callers = [messages[0].header.caller for messages in listener.calls]  # type: ignore[union-attr]
    assert [(caller.client_id, caller.incarnation) for caller in callers] == [(6, b"\6"), (7, b"\7"), (0, b"\6")]
    assert [payload(messages) == BYTES for messages in listener.calls] == [True, False, True]


@pytest.mark.parametrize(("order", "first"), [("attack_first", 1), ("attack_last", -1), ("at_once", 1)])
async def test_an_equivocation_is_a_momentum_and_its_negative(order: str, first: int) -> None:
    listener = Listener()
    await made("equivocation", order=order).deliver(push(listener))
    sent = [payload(messages) for messages in listener.calls]
    assert sent == [bytes(tensor_bytes(sign * MOMENTUM)) for sign in (first, -first)]


async def test_a_terabyte_is_announced_and_what_is_to_be_sent_of_it_is_sent_whatever_the_answer_is() -> None:
    refusal = pb.PushReply(refusal=pb.Refusal(kind=pb.TOO_LARGE))
    listener, oversize = Listener(refusal, most=4), made("oversize", megabytes=0.1, then_answer=False)
    assert isinstance(oversize, Misbehaviour)
    beside = asyncio.create_task(oversize.beside())
    await oversize.deliver(push(listener))
    async with asyncio.timeout(5.0):
        while sum(len(payload(messages)) for messages in listener.calls) < 100_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    beside.cancel()
    assert {announced(messages) for messages in listener.calls} == {10**12 // 4}
    assert len(listener.calls) > 20


@pytest.mark.parametrize(("of", "each"), [("nothing", (0, False)), ("headers", (0, True)), ("zeros", (64, False))])
async def test_what_never_ends_goes_on_in_small_messages(of: str, each: tuple[int, bool]) -> None:
    listener, endless = Listener(most=5000), made("endless", of=of)
    await endless.deliver(push(listener))
    async with asyncio.timeout(5.0):
        while not listener.calls or len(listener.calls[0]) < 5000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert {(len(message.payload), message.header is not None) for message in listener.calls[0][1:]} == {each}
    assert not any(message.trailer for message in listener.calls[0])
    if of == "zeros":
        assert in_order(listener.calls[0])
        assert len(payload(listener.calls[0])) > len(BYTES)


async def test_a_slow_loris_sends_single_bytes_of_the_momentum_at_its_pace() -> None:
    listener, loris = Listener(most=4), made("slow_loris", bytes_per_s=50.0)
    before = asyncio.get_running_loop().time()
    await loris.deliver(push(listener))
    async with asyncio.timeout(5.0):
        while not listener.calls or len(listener.calls[0]) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - before >= 3 * 5 / 50.0
    assert [bytes(message.payload) for message in listener.calls[0][1:]] == [BYTES[:5], BYTES[5:10], BYTES[10:15]]


@pytest.mark.parametrize(
    ("name", "parameters", "why"),
    [
        ("crash", {"at_round": -1}, "at_round"),
        ("slow_loris", {"bytes_per_s": 0}, "bytes_per_s"),
        ("eleventh_hour", {"seconds_before": -0.1}, "seconds_before"),
        ("late", {"seconds_after": "soon"}, "seconds_after"),
        ("equivocation", {"order": "never"}, "order"),
        ("replay", {"of": "nobody"}, "of"),
        ("future_round", {"ahead": 0}, "ahead"),
        ("wrong_count", {"by": 0}, "by"),
        ("wrong_count", {"by": D + 1}, "by"),
        ("wrong_count", {"where": "nowhere"}, "where"),
        ("wrong_dtype", {"dtype": "float32"}, "dtype"),
        ("wrong_digest", {"then_answer": "yes"}, "then_answer"),
        ("shuffled_chunks", {"order": "sorted"}, "order"),
        ("overlapping_chunks", {"by": 0}, "by"),
        ("oversize", {"megabytes": 0}, "megabytes"),
        ("endless", {"of": "time"}, "of"),
        ("endless", {"frames_per_s": -1}, "frames_per_s"),
        ("wrong_digest", {"order": "reversed"}, "order"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_its_name(name: str, parameters: dict[str, Any], why: str) -> None:
    with pytest.raises(AttackError, match=rf"{name}.*\b{why}\b"):
        made(name, **parameters)

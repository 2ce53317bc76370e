"""The methods of the protocol with their (de)serialisers, for both ends of the wire.

Used in place of the generated stubs because the tensor messages have serialisers of their own (see
:mod:`common.rpc.frames`); paths and message types are taken from the generated descriptors, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from common.rpc.frames import Frame, Malformed, Oversized, decode_frame
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap

__all__ = ["PARAMETER_SERVER", "WIRETAP", "ParameterServerStub", "WiretapStub", "handlers", "reader"]

M = TypeVar("M", bound=Message)

MISUSE = "grpc_call_start_batch"
"""In what gRPC says of an operation that it refuses, as against one that fails."""

PARAMETER_SERVER: str = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name
WIRETAP: str = tap.DESCRIPTOR.services_by_name["Wiretap"].full_name


def _as_is(data: bytes) -> bytes:
    return data


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


def reader(kind: type[M]) -> Callable[[bytes], M | Malformed]:
    """A deserialiser that returns what is wrong instead of raising: the handler answers with a refusal."""

    def read(data: bytes) -> M | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError as problem:
            return Malformed(str(problem) or f"no {kind.DESCRIPTOR.name}")

    return read


def _frames(header: type[M]) -> Callable[[bytes], Frame[M] | Malformed]:
    def read(data: bytes) -> Frame[M] | Malformed:
        return decode_frame(data, header)

    return read


# name: (client streams, server streams, request reader, reply writer, request writer, reply reader)
_TABLE: dict[str, dict[str, tuple[bool, bool, Any, Any, Any, Any]]] = {
    PARAMETER_SERVER: {
        "Join": (False, False, reader(pb.JoinRequest), _encode, _encode, reader(pb.JoinReply)),
        "Attend": (True, True, reader(pb.AttendRequest), _encode, _encode, reader(pb.AttendEvent)),
        "PullModel": (False, True, reader(pb.PullModelRequest), _as_is, _encode, _frames(pb.ModelHeader)),
        "PushMomentum": (True, False, _frames(pb.MomentumHeader), _encode, _as_is, reader(pb.PushReply)),
        "Leave": (False, False, reader(pb.LeaveRequest), _encode, _encode, reader(pb.LeaveReply)),
    },
    WIRETAP: {
        "Tap": (False, True, reader(tap.TapRequest), _as_is, _encode, _frames(tap.TapHeader)),
    },
}


def handlers(service: str, servicer: object, message_bytes: int) -> grpc.GenericRpcHandler:
    """The handlers of a service: ``servicer`` has one coroutine method per RPC, by the RPC's name.

    All of them are given their requests as a stream (:class:`Requests`), also where there is one only (on the wire that
    is the same): gRPC would wait for a single request without end, before the method hears of the call.

    Parameters
    ----------
    message_bytes
        A larger request is read as :class:`common.rpc.frames.Oversized`.
    """
    kinds: dict[bool, Any] = {
        False: grpc.stream_unary_rpc_method_handler,
        True: grpc.stream_stream_rpc_method_handler,
    }
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: kinds[down](
                _reading(getattr(servicer, name)),
                request_deserializer=_bounded(read, message_bytes),
                response_serializer=write,
            )
            for name, (_, down, read, write, _, _) in _TABLE[service].items()
        },
    )


class Requests:
    """A call's requests, one after the other.

    gRPC's own iterator is a generator: one that is not read to its end, as after a single request, costs the event loop
    a task and two system calls when it is collected.
    """

    __slots__ = ("_read",)

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._read = context.read

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        message = await self._read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


def _reading(method: Callable[[Requests, Any], Awaitable[Any]]) -> Callable[[object, Any], Awaitable[Any]]:
    async def handler(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(Requests(context), context)
        except grpc.aio.InternalError as problem:
            if MISUSE in str(problem):
                raise
            raise asyncio.CancelledError from None  # a message could not be sent: the peer is gone

    return handler


def _bounded(read: Callable[[bytes], Any], message_bytes: int) -> Callable[[bytes], Any]:
    def bounded(data: bytes) -> Any:
        if len(data) > message_bytes:
            return Oversized(f"a message of {len(data)} bytes, at most {message_bytes} are taken; send smaller chunks")
        return read(data)

    return bounded


class _Stub:
    service: str

    def __init__(self, channel: grpc.aio.Channel) -> None:
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        for name, (up, down, _, _, write, read) in _TABLE[self.service].items():
            call = kinds[up, down](f"/{self.service}/{name}", request_serializer=write, response_deserializer=read)
            setattr(self, name, call)


class ParameterServerStub(_Stub):
    """Calls to a parameter server over a ``grpc.aio`` channel; every call needs a ``timeout``."""

    service = PARAMETER_SERVER
    Join: Any
    Attend: Any
    PullModel: Any
    PushMomentum: Any
    Leave: Any


class WiretapStub(_Stub):
    """Calls to a wiretap."""

    service = WIRETAP
    Tap: Any

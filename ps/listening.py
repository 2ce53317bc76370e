"""Binding addresses and starting gRPC servers on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from common.errors import AddressUnavailable
from common.rpc.addresses import Address
from common.rpc.methods import reader
from common.rpc.refusals import Refused
from ps.streams import Streams

__all__ = ["Credentials", "Health", "bind", "refuse_unbindable"]


Credentials = Callable[[], grpc.ServerCredentials]
"""Makes a port's credentials: those that follow their files serve one port only."""


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """gRPC's health service without ``Watch``, whose streams would live, and hold a slot, for ever.

    Parameters
    ----------
    streams
        How many calls may be open; those to this service stay strangers.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def handler(self) -> grpc.GenericRpcHandler:
        check = grpc.stream_unary_rpc_method_handler(
            self._check,
            request_deserializer=reader(health_pb2.HealthCheckRequest),
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})

    async def _check(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with self._streams.opened(context) as stream:
            try:
                request = await stream.first(requests)
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused.message)
            return await self.Check(request, context)


def refuse_unbindable(address: Address) -> None:
    """Before there is a run folder: can the address be bound?

    Raises
    ------
    AddressUnavailable
        It is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as problem:
            raise _unavailable(address, problem.strerror or str(problem)) from None


def _unavailable(address: Address, why: str) -> AddressUnavailable:
    return AddressUnavailable(
        f"{address} cannot be bound: {why}. Choose another network.address; port 0 lets the system choose"
    )


def bind(
    address: Address,
    services: Sequence[grpc.GenericRpcHandler],
    options: Sequence[tuple[str, int]],
    max_rpcs: int,
    credentials: Credentials | None = None,
) -> tuple[grpc.aio.Server, int]:
    """A server with services at an address, and its port. Without credentials nothing is encrypted.

    Raises
    ------
    AddressUnavailable
        It cannot be bound.
    """
    server = grpc.aio.server(options=list(options), maximum_concurrent_rpcs=max_rpcs)
    server.add_generic_rpc_handlers(tuple(services))
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise _unavailable(address, "it is in use, or not an address of this machine")
    return server, port


def bind_again(
    folder: Path,
    host: str,
    service: grpc.GenericRpcHandler,
    options: Sequence[tuple[str, int]],
    max_rpcs: int,
    credentials: Credentials | None,
) -> tuple[grpc.aio.Server, int]:
    """As :func:`bind`, for a service whose port nobody chose: the one it had in the run's earlier life, if it is free.

    Those who were told it then find it again.

    Raises
    ------
    AddressUnavailable
        No port can be bound.
    """
    file = folder / "operator" / "wiretap_port"
    had = int(text) if (text := file.read_text("ascii").strip() if file.exists() else "").isdecimal() else 0
    try:
        found = bind(Address(host, had), (service,), options, max_rpcs, credentials)
    except AddressUnavailable:
        found = bind(Address(host, 0), (service,), options, max_rpcs, credentials)
    with contextlib.suppress(OSError):
        file.write_text(f"{found[1]}\n", "ascii")
    return found

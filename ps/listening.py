"""Binding addresses and starting gRPC servers on them."""

from __future__ import annotations

import socket

import grpc
from grpc_health.v1 import health

from common.errors import AddressUnavailable
from common.rpc.addresses import Address
from common.rpc.options import server_options

__all__ = ["Health", "bind", "refuse_unbindable"]


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """gRPC's health service without ``Watch``, whose streams would live, and hold a slot, for ever."""

    async def Watch(self, request: object, context: grpc.aio.ServicerContext[object, object]) -> None:  # noqa: ARG002, N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check")


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
    address: Address, service: grpc.GenericRpcHandler, chunk_bytes: int, max_rpcs: int
) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options(chunk_bytes), maximum_concurrent_rpcs=max_rpcs)
    server.add_generic_rpc_handlers((service,))
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError:
        port = 0
    if port == 0:
        raise _unavailable(address, "it is in use, or not an address of this machine")
    return server, port

"""Which connection an identity speaks over.

Without TLS one channel serves all identities of a process. With it each has its own, since a certificate belongs to a
connection and stands for one identity.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from common.config import Network
from common.errors import ConfigError
from common.rereading import Reread
from common.rpc.credentials import ClientCredentials, client_credentials, client_files, open_channel
from common.rpc.methods import ParameterServerStub

__all__ = ["Channels", "Line"]

log = logging.getLogger("byzuldp.client")


@dataclass(frozen=True)
class Line:
    """One channel, and the identities that speak over it."""

    ids: tuple[int, ...]
    stub: ParameterServerStub


class Channels:
    """The channels of one process to one parameter server.

    Parameters
    ----------
    address
        ``host:port`` of the parameter server.
    network
        Its ``tls`` says whether each identity has a channel and a certificate of its own.
    """

    def __init__(self, address: str, network: Network) -> None:
        self._address, self._network = address, network
        self._files: dict[int, Reread[ClientCredentials]] = {}
        self._open: dict[int | None, tuple[grpc.aio.Channel, ParameterServerStub, ClientCredentials | None]] = {}

    async def lines(self, ids: Iterable[int], unusable: Callable[[int, ConfigError], None]) -> list[Line]:
        """The channels for these identities; one whose certificate has been renewed since is opened anew.

        Parameters
        ----------
        unusable
            Told of an identity whose certificate cannot be used (any more); it gets no channel.
        """
        if not self._network.tls.enabled:
            return [Line(tuple(ids), await self._stub(None, None))]
        found = []
        for client_id in ids:
            try:
                credentials = self._credentials(client_id)
            except ConfigError as problem:
                unusable(client_id, problem)
            else:
                found.append(Line((client_id,), await self._stub(client_id, credentials)))
        return found

    async def close(self) -> None:
        """Close them all."""
        for channel, _, _ in self._open.values():
            await channel.close()
        self._open.clear()

    def _credentials(self, client_id: int) -> ClientCredentials:
        """What the identity shows now; its files may have been renewed."""
        tls = self._network.tls
        if client_id not in self._files:
            self._files[client_id] = Reread(client_files(tls, client_id), lambda: client_credentials(tls, client_id))
        credentials = self._files[client_id].current()
        if fault := credentials.certificate.fault("client"):
            raise ConfigError(f"{credentials.certificate}: {fault}")
        return credentials

    async def _stub(self, key: int | None, credentials: ClientCredentials | None) -> ParameterServerStub:
        if key in self._open:
            channel, stub, used = self._open[key]
            if used is credentials:
                return stub
            log.info("client %s connects anew, with %s", key, credentials and credentials.certificate)
            await channel.close()
        channel = open_channel(self._address, self._network, credentials)
        self._open[key] = channel, ParameterServerStub(channel), credentials
        return self._open[key][1]

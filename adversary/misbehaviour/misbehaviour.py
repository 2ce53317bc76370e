"""What a misbehaviour is: a way to break the protocol, or to lean on it, while values are somebody else's business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import grpc

from client.memory import Outcome
from client.push import Push, Reply, deliver
from common.config import Experiment
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["Ground", "Misbehaviour"]


@dataclass(frozen=True)
class Ground:
    """Whom it is done to, and in whose name.

    Attributes
    ----------
    address
        ``host:port`` of the parameter server.
    experiment
        The adversary's own copy.
    tokens
        The join token of each identity that misbehaves in this way; with TLS it may be empty.
    schema_hash, num_parameters
        Of the model that is trained.
    callers
        Gives the identities that are members now; empty at first, and where the exchange does not run.
    channel
        Opens a further connection, in the name of an identity where there are certificates.
    """

    address: str
    experiment: Experiment
    tokens: Mapping[int, str]
    schema_hash: bytes
    num_parameters: int
    callers: Callable[[], Mapping[int, pb.Caller]]
    channel: Callable[[int], grpc.aio.Channel]

    @property
    def ids(self) -> tuple[int, ...]:
        """The identities, sorted."""
        return tuple(sorted(self.tokens))


class Misbehaviour:
    """Takes part like a client, but for what a subclass changes.

    Its identities join, attend and pull through the client's own exchange; each of their momenta, which the attack has
    chosen, goes through :meth:`deliver`; :meth:`beside` runs beside all that, for as long as the run lasts.
    """

    name: ClassVar[str]
    takes_part: ClassVar[bool] = True
    """Whether its identities join and train as clients do; if not, there is :meth:`beside` alone."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    async def deliver(self, push: Push) -> Reply | None:
        """Send one momentum, in its own way; None: there is no answer that the exchange should hear of.

        Raises
        ------
        grpc.aio.AioRpcError
            The exchange takes it as a failed connection, and joins again.
        """
        return await deliver(push)

    async def beside(self) -> Outcome | None:
        """What else is done; it is cancelled when the exchange learns that the run is over.

        Returns
        -------
        Outcome or None
            How the run ended, where there is no exchange to learn of it; None when there is nothing more to do.
        """
        return None

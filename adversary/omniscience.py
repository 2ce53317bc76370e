"""Omniscient knowledge: the honest momenta themselves, through the parameter server's wiretap. Research only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc
import torch

from common.errors import AttackError, ServerUnreachable
from common.rpc.methods import WiretapStub
from common.rpc.options import channel_options
from common.rpc.refusals import kind_name
from common.rpc.tensors import Incomplete, receive_tensor
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap

__all__ = ["Omniscient"]

RETRY_S = 0.2


class Omniscient:
    """Reads each round's honest momenta, once enough of them have arrived.

    Parameters
    ----------
    address
        The wiretap's ``host:port``.
    callers
        Gives the adversary's member identities: the wiretap lets members in.
    channel
        Opens a channel to an address as one of them; default an unprotected one.
    """

    def __init__(
        self,
        address: str,
        callers: Callable[[], Mapping[int, pb.Caller]],
        *,
        num_parameters: int,
        chunk_bytes: int,
        wait_s: float,
        channel: Callable[[str, int], grpc.aio.Channel] | None = None,
    ) -> None:
        self._address, self._callers = address, callers
        self._num_parameters, self._wait_s = num_parameters, wait_s
        self._channel = channel or (
            lambda address, _: grpc.aio.insecure_channel(address, options=channel_options(chunk_bytes))
        )

    async def estimate(self, round_id: int, own: torch.Tensor) -> torch.Tensor:
        """The honest momenta (h, d); the colluders' own if the round closed before they could be read.

        Raises
        ------
        AttackError
            The wiretap refuses.
        ServerUnreachable
            It does not answer.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._wait_s
        while True:
            try:
                rows = await self._tap(round_id)
            except grpc.aio.AioRpcError as problem:
                # When the whole server has gone, the exchange notices, and cancels this.
                if loop.time() > give_up:
                    raise ServerUnreachable(
                        f"no answer from the wiretap at {self._address} for {self._wait_s:.0f} s: {problem.details()}"
                    ) from None
                await asyncio.sleep(RETRY_S)
                continue
            if rows is not None:
                return torch.stack(rows) if rows else own

    async def _tap(self, round_id: int) -> list[torch.Tensor] | None:
        """The honest momenta of a round: none of them when it is over, None when they are not there yet."""
        caller = next(iter(self._callers().values()))
        rows: list[torch.Tensor] = []
        async with self._channel(self._address, caller.client_id) as channel:
            call = WiretapStub(channel).Tap(
                tap.TapRequest(caller=caller, round_id=round_id, wait_s=self._wait_s), timeout=2 * self._wait_s
            )
            frames = aiter(call)
            try:
                while True:
                    header, row = await receive_tensor(
                        frames, self._num_parameters, lambda header: header.tapped.element_count
                    )
                    match header.WhichOneof("outcome"):
                        case "tapped" if row is not None:
                            rows.append(torch.from_numpy(row))
                        case "refusal":
                            raise AttackError(
                                f"the wiretap refuses: {kind_name(header.refusal.kind)}: {header.refusal.message}"
                            )
                        case "not_yet" if header.not_yet.round_id == round_id:
                            return None
                        case _:
                            return []
            except Incomplete:  # the stream's end
                return rows
            finally:
                call.cancel()

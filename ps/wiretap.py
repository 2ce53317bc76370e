"""The wiretap: honest momenta for an omniscient adversary. Research only.

A service of its own on a port of its own. It exists only when the experiment asks for it
(``attack.knowledge = "omniscient"``), and such a run is *not private*, whatever its noise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from grpc.aio import ServicerContext

from common.rpc.frames import Malformed, encode_frame, tensor_frames
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap
from ps.coordinator import Coordinator
from ps.privacy.released import open_for_wiretap
from ps.streams import Streams

__all__ = ["WiretapService"]


class WiretapService:
    """The RPC of ``proto/common/rpc/v1/wiretap.proto``.

    Parameters
    ----------
    coordinator
        Whose inbox is read.
    honest_ids, adversary_ids
        Whose momenta are shown, and to whom.
    streams
        How many calls may be open.
    """

    def __init__(
        self, coordinator: Coordinator, honest_ids: Sequence[int], adversary_ids: Sequence[int], streams: Streams
    ) -> None:
        self._ps, self._streams = coordinator, streams
        self._honest, self._adversaries = frozenset(honest_ids), frozenset(adversary_ids)

    async def Tap(  # noqa: N802
        self, requests: AsyncIterator[tap.TapRequest | Malformed], context: ServicerContext[Any, Any]
    ) -> None:
        async with self._streams.opened(context) as stream:
            try:
                request = await stream.first(requests)
                self._ps.members.check(request.caller, self._ps.members.gate.peer(context))
                if request.caller.client_id not in self._adversaries:
                    raise Refused(pb.NOT_A_MEMBER, "the wiretap is for the experiment's adversaries")
                stream.claim(request.caller.client_id)
                ready = await self._ps.reached(lambda: self._enough(request.round_id), request.wait_s)
            except Refused as refused:
                self._ps.count(refused.kind, None)
                await context.write(encode_frame(header=tap.TapHeader(refusal=refused.as_message())))
                return
            rounds = self._ps.rounds
            if not ready or self._ps.members.over is not None or rounds.round_id != request.round_id:
                not_yet = pb.NotYet(round_id=rounds.round_id, waiting_for="the honest momenta of an open round")
                await context.write(encode_frame(header=tap.TapHeader(not_yet=not_yet)))
                return
            # All rows are copied before the first await: the round may close, and its rows be reused, meanwhile.
            copied = [frame for client_id in self._arrived() for frame in self._frames(request.round_id, client_id)]
            for frame in copied:
                await context.write(frame)

    def _arrived(self) -> list[int]:
        return [client_id for client_id in sorted(self._honest) if self._ps.inbox.digest_of(client_id) is not None]

    def _frames(self, round_id: int, client_id: int) -> Iterator[bytes]:
        row = open_for_wiretap(self._ps.inbox.row(client_id)).numpy()
        header = tap.TapHeader(tapped=tap.Tapped(round_id=round_id, client_id=client_id, element_count=len(row)))
        return tensor_frames(header, row, self._ps.experiment.network.chunk_bytes)

    def _enough(self, round_id: int) -> bool:
        """Every honest client that is alive has answered, or the round has gone by."""
        if self._ps.rounds.round_id != round_id:
            return self._ps.rounds.round_id > round_id
        return all(
            self._ps.inbox.digest_of(client_id) is not None for client_id in self._honest & self._ps.members.roster.live
        )

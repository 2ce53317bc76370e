"""How many calls peers may have open at the PS, and the wait for a call's first message.

Every call is a stream of HTTP/2, and whoever opened one decides when it ends: by falling silent, or by not reading what
it asked for. So they are counted until they are really gone, under the identity they belong to, or as strangers while
nobody has shown whose they are. Of strangers there may be so many at once; one more ends the one that has been silent
for longest, so that a flood of idle ones keeps nobody out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, TypeVar

import grpc
from grpc.aio import ServicerContext

from common.rpc.frames import Malformed, Oversized
from common.rpc.refusals import Refused
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.timeouts import Timeouts

__all__ = ["Stream", "Streams", "intact"]

M = TypeVar("M")

Context = ServicerContext[Any, Any]


class Stream:
    """One open call, from its first moment on; it is counted until gRPC is rid of it, which may be much later.

    Used as ``async with streams.opened(context) as stream``.
    """

    __slots__ = ("_all", "_context", "_pushed_out", "_task", "client_id", "gone", "waiting")

    def __init__(self, all_of_them: Streams, context: Context) -> None:
        self._all, self._context, self._task = all_of_them, context, asyncio.current_task()
        self.client_id: int | None = None  # whose it is, once that has been shown
        self.waiting = self._pushed_out = self.gone = False

    async def __aenter__(self) -> Stream:
        if not self._all.admit(self):
            await self._context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._all.most_strangers} streams are open that have not shown whose they are "
                "(network.max_strangers)",
            )
        self._context.add_done_callback(self._ended)  # type: ignore[arg-type]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _problem: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._pushed_out and kind is asyncio.CancelledError:
            await self._context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "this stream has not shown whose it is, and gave way to newer ones (network.max_strangers)",
            )

    async def first(self, requests: AsyncIterator[M | Malformed]) -> M:
        """The first message.

        Raises
        ------
        Refused
            It did not come in time, or is none.
        """
        self.waiting = True
        try:
            with self._all.timeouts.within(self._all.first_message_s):
                message = await anext(requests, None)
        except TimeoutError:
            raise Refused(
                pb.TRUNCATED, f"nothing came within {self._all.first_message_s:g} s (network.first_message_s)"
            ) from None
        finally:
            self.waiting = False
        if message is None:
            raise Refused(pb.TRUNCATED, "the stream ended before it began")
        return intact(message)

    def claim(self, client_id: int) -> None:
        """It has been shown whose stream this is.

        Raises
        ------
        Refused
            That identity has as many as it may have.
        """
        self._all.claim(self, client_id)

    def push_out(self) -> None:
        """End it while it is waiting for its first message."""
        if self._task is not None:
            self.waiting, self._pushed_out = False, True
            self._task.cancel()

    def _ended(self, _context: Context) -> None:
        self.gone = True
        self._all.forget(self)


class Streams:
    """The open calls of one server.

    Parameters
    ----------
    per_client
        How many an identity may have open at once.
    strangers
        How many may be open at once that have not shown whose they are.
    first_message_s
        How long one may take to say anything.
    """

    def __init__(self, *, per_client: int, strangers: int, first_message_s: float) -> None:
        self.first_message_s = first_message_s
        self.timeouts = Timeouts()
        """Of all calls."""
        self._per_client, self.most_strangers = per_client, strangers
        self._strangers: dict[Stream, None] = {}  # in the order in which they came
        self._held: Counter[int] = Counter()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def opened(self, context: Context) -> Stream:
        """A call that has come in."""
        return Stream(self, context)

    def admit(self, stream: Stream) -> bool:
        """Count a new one, as a stranger's; False when there is no room."""
        if not self._room_for_one():
            return False
        self._strangers[stream] = None
        return True

    def claim(self, stream: Stream, client_id: int) -> None:
        """See :meth:`Stream.claim`."""
        if self._held[client_id] >= self._per_client:
            raise Refused(
                pb.TOO_MANY_CALLS,
                f"client {client_id} has {self._per_client} streams open already (network.max_streams_per_client)",
            )
        if stream.client_id is None and not stream.gone:
            stream.client_id = client_id
            self._held[client_id] += 1
            del self._strangers[stream]

    def _room_for_one(self) -> bool:
        if len(self._strangers) < self.most_strangers:
            return True
        for stream in self._strangers:
            if stream.waiting:
                stream.push_out()
                return True
        return False  # they all have been answered, and do not read the answer

    def forget(self, stream: Stream) -> None:
        """gRPC is rid of it."""
        self._strangers.pop(stream, None)
        if stream.client_id is not None:
            self._held[stream.client_id] -= 1


def intact(message: M | Malformed) -> M:
    """A peer's message, if it is one.

    Raises
    ------
    Refused
        It is not, or it is too large.
    """
    if isinstance(message, Malformed):
        raise Refused(pb.TOO_LARGE if isinstance(message, Oversized) else pb.MALFORMED, message.reason)
    return message

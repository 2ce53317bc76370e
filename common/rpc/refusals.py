"""Refusals: one sentence for each kind, in the words of the protocol."""

from __future__ import annotations

from common.rpc.v1.parameter_server_pb2 import Refusal, RefusalKind

__all__ = ["REJOIN", "Refused", "kind_name", "refusal"]

REJOIN = frozenset((RefusalKind.NOT_A_MEMBER, RefusalKind.ROW_BUSY, RefusalKind.TOO_MANY_CALLS, RefusalKind.SUSPENDED))
"""Refusals after which a client waits a little and joins anew: the parameter server has restarted, or still listens to
streams of ours that broke (a new incarnation takes its row over), or will not have us for a while."""


class Refused(Exception):
    """Raised inside the parameter server where a peer's message is turned away; becomes the reply.

    ``excused``: of this kind, but an honest client may have come to it.
    """

    def __init__(
        self, kind: RefusalKind.ValueType, message: str, *, next_round: int = 0, excused: bool = False
    ) -> None:
        super().__init__(message)
        self.excused = excused
        self.kind = kind
        self.message = message
        self.next_round = next_round

    def as_message(self) -> Refusal:
        return refusal(self.kind, self.message, next_round=self.next_round)


def refusal(kind: RefusalKind.ValueType, message: str, *, next_round: int = 0) -> Refusal:
    """The protocol's message for a refusal."""
    return Refusal(kind=kind, message=message, next_round=next_round)


def kind_name(kind: int) -> str:
    """``stale_round`` for ``STALE_ROUND``: the name used in summaries and metrics."""
    try:
        return RefusalKind.Name(RefusalKind.ValueType(kind)).lower()
    except ValueError:
        return f"unknown_{int(kind)}"

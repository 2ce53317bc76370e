"""The points of a round at which a server may die, in order; a test stops one there.

The hook is called with the point's name. In the product it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BEFORE_COMMIT", "IN_STORE", "POINTS", "Fault", "no_fault"]

Fault = Callable[[str], None]

IN_STORE = ("before_tensor", "tensor_written", "tensor_renamed", "before_commit", "after_commit")
"""Those of a commit; of θ_0's too."""

BEFORE_COMMIT = (
    "round_opened",
    "momentum_complete",
    "round_closed",
    "noise_taken",
    "aggregated",
    "stepped",
    *IN_STORE[:-1],
)
"""A server that dies here loses the open round, and nothing else: nothing of it was released."""

POINTS = (*BEFORE_COMMIT, "after_commit", "before_publish", "published")
"""From ``after_commit`` on the round stands: it is published as it is, after a restart if need be."""


def no_fault(_point: str) -> None:
    """The hook of a server that is not under test."""

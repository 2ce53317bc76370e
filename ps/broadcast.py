"""A published model as it travels: serialised once, the same bytes for every client that pulls it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Broadcast"]


class Broadcast:
    """The frames of one model, until the next one is published.

    Whoever sends them takes one at a time and keeps none, so that a reader who stops holds the frame it stopped at and
    not the model: readers who stop in different rounds would hold as many models.

    Parameters
    ----------
    round_id
        The model's round.
    frames
        Its messages.
    """

    def __init__(self, round_id: int, frames: Iterable[bytes]) -> None:
        self.round_id = round_id
        self._frames = list(frames)
        self.count = len(self._frames)

    def frame(self, index: int) -> bytes | None:
        """A frame; None when the model is outdated, and after the last one."""
        return self._frames[index] if index < len(self._frames) else None

    def let_go(self) -> None:
        """The next model is there: nobody needs this one any more."""
        self._frames.clear()

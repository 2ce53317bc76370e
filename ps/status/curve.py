"""A curve that a page can hold, however many points it is given."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Curve"]

MOST = 400


class Curve:
    """Points in the order they came; where they are too many, every second one goes. The last one is always there."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self._kept: list[tuple[int, float]] = []
        self._stride, self._count = 1, 0
        self.last: tuple[int, float] | None = None
        for point in points:
            self.add(*point)

    def add(self, x: int, y: float) -> None:
        """One more, unless it is not after the last."""
        if self.last is not None and x <= self.last[0]:
            return
        self.last = (x, y)
        if self._count % self._stride == 0:
            self._kept.append(self.last)
            if len(self._kept) > MOST:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._count += 1

    @property
    def points(self) -> list[tuple[int, float]]:
        """At most :data:`MOST` and one."""
        ends = [self.last] if self.last is not None and self._kept[-1] != self.last else []
        return [*self._kept, *ends]

"""From what happened to what is served: the view and the figures, kept up to date on the page's thread."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from common.errors import StoreProblem
from ps.reader import RunReader
from ps.records import RefusalCount, RoundMetrics
from ps.status.access import Part
from ps.status.facts import Happened, RunFacts
from ps.status.members import Look, Members
from ps.status.metrics import Exposition
from ps.status.view import View

__all__ = ["Feed"]

log = logging.getLogger("byzuldp.ps.status")

FRESH_S = 0.5
"""So long one state serves everybody who asks: a peer must not make the server work, or its loop answer, at will."""


class Feed:
    """What there is to serve.

    Parameters
    ----------
    happened
        Emptied by :meth:`drain`.
    """

    def __init__(self, facts: RunFacts, members: Members, happened: Happened) -> None:
        self._facts, self._members, self._happened = facts, members, happened
        self._reader = RunReader(facts.folder)
        self._view = View(facts)
        self._exposition = Exposition(facts.run_id, self._view, facts.rounds)
        earlier = self._reader.rounds()
        for metrics in earlier:
            self._exposition.observe(metrics)
        self._view.remember(earlier, self._reader)
        self._recorded = earlier[-1].round_id if earlier else -1
        self._states: dict[Part, tuple[float, str, bool]] = {}
        self._counts: tuple[float, Sequence[RefusalCount]] = (0.0, ())
        self._look: tuple[float, Look | None] = (0.0, None)

    def stop(self) -> None:
        """Nothing more will happen."""
        self.drain()
        self._view.stop()
        self._states.clear()

    def drain(self) -> None:
        """Take note of what has happened."""
        while self._happened:
            at, what = self._happened.popleft()
            if isinstance(what, RoundMetrics):
                if what.round_id > self._recorded:  # else the run folder has told us already
                    self._recorded = what.round_id
                    self._exposition.observe(what)
                    self._view.take_round(what)
            else:
                self._view.take_event(what, at)

    async def state(self, part: Part) -> tuple[str, bool]:
        """JSON of a part, at most :data:`FRESH_S` old, and whether it is the last there will be."""
        self.drain()
        made_at, text, last = self._states.get(part, (0.0, "", False))
        if not text or time.monotonic() - made_at > FRESH_S:
            self._refresh_claim()
            if part == "public":
                tree = self._view.public()
            else:
                look = await self._looked()
                tree = self._view.operator(time.monotonic(), look, self._refusals())
            text, last = json.dumps(tree, ensure_ascii=False, allow_nan=False), bool(tree["ended"])
            self._states[part] = time.monotonic(), text, last
        return text, last

    async def metrics(self) -> bytes:
        """What Prometheus reads."""
        self.drain()
        look = await self._looked()
        return self._exposition.text(look.live if look else None, self._refusals())

    async def _looked(self) -> Look | None:
        if time.monotonic() - self._look[0] > FRESH_S:
            look = None if self._view.ended else await self._members.look()
            self._look = time.monotonic(), look
        return self._look[1]

    def _refusals(self) -> Sequence[RefusalCount]:
        if time.monotonic() - self._counts[0] > FRESH_S:
            try:
                self._counts = time.monotonic(), self._reader.refusals()
            except StoreProblem as problem:
                log.debug("refusals cannot be read: %s", problem)
                self._counts = time.monotonic(), self._counts[1]
        return self._counts[1]

    def _refresh_claim(self) -> None:
        try:
            self._view.refresh_claim(self._reader)
        except StoreProblem as problem:
            log.debug("late models cannot be counted: %s", problem)

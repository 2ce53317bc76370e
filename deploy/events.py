"""Events between a child and the launcher: JSON on a pipe, one way.

The pipe carries JSON, never pickles: what a child says can be no more than text. A thread of its own writes, so that a
launcher that does not read (stopped by Ctrl-Z, say) never holds up a round.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Event", "EventSender", "receive"]

Event = dict[str, Any]

LIMIT = 1000


class EventSender:
    """Sends events without ever blocking the caller; when the reader is far behind, events are dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.Queue[Event | None] = queue.Queue(LIMIT)
        self._thread = threading.Thread(target=self._send_all, name="events", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(event)

    def close(self, last: Event, deadline_s: float = 5.0) -> None:
        """Send a last event, which is not dropped, and wait until all is written or the time is over."""
        try:
            self._queue.put(last, timeout=deadline_s)
            self._queue.put(None, timeout=deadline_s)
        except queue.Full:
            return
        self._thread.join(deadline_s)

    def _send_all(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(json.dumps(event, default=str).encode())
            except OSError:  # the launcher is gone; whoever watches for that acts on it
                return


def receive(connection: Connection) -> Event:
    """The next event.

    Raises
    ------
    EOFError
        The child has closed its end, died in the middle of a message, or sent something that is no event.
    """
    try:
        event = json.loads(connection.recv_bytes())
    except (OSError, ValueError) as problem:
        raise EOFError(str(problem)) from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise EOFError("not an event")
    return event

"""The status page of a run: takes its port, listens in on what is reported, and serves on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from common.rpc.addresses import Address
from ps.records import RoundMetrics
from ps.status.access import Access, tokens_in
from ps.status.facts import Happened, RunFacts
from ps.status.listening import listen
from ps.status.members import Members

__all__ = ["StatusPage"]

log = logging.getLogger("byzuldp.ps.status")

_WAITING = 1024
_STOP_S = 0.9


class StatusPage:
    """The page, or nothing where ``address`` is empty.

    Parameters
    ----------
    address
        ``monitoring.status``.
    report
        Is told everything that :meth:`report` is told.

    Raises
    ------
    ConfigError
        The address cannot be bound.
    """

    def __init__(self, address: str, report: Callable[[dict[str, Any]], None]) -> None:
        self._told = report
        self._listener: socket.socket | None = None
        self._address: Address | None = None
        if address:
            self._listener, self._address = listen(address)
        self._on = self._listener is not None
        self._happened: Happened = deque(maxlen=_WAITING)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def report(self, event: dict[str, Any]) -> None:
        """Something happened: the page takes note, and it goes on to whom it was meant for."""
        if self._on:
            self._happened.append((time.monotonic(), event))
        self._told(event)

    def observe(self, metrics: RoundMetrics) -> None:
        """A round was published."""
        if self._on:
            self._happened.append((time.monotonic(), metrics))

    def start(self, facts: RunFacts, members: Members) -> None:
        """Serve, and report where.

        Raises
        ------
        StoreUnwritable
            The tokens cannot be kept.
        """
        if self._address is None:
            return
        access = Access(tokens_in(facts.folder / "operator"), self._address)
        self._thread = threading.Thread(target=self._work, args=(facts, members, access), name="status", daemon=True)
        self._thread.start()
        base = f"http://{self._address}"
        self.report(
            {
                "event": "status_page",
                "url": f"{base}/" + ("" if self._address.is_loopback else f"?token={access.tokens.page}"),
                "operator_url": f"{base}/operator/?token={access.tokens.operator}",
            }
        )
        if not self._address.is_loopback:
            message = (
                f"the status page at {self._address} is not encrypted: whoever reads the network between reads it, and "
                "its tokens; let it listen on 127.0.0.1 and use a tunnel (docs/monitoring.md)"
            )
            self.report({"event": "warning", "message": message})

    def close(self) -> None:
        """Stop, within a second."""
        self._on = False
        self._closing.set()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(_STOP_S)
        elif self._listener is not None:
            self._listener.close()

    def _work(self, facts: RunFacts, members: Members, access: Access) -> None:
        assert self._listener is not None  # noqa: S101 - start() looked
        try:
            asyncio.run(self._serve(facts, members, access))
        except Exception:
            log.exception("the status page has stopped; the run goes on without it")
        finally:
            self._on = False
            self._listener.close()
            self._happened.clear()

    async def _serve(self, facts: RunFacts, members: Members, access: Access) -> None:
        assert self._listener is not None  # noqa: S101 - start() looked
        self._loop = asyncio.get_running_loop()  # from here on close() wakes us; what came before, it left a note of
        if self._closing.is_set():
            return
        # Only now, and here: most tests and some users have no page, and nobody should wait for these to be imported.
        from ps.status.feed import Feed
        from ps.status.http import Server

        feed = Feed(facts, members, self._happened)
        await Server(self._listener, access, feed, facts.run_id).serve(self._stop)

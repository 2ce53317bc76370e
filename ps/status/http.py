"""HTTP for the page: one request a connection, GET alone, and a maximum of everything.

Its event loop is not the run's, and what a peer can make it do is bounded: connections, the pace at which they are
accepted, sizes, and how long one may last. So no peer holds up a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from ps.status.access import Access, Part
from ps.status.feed import Feed
from ps.status.metrics import CONTENT_TYPE

__all__ = ["Server"]

log = logging.getLogger("byzuldp.ps.status")
_quiet = logging.getLogger("byzuldp.ps.status.http")  # aiohttp quotes requests, in which there may be tokens
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

CONNECTIONS, STREAMS = 64, 24
PER_SECOND, AT_ONCE = 40.0, 60.0
LIFE_S = 10.0
"""Of a connection that is no event stream: from accepted to answered."""
WRITE_S = 5.0
"""An event stream's reader takes what it is sent within so long."""
TELL_EVERY_S = 1.0
FAREWELL_S = 0.3
LINE_BYTES, HEADERS = 4096, 64

_STATIC = Path(__file__).parent / "static"
_FILES: Mapping[str, tuple[str, str]] = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "draw.js": ("draw.js", "text/javascript"),
}
_PREFIXES: Mapping[str, Part] = {"/": "public", "/operator/": "operator"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server:
    """Serves a feed at a socket that listens already.

    Parameters
    ----------
    run_id
        Tells the cookies of runs on one machine apart, since a cookie is sent to every port.
    """

    def __init__(self, listener: socket.socket, access: Access, feed: Feed, run_id: str) -> None:
        self._listener, self._access, self._feed, self._run_id = listener, access, feed, run_id
        self._files = {name: ((_STATIC / file).read_text("utf-8"), kind) for name, (file, kind) in _FILES.items()}
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, float]] = {}
        self._streams: set[asyncio.Transport] = set()
        self._stopping, self._no_streams = asyncio.Event(), asyncio.Event()
        self._no_streams.set()
        self._failed = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Until told to stop; then within a second."""
        self._http = web.Server(
            self._handle,
            access_log=None,
            logger=_quiet,
            lingering_time=0.0,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            max_headers=HEADERS,
        )
        tasks = [asyncio.create_task(work()) for work in (self._accept, self._look_after)]
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in [*tasks, stopped]:
            task.cancel()
        self._listener.close()
        self._feed.stop()
        self._stopping.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_streams.wait(), FAREWELL_S)
        self._http.pre_shutdown()
        await self._http.shutdown(FAREWELL_S)
        for transport, _ in self._open.values():
            transport.abort()
        for task in done - {stopped}:
            task.result()

    # ---------------------------------------------------------------- connections

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        allowance, counted_at = AT_ONCE, loop.time()
        while True:
            allowance = min(AT_ONCE, allowance + PER_SECOND * (loop.time() - counted_at))
            counted_at = loop.time()
            if allowance < 1 or len(self._open) >= CONNECTIONS:  # the others wait in the kernel's queue
                self._clear()
                await asyncio.sleep(0.05)
                continue
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # out of descriptors, or the peer was gone already
                await asyncio.sleep(0.5)
                continue
            allowance -= 1
            with contextlib.suppress(OSError):
                transport, protocol = await loop.connect_accepted_socket(self._http, connection)
                self._open[protocol] = transport, loop.time()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self._feed.drain()
            self._clear()

    def _clear(self) -> None:
        """Forget connections that are gone, and cut those that take too long, whatever they do."""
        now, there = asyncio.get_running_loop().time(), set(self._http.connections)
        for protocol, (transport, since) in list(self._open.items()):
            if protocol not in there:
                del self._open[protocol]
            elif now - since > LIFE_S and transport not in self._streams:
                transport.abort()

    # ---------------------------------------------------------------- requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            with contextlib.suppress(RuntimeError):
                request.transport.pause_reading()  # no body is ever read, nor a second request
        try:
            response = await self._answer(request)
        except ConnectionError:
            response = _said(400, "The connection was lost.")
        except Exception:  # it is the page's alone: the run goes on, and the log is not filled
            if not self._failed:
                self._failed = True
                log.exception("the status page could not answer (said once)")
            response = _said(500, "The status page has a fault; the run goes on.")
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (foreign := self._access.refuse_host(request.headers.get("Host"))) is not None:
            return _said(421, foreign)
        if request.method != "GET":
            return _said(405, "The status page is read-only: GET is all it knows.", {"Allow": "GET"})
        part, name = _place(request.path)
        token, shown = self._given(request, part)
        if (refused := self._access.refuse(part, token)) is not None:
            status, sentence = refused
            return _said(status, sentence, {"WWW-Authenticate": 'Bearer realm="byzuldp"'} if status == 401 else {})
        match name:
            case "state":
                state, _ = await self._feed.state(part)
                return web.Response(text=state, content_type="application/json", headers=dict(_HEADERS))
            case "events":
                return await self._tell(request, part)
            case "metrics":
                figures = await self._feed.metrics()
                return web.Response(body=figures, headers=_HEADERS | {"Content-Type": CONTENT_TYPE})
            case "operator":
                query = request.rel_url.raw_query_string
                return web.Response(status=308, headers=_HEADERS | {"Location": f"/operator/{query and f'?{query}'}"})
        if name not in self._files:
            return _said(404, "There is no such page here.")
        text, kind = self._files[name]
        response = web.Response(text=text, content_type=kind, charset="utf-8", headers=dict(_HEADERS))
        if shown and token is not None and self._access.needs_token(part):
            self._keep(response, part, token)
        return response

    async def _tell(self, request: web.BaseRequest, part: Part) -> web.StreamResponse:
        """The state, now and whenever it changes, as server-sent events; until the run's end."""
        transport = request.transport
        if transport is None or len(self._streams) >= STREAMS:
            return _said(503, f"{STREAMS} pages are open already: close one.", {"Retry-After": "5"})
        response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream; charset=utf-8"})
        response.force_close()
        self._streams.add(transport)
        self._no_streams.clear()
        before = ""
        try:
            await response.prepare(request)
            while True:
                state, last = await self._feed.state(part)
                text = "event: alive\ndata: 1\n\n" if state == before else f"event: state\ndata: {state}\n\n"
                async with asyncio.timeout(WRITE_S):
                    await response.write(text.encode())
                if last:
                    break
                before = state
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), TELL_EVERY_S)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            transport.abort()
        finally:
            self._streams.discard(transport)
            if not self._streams:
                self._no_streams.set()
        return response

    def _given(self, request: web.BaseRequest, part: Part) -> tuple[str | None, bool]:
        """The token that came with a request, and whether it was in its address."""
        if (asked := request.rel_url.query.get("token")) is not None:
            return asked, True
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return credentials.strip(), False
        kept = [request.cookies.get(self._cookie(each)) for each in (part, "operator")]
        return next((token for token in kept if token), None), False

    def _keep(self, response: web.Response, part: Part, token: str) -> None:
        """Have the browser send a token from now on; on loopback to the operator's part alone."""
        path = "/operator/" if self._access.address.is_loopback else "/"
        response.set_cookie(self._cookie(part), token, path=path, httponly=True, samesite="Strict")

    def _cookie(self, part: str) -> str:
        return f"byzuldp-{part}-{self._run_id}"


def _place(path: str) -> tuple[Part, str]:
    """The part that a path is of, and its name there."""
    if path in ("/metrics", "/operator"):
        return ("operator" if path == "/metrics" else "public"), path[1:]
    prefix = "/operator/" if path.startswith("/operator/") else "/"
    return _PREFIXES[prefix], path.removeprefix(prefix)


def _said(status: int, sentence: str, headers: Mapping[str, str] = {}) -> web.Response:
    return web.Response(status=status, text=sentence + "\n", headers=_HEADERS | dict(headers))

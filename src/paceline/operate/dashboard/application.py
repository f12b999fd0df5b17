"""The page as an ASGI application: the page itself, its stream, the picture as JSON, `/metrics`, and actions.

The connections to the page: how long and how many they may be before one of their requests has shown the token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import PurePosixPath
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.comm.security.untrusted_peers import PendingConnections, origin_of
from paceline.operate.dashboard.access import Access, AccessMiddleware
from paceline.operate.dashboard.event_stream import Broadcaster
from paceline.operate.dashboard.prometheus import metrics
from paceline.operate.dashboard.report import STATIC, assets

ENTRANCE_S = 10.0  # from the connection to a request that passes, however many come before
_MOST_PENDING = 64


class PageConnections:
    """Limits the connections that have not shown the token; others may stay as long and be as many as they like.

    Any user of the machine can connect to the page, and one who stays silent must not keep out the page's own user.
    """

    def __init__(self) -> None:
        self._pending: PendingConnections[asyncio.Transport] = PendingConnections(_MOST_PENDING, _origin_of)
        self._by_address: dict[object, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def opened(self, transport: asyncio.Transport) -> None:
        """Takes in a connection, which may cost another one."""
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):  # a Unix socket, which only its user can open
            return
        timer = asyncio.get_running_loop().call_later(ENTRANCE_S, self._end, transport)
        self._by_address[peer[:2]] = transport, timer
        crowded_out = self._pending.add(transport)
        if crowded_out is not None:
            crowded_out.abort()

    def passed(self, client: object) -> None:
        """Notes that a request has shown the token; `client` is the address of its connection."""
        if isinstance(client, (tuple, list)) and (found := self._by_address.get(tuple(client))) is not None:
            self._pending.remove(found[0])
            found[1].cancel()

    def closed(self, transport: asyncio.Transport) -> None:
        """Forgets a connection that has ended."""
        self._pending.remove(transport)
        peer = transport.get_extra_info("peername")
        found = self._by_address.pop(peer[:2], None) if isinstance(peer, tuple) else None
        if found is not None:
            found[1].cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        if self._pending.remove(transport):
            transport.abort()


def _origin_of(transport: asyncio.Transport) -> str:
    return origin_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


def protocol_of(connections: PageConnections) -> type[H11Protocol]:
    """Returns the protocol by which the server speaks to each connection, which `connections` is told of."""

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.opened(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.closed(self.transport)
            super().connection_lost(exc)

    return LimitedProtocol


_RETRY_MS = 2000
_BEAT_S = 15.0  # a comment goes out after so long without a change, so that proxies keep the connection


def application(
    hub: Broadcaster,
    access: Access,
    prefix: str = "",
    actions: dict[str, Callable[[], str]] | None = None,
    passed: Callable[[object], None] = lambda _: None,
) -> AccessMiddleware:
    """Returns the page.

    Args:
        hub: where its pictures come from.
        access: who may read it.
        prefix: the path under which a proxy serves it.
        actions: what may be asked for by POST to actions/NAME, each returning a word about what was done. It is used
            only if `access.acts`.
        passed: is told the address of each connection with a request that has shown the token.
    """
    known_files = assets()  # no path is ever made of what a request asks for
    index = known_files["index.html"]
    if access.acts:
        index = index.replace(b"<html ", b'<html data-actions="1" ', 1)
    known = actions or {}

    async def page(_: Request) -> Response:
        return Response(index, media_type=STATIC[".html"])

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in known_files or name == "index.html":
            return PlainTextResponse("There is no such file.", 404)
        return Response(known_files[name], media_type=STATIC[PurePosixPath(name).suffix])

    async def events(request: Request) -> Response:
        stream = _events(hub, request.headers.get("last-event-id"))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def picture(_: Request) -> Response:
        return Response(await hub.fresh(), media_type="application/json")

    async def prometheus(_: Request) -> Response:
        await hub.fresh()
        text = metrics(hub.picture) if hub.picture is not None else ""
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def action(request: Request) -> Response:
        asked = known.get(request.path_params["name"])
        if asked is None:
            return PlainTextResponse("There is no such action.", 404)
        said = await asyncio.to_thread(asked)
        hub.request_sample()
        return JSONResponse({"said": said})

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/events", events),
        Route("/picture.json", picture),
        Route("/metrics", prometheus),
        Route("/actions/{name}", action, methods=["POST"]),
    ]
    return AccessMiddleware(Starlette(routes=routes), access, prefix, passed)


async def _events(hub: Broadcaster, last_id: str | None) -> AsyncIterator[bytes]:
    """Yields server-sent events: what the viewer has missed, then each change."""
    yield b"retry: %d\n\n" % _RETRY_MS
    with hub.viewer(last_id) as viewer:
        while True:
            try:
                yield await asyncio.wait_for(viewer.next(), _BEAT_S)
            except asyncio.TimeoutError:
                yield b": still here\n\n"

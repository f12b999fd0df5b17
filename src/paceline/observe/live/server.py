"""The page as an ASGI application: the page itself, its stream, the picture as JSON, `/metrics`, and actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import PurePosixPath

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.observe.live.access import Access
from paceline.observe.live.assets import STATIC, assets
from paceline.observe.live.guard import Guard
from paceline.observe.live.hub import Hub
from paceline.observe.live.prometheus import metrics

_RETRY_MS = 2000
_BEAT_S = 15.0  # a comment goes out after so long without a change, so that proxies keep the connection


def application(
    hub: Hub,
    access: Access,
    prefix: str = "",
    actions: dict[str, Callable[[], str]] | None = None,
    passed: Callable[[object], None] = lambda _: None,
) -> Guard:
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
        hub.hurry()
        return JSONResponse({"said": said})

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/events", events),
        Route("/picture.json", picture),
        Route("/metrics", prometheus),
        Route("/actions/{name}", action, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), access, prefix, passed)


async def _events(hub: Hub, last_id: str | None) -> AsyncIterator[bytes]:
    """Yields server-sent events: what the viewer has missed, then each change."""
    yield b"retry: %d\n\n" % _RETRY_MS
    with hub.viewer(last_id) as viewer:
        while True:
            try:
                yield await asyncio.wait_for(viewer.next(), _BEAT_S)
            except asyncio.TimeoutError:
                yield b": still here\n\n"

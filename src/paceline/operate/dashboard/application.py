"""ASGI application for the page: static files, the event stream, the state as JSON, `/metrics`, and actions.

Also limits the number and the duration of connections without a valid token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.comm.security.untrusted_peers import PendingConnections, origin_of
from paceline.operate.dashboard.access import Access, AccessMiddleware
from paceline.operate.dashboard.dashboard_state import PARTS, DashboardState, LinkRow, RankRow
from paceline.operate.dashboard.event_stream import Broadcaster
from paceline.operate.dashboard.report import STATIC, assets

ENTRANCE_S = 10.0  # time limit from accepting a connection to its first permitted request
_MOST_PENDING = 64
_RETRY_MS = 2000
_HEARTBEAT_S = 15.0  # interval between keep-alive comments, which prevent proxies from closing an idle stream


class PageConnections:
    """Limits connections that have not sent a request with a valid token yet.

    Any user on the machine can connect to the page, and their idle connections must not lock out the page's owner.
    """

    def __init__(self) -> None:
        self._pending: PendingConnections[asyncio.Transport] = PendingConnections(
            _MOST_PENDING,
            lambda transport: origin_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname")),
        )
        self._by_address: dict[object, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def opened(self, transport: asyncio.Transport) -> None:
        """Adds a connection, and aborts another connection if there are too many."""
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):  # the peer is connected to a Unix socket, which only its owner can open
            return
        timer = asyncio.get_running_loop().call_later(ENTRANCE_S, self._end, transport)
        self._by_address[peer[:2]] = transport, timer
        crowded_out = self._pending.add(transport)
        if crowded_out is not None:
            crowded_out.abort()

    def passed(self, client: object) -> None:
        """Lifts the limits for the connection from `client`, which has sent a valid token."""
        if isinstance(client, (tuple, list)) and (found := self._by_address.get(tuple(client))) is not None:
            self._pending.remove(found[0])
            found[1].cancel()

    def closed(self, transport: asyncio.Transport) -> None:
        """Removes a closed connection."""
        self._pending.remove(transport)
        peer = transport.get_extra_info("peername")
        found = self._by_address.pop(peer[:2], None) if isinstance(peer, tuple) else None
        if found is not None:
            found[1].cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        if self._pending.remove(transport):
            transport.abort()


def protocol_of(connections: PageConnections) -> type[H11Protocol]:
    """Returns a uvicorn protocol class that reports each connection to `connections`."""

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.opened(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.closed(self.transport)
            super().connection_lost(exc)

    return LimitedProtocol


def application(
    broadcaster: Broadcaster,
    access: Access,
    prefix: str = "",
    actions: dict[str, Callable[[], str]] | None = None,
    passed: Callable[[object], None] = lambda _: None,
) -> AccessMiddleware:
    """Returns the ASGI application for the page.

    Args:
        broadcaster: the source of the state to display.
        access: the access rules.
        prefix: the path under which a proxy serves the page.
        actions: the functions that a POST to actions/NAME calls if `access.acts` is True, keyed by name. Each function
            returns a short report.
        passed: a function called with the peer's address for each request with a valid token.
    """
    known_files = assets()  # a fixed set of names; no path is ever built from a request
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
        stream = _events(broadcaster, request.headers.get("last-event-id"))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def picture(_: Request) -> Response:
        return Response(await broadcaster.fresh(), media_type="application/json")

    async def prometheus(_: Request) -> Response:
        await broadcaster.fresh()
        text = metrics(broadcaster.state) if broadcaster.state is not None else ""
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def action(request: Request) -> Response:
        function = known.get(request.path_params["name"])
        if function is None:
            return PlainTextResponse("There is no such action.", 404)
        report = await asyncio.to_thread(function)
        broadcaster.request_sample()
        return JSONResponse({"report": report})

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/events", events),
        Route("/picture.json", picture),
        Route("/metrics", prometheus),
        Route("/actions/{name}", action, methods=["POST"]),
    ]
    return AccessMiddleware(Starlette(routes=routes), access, prefix, passed)


async def _events(broadcaster: Broadcaster, last_id: str | None) -> AsyncIterator[bytes]:
    """Yields server-sent events: first the events that the viewer has missed, then each change."""
    yield b"retry: %d\n\n" % _RETRY_MS
    with broadcaster.viewer(last_id) as viewer:
        while True:
            try:
                event = await asyncio.wait_for(viewer.next(), _HEARTBEAT_S)
            except asyncio.TimeoutError:
                yield b": still here\n\n"
                continue
            if event is None:
                yield b"event: end\ndata: {}\n\n"
                return
            yield event


_Value = tuple[Mapping[str, str | int], float]

_OF_RANKS: tuple[tuple[str, str, Callable[[RankRow], float]], ...] = (
    ("rank_samples_per_second", "Samples per second of a rank over its recent steps.", lambda row: row.samples_per_s),
    ("rank_compute_seconds", "Recent mean time of a rank's own work per step.", lambda row: row.compute / 1e3),
    ("rank_wait_seconds", "Recent mean time that a rank waits for others per step.", lambda row: row.wait / 1e3),
    ("rank_slowness_ratio", "A rank's own time divided by the median of all ranks.", lambda row: row.slowness),
    ("rank_slow", "1 if the rank is significantly slower than the others.", lambda row: row.is_slow),
    ("rank_memory_bytes", "A rank's resident memory.", lambda row: row.memory_nbytes),
    ("rank_silent_seconds", "Time since a rank last recorded something.", lambda row: row.silent_s),
    ("rank_blamed", "1 if the diagnosis blames the rank.", lambda row: row.is_blamed),
)

_OF_LINKS: tuple[tuple[str, str, Callable[[LinkRow], float | None]], ...] = (
    ("link_sent_bytes_per_second", "Bytes per second that a rank sends to another.", lambda row: row.nbytes_per_s),
    ("link_delivery_bytes_per_second", "Latest delivery rate of a link.", lambda row: row.delivers_nbytes_per_s),
    ("link_round_trip_seconds", "Smoothed round-trip time of a link.", lambda row: _seconds(row.round_trip)),
    ("link_round_trip_variation_seconds", "Variation of the round-trip time.", lambda row: _seconds(row.variation)),
    ("link_retransmits", "Segments retransmitted so far.", lambda row: row.retransmits),
    ("link_slow", "1 if the link is much slower than the others.", lambda row: row.is_slow),
)


def metrics(state: DashboardState) -> str:
    """Formats job metrics for Prometheus (text exposition format 0.0.4).

    Each metric has the label `job`, and per-rank metrics also have `rank` and `host`.
    """
    job: dict[str, str | int] = {"job": state.header.run_id}
    lines: list[str] = []
    for name, text, values in _families(state):
        if values:
            lines += [f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} gauge"]
            lines += [f"paceline_{name}{_labels({**job, **labels})} {_number(value)}" for labels, value in values]
    return "\n".join([*lines, ""])


def _families(state: DashboardState) -> Iterator[tuple[str, str, Sequence[_Value]]]:
    header, figures = state.header, state.figures
    yield "ranks", "Number of ranks that are present.", [({}, header.ranks_here)]
    yield "world_size", "Number of ranks that the job should have.", [({}, header.world_size)]
    yield "restarts", "Number of restarts of the workers.", [({}, header.restarts)]
    yield "stuck", "1 if a diagnosis explains a lack of progress.", [({}, state.verdict is not None)]
    yield "elapsed_seconds", "Time since the job began.", [({}, header.elapsed_s)]
    if header.step is not None:
        yield "step", "Current step of the job.", [({}, header.step)]
    if header.left_s is not None:
        yield "left_seconds", "Estimated time until the last step.", [({}, header.left_s)]
    if figures is not None:
        yield "step_seconds", "Recent mean duration of a step, excluding stalls.", [({}, figures.step / 1e3)]
        yield "samples_per_second", "Samples per second of all ranks.", [({}, figures.samples_per_s)]
        yield "exposed_ratio", "Share of a step that is spent waiting.", [({}, figures.exposed_share)]
        if figures.overlap is not None:
            yield "overlap_ratio", "Share of the communication that overlaps with other work.", [({}, figures.overlap)]
        parts: list[_Value] = [({"part": part}, time / 1e3) for part, time in zip(PARTS, figures.parts, strict=True)]
        yield "step_part_seconds", "Durations of the parts of a step, averaged over the ranks.", parts
    for name, text, value in _OF_RANKS:
        yield name, text, [({"rank": row.rank, "host": row.host}, value(row)) for row in state.ranks]
    links = [row for row in state.links if row.peer >= 0]
    for name, text, of in _OF_LINKS:
        yield name, text, [({"rank": row.rank, "peer": row.peer}, v) for row in links if (v := of(row)) is not None]
    latest = {point.name: point.mean for point in state.curves.items}
    yield "logged", "Latest logged value, averaged over the ranks.", [({"name": k}, v) for k, v in latest.items()]


def _seconds(time_ms: float | None) -> float | None:
    return None if time_ms is None else time_ms / 1e3


def _labels(labels: Mapping[str, str | int]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else f"{value:.9g}"

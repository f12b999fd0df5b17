"""Applies the rules of `access.py` to every request, before any other code of the page sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from paceline.observe.live.access import HEADERS, Access, Request, Verdict

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_COOKIE_S = 30 * 86_400
_PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
_ALWAYS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application around another one, which sees only requests that may pass.

    Args:
        inner: the page.
        access: the rules.
        prefix: the path under which a proxy serves the page, such as "/user/ana/proxy/8080", or "". Paths with and
            without it are understood, since some proxies take it away and others do not.
        passed: is told the address of each connection with a request that has shown the token.
    """

    def __init__(
        self, inner: Application, access: Access, prefix: str = "", passed: Callable[[object], None] = lambda _: None
    ) -> None:
        self._inner = inner
        self._access = access
        self._prefix = prefix
        self._passed = passed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets have no use here
            await send({"type": "websocket.close", "code": 1008})
            return
        request = self._request_of(scope)
        verdict = self._access.decide(request)
        if verdict in (Verdict.PASSES, Verdict.ENTERS):
            self._passed(scope.get("client"))
        if verdict is Verdict.PASSES:
            await self._inner({**scope, "path": request.path, "root_path": ""}, receive, _with_headers(send))
        elif verdict is Verdict.ENTERS:
            await _answer(send, verdict, [*self._cookie(), (b"location", self._location(scope).encode("latin-1"))])
        else:
            allow = "GET, POST" if self._access.acts else "GET"
            more = [(b"allow", allow.encode())] if verdict is Verdict.WRONG_METHOD else []
            await _answer(send, verdict, _PLAIN + more)

    def _request_of(self, scope: Scope) -> Request:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            # Two Host headers are a trick: joined, they are in no list. Cookies may come in several headers.
            headers[key] = f"{headers[key]}; {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
        path = scope["path"]
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + "/")):
            path = path[len(self._prefix) :] or "/"
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).get("token")
        return Request(scope["method"], path, tokens[0] if tokens else None, headers)

    def _cookie(self) -> list[tuple[bytes, bytes]]:
        value = (
            f"{self._access.cookie}={self._access.token}; Path={self._prefix or '/'}; Max-Age={_COOKIE_S}; "
            "HttpOnly; SameSite=Strict"
        )
        return [(b"set-cookie", value.encode("latin-1"))]

    def _location(self, scope: Scope) -> str:
        """Returns where the browser goes without the token: relative, so that it is right behind every proxy."""
        return f"{self._prefix.rpartition('/')[2]}/" if self._prefix and scope["path"] == self._prefix else "./"


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_ALWAYS]}
        await send(message)

    return sending


async def _answer(send: Send, verdict: Verdict, headers: list[tuple[bytes, bytes]]) -> None:
    body = verdict.text.encode()
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": verdict.status, "headers": [*headers, length, *_ALWAYS]}
    await send(start)
    await send({"type": "http.response.body", "body": body})

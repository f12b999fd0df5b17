"""Access rules for the page (token, cookie and Host header), and the ASGI middleware that applies them.

Without these rules, a malicious web site in the same browser could read the page by DNS rebinding. Once the site has
loaded, its host name is resolved to 127.0.0.1, so its scripts have the same origin as the page. Only the Host
header reveals this attack. Each request's Host header is therefore compared with the permitted names first.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import parse_qs

COOKIE = "paceline"
ACTION_HEADER = "x-paceline-action"
_TOKEN_NBYTES = 16
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""Headers sent with every response."""


class AccessDecision(Enum):
    """Decision on a request: either pass it to the page, or respond with this status and text."""

    PASSES = (200, "")
    ENTERS = (303, "")  # redirects after storing the token from the URL in a cookie
    UNKNOWN_HOST = (421, "This page is not served under that host name. See docs/observe.md, --dash-host.")
    WRONG_METHOD = (405, "This page can only be read.")
    NO_TOKEN = (401, "Open the address with the token that `paceline run --dash` printed.")

    @property
    def status(self) -> int:
        """The HTTP status code."""
        return self.value[0]

    @property
    def text(self) -> str:
        """The response text."""
        return self.value[1]


@dataclass(frozen=True)
class PageRequest:
    """The parts of a request that determine the decision. Header names are in lower case."""

    method: str
    path: str
    query_token: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Access:
    """The access rules for one page.

    Attributes:
        token: a secret of 128 random bits, in hexadecimal.
        name: a name for the page, included in the cookie's name because browsers share a host's cookies between ports.
        hosts: additional host names for the page, such as a proxy's, without ports.
        acts: whether actions, which are POST requests, are allowed.
    """

    token: str
    name: str = ""
    hosts: frozenset[str] = frozenset()
    acts: bool = False

    @property
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"{COOKIE}-{self.name}" if self.name else COOKIE

    def decide(self, request: PageRequest) -> AccessDecision:
        """Decides whether to allow a request by checking its host, method and token, in that order."""
        if not self.allows(request.headers.get("host", "")):
            return AccessDecision.UNKNOWN_HOST
        if request.method != "GET" and not self._is_action(request):
            return AccessDecision.WRONG_METHOD
        if request.query_token is not None and request.method == "GET":
            return AccessDecision.ENTERS if self._is_token(request.query_token) else AccessDecision.NO_TOKEN
        return AccessDecision.PASSES if self._has_token(request.headers) else AccessDecision.NO_TOKEN

    def allows(self, host: str) -> bool:
        """Returns True if a Host header refers to this page. Ignores the port, which `ssh -L` can change."""
        match = _HOST.fullmatch(host)
        return match is not None and match[1].lower() in _LOOPBACK_HOSTS | self.hosts

    def _is_action(self, request: PageRequest) -> bool:
        """Returns True if the request is a POST from this page's script. HTML forms cannot set the required header."""
        return self.acts and request.method == "POST" and ACTION_HEADER in request.headers

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(token.strip())
        return any(self._is_token(value) for value in _cookies(headers.get("cookie", ""), self.cookie))

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


def new_token() -> str:
    """Generates a random token."""
    return secrets.token_hex(_TOKEN_NBYTES)


def name_of(run_id: str) -> str:
    """Converts a job's name for use in a cookie's name by replacing invalid characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run_id)[:64]


def _cookies(header: str, name: str) -> list[str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for key, _, value in pairs if key == name]


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_COOKIE_S = 30 * 86_400
_PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
_ALWAYS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class AccessMiddleware:
    """ASGI application that wraps another application and passes only permitted requests to it.

    Args:
        inner: the wrapped application.
        access: the access rules.
        prefix: the path under which a proxy serves the page, such as "/user/ana/proxy/8080", or "". Requests may omit
            the prefix, because some proxies remove it.
        passed: a function called with the peer's address for each request with a valid token.
    """

    def __init__(
        self, inner: Application, access: Access, prefix: str = "", passed: Callable[[object], None] = lambda _: None
    ) -> None:
        self._inner = inner
        self._access = access
        self._prefix = prefix
        self._passed = passed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":  # the page does not use WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        request = self._request_of(scope)
        verdict = self._access.decide(request)
        if verdict in (AccessDecision.PASSES, AccessDecision.ENTERS):
            self._passed(scope.get("client"))
        if verdict is AccessDecision.PASSES:
            await self._inner({**scope, "path": request.path, "root_path": ""}, receive, _with_headers(send))
        elif verdict is AccessDecision.ENTERS:
            await _answer(send, verdict, [*self._cookie(), (b"location", self._location(scope).encode("latin-1"))])
        else:
            allow = "GET, POST" if self._access.acts else "GET"
            more = [(b"allow", allow.encode())] if verdict is AccessDecision.WRONG_METHOD else []
            await _answer(send, verdict, _PLAIN + more)

    def _request_of(self, scope: Scope) -> PageRequest:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            # A browser may send several Cookie headers, which are joined. Two Host headers indicate an attack. They are
            # joined as well, so that they match no permitted host.
            headers[key] = f"{headers[key]}; {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
        path = scope["path"]
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + "/")):
            path = path[len(self._prefix) :] or "/"
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).get("token")
        return PageRequest(scope["method"], path, tokens[0] if tokens else None, headers)

    def _cookie(self) -> list[tuple[bytes, bytes]]:
        value = (
            f"{self._access.cookie}={self._access.token}; Path={self._prefix or '/'}; Max-Age={_COOKIE_S}; "
            "HttpOnly; SameSite=Strict"
        )
        return [(b"set-cookie", value.encode("latin-1"))]

    def _location(self, scope: Scope) -> str:
        """Returns the URL without the token. The URL is relative, so it is valid behind any proxy."""
        return f"{self._prefix.rpartition('/')[2]}/" if self._prefix and scope["path"] == self._prefix else "./"


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_ALWAYS]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, verdict: AccessDecision, headers: list[tuple[bytes, bytes]]) -> None:
    body = verdict.text.encode()
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": verdict.status, "headers": [*headers, length, *_ALWAYS]}
    await send(start)
    await send({"type": "http.response.body", "body": body})

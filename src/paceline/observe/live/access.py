"""Who may read the page, as plain functions: the token, its cookie, the Host header, and the headers of every answer.

The page can be opened from a browser on the same machine, and so by any web site that the user visits, if it is let
in: a site may give its own name the address 127.0.0.1 after it was loaded (DNS rebinding), and is then of the same
origin as the page. Only the Host header tells the two apart, hence it is compared with a list on every request,
before anything else.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

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
"""Sent with every answer."""


class Verdict(Enum):
    """What becomes of a request: the status and the text of the answer, or that it may pass."""

    PASSES = (200, "")
    ENTERS = (303, "")  # its token becomes a cookie
    UNKNOWN_HOST = (421, "This page is not served under that host name. See docs/observe.md, --dash-host.")
    WRONG_METHOD = (405, "This page can only be read.")
    NO_TOKEN = (401, "Open the address with the token that `paceline run --dash` printed.")

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.value[0]

    @property
    def text(self) -> str:
        """What the answer says."""
        return self.value[1]


@dataclass(frozen=True)
class Request:
    """What a decision needs of a request; the names of `headers` are in lower case."""

    method: str
    path: str
    query_token: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Access:
    """The rules of one page.

    Attributes:
        token: 128 random bits in hexadecimal.
        name: distinguishes the cookie from those of other pages, since browsers send cookies to every port of a host.
        hosts: further names under which the page may be asked for, as with a proxy, without ports.
        acts: whether actions are allowed, which are POST requests.
    """

    token: str
    name: str = ""
    hosts: frozenset[str] = frozenset()
    acts: bool = False

    @property
    def cookie(self) -> str:
        """The cookie's name."""
        return f"{COOKIE}-{self.name}" if self.name else COOKIE

    def decide(self, request: Request) -> Verdict:
        """Returns what becomes of a request, by its host, its method and its token, in this order."""
        if not self.knows(request.headers.get("host", "")):
            return Verdict.UNKNOWN_HOST
        if request.method != "GET" and not self._is_action(request):
            return Verdict.WRONG_METHOD
        if request.query_token is not None and request.method == "GET":
            return Verdict.ENTERS if self._is_token(request.query_token) else Verdict.NO_TOKEN
        return Verdict.PASSES if self._has_token(request.headers) else Verdict.NO_TOKEN

    def knows(self, host: str) -> bool:
        """Returns whether a Host header names this page. The port does not matter: `ssh -L` may have another."""
        match = _HOST.fullmatch(host)
        return match is not None and match[1].lower() in _LOOPBACK_HOSTS | self.hosts

    def _is_action(self, request: Request) -> bool:
        """Whether it is a POST that only a script of this page can send: forms cannot add a header."""
        return self.acts and request.method == "POST" and ACTION_HEADER in request.headers

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(token.strip())
        return any(self._is_token(value) for value in _cookies(headers.get("cookie", ""), self.cookie))

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


def new_token() -> str:
    """Returns a new token."""
    return secrets.token_hex(_TOKEN_NBYTES)


def name_of(run_id: str) -> str:
    """Returns a job's name with only those characters that may be in a cookie's name."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run_id)[:64]


def _cookies(header: str, name: str) -> list[str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for key, _, value in pairs if key == name]

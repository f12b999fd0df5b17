"""Asks the page of a job for its picture, over loopback or a Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.security.received import decoded

_TIMEOUT_S = 10.0


class UnreachableError(Exception):
    """The page does not answer, or refuses."""


@dataclass(frozen=True)
class Address:
    """Where a page is: on a port of `host`, or on the Unix socket `path`."""

    token: str
    host: str = "localhost"
    port: int = 0
    prefix: str = ""
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses the address that `paceline run --dash` printed.

        Raises:
            ValueError: it is no such address.
        """
        parts = urlsplit(text)
        token = parse_qs(parts.query).get("token", [""])[0]
        if parts.scheme != "http" or parts.port is None or not token:
            raise ValueError(
                f"{text!r} is not the address of a page, which looks like http://localhost:8080/?token=..."
            )
        return cls(token, parts.hostname or "localhost", parts.port, parts.path.rstrip("/"))


def picture(address: Address) -> dict[str, Any]:
    """Returns the picture of the job, as JSON has it.

    Raises:
        UnreachableError: nobody answers there, or the token is not the right one.
    """
    connection = _connection(address)
    headers = {"Authorization": f"Bearer {address.token}", "Host": f"localhost:{address.port or 80}"}
    try:
        connection.request("GET", f"{address.prefix}/picture.json", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"the job's launcher does not answer ({error}); has the job ended?") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise UnreachableError(f"the job's launcher refuses ({answer.status}): {body.decode(errors='replace')[:200]}")
    try:
        told = decoded(json.loads, body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise UnreachableError("what answers there is not the page of a job")
    return told


def _connection(address: Address) -> http.client.HTTPConnection:
    if address.path is not None:
        return _OverUnixSocket(address.path)
    return http.client.HTTPConnection(address.host, address.port, timeout=_TIMEOUT_S)


class _OverUnixSocket(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)

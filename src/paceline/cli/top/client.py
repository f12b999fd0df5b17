"""A client that fetches the state of a running job from its dashboard or, if there is none, from its recordings.

Jobs are identified by their dashboard's address or their directory; the default is the latest job. Dashboards listen on
loopback or on a Unix socket.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.errors import PacelineError
from paceline.operate.dashboard.external_collector import ExternalCollector, OutOfReachError
from paceline.operate.dashboard.server import ADDRESS_FILE
from paceline.operate.diagnosis.runs import JobRun, RunStatus, list_runs, read_run, runs_directory

_TIMEOUT_S = 10.0


class PageUnreachableError(PacelineError):
    """Raised if the dashboard does not respond or rejects the request."""


@dataclass(frozen=True)
class PageAddress:
    """The address of a dashboard: a port on `host`, or the Unix socket `path`."""

    token: str
    host: str = "localhost"
    port: int = 0
    prefix: str = ""
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> PageAddress:
        """Parses an address printed by `paceline run --dash`."""
        parts = urlsplit(text)
        token = parse_qs(parts.query).get("token", [""])[0]
        if parts.scheme != "http" or parts.port is None or not token:
            raise NoRunningJobError(
                f"{text!r} is not the address of a page, which looks like http://localhost:8080/?token=..."
            )
        return cls(token, parts.hostname or "localhost", parts.port, parts.path.rstrip("/"))


def picture(address: PageAddress) -> dict[str, Any]:
    """Fetches the job's state as decoded JSON.

    Raises:
        PageUnreachableError: no dashboard responds at the address, or the token is wrong.
    """
    if address.path is not None:
        connection: http.client.HTTPConnection = _UnixSocketConnection(address.path)
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {address.token}", "Host": f"localhost:{address.port or 80}"}
    try:
        connection.request("GET", f"{address.prefix}/picture.json", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise PageUnreachableError(f"the job's launcher does not answer ({error}); has the job ended?") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise PageUnreachableError(
            f"the job's launcher refused the request ({answer.status}): {body.decode(errors='replace')[:200]}"
        )
    try:
        content = decode_untrusted(json.loads, body)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise PageUnreachableError("the response is not from the page of a job")
    return content


class _UnixSocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


class NoRunningJobError(PacelineError):
    """Raised if the job does not exist or is not running."""


def find(target: str | None) -> PageAddress | JobRun:
    """Returns the address of a job's dashboard, or the job itself if it does not have a dashboard.

    `target` is an address printed by `paceline run --dash`, a job's directory, or a name listed by `paceline runs`. The
    default is the latest running job.

    Raises:
        NoRunningJobError: the job is not running or does not exist.
    """
    if target is None:
        for run in list_runs(runs_directory()):
            if run.state is RunStatus.RUNNING:
                return _of(run)
        raise NoRunningJobError(
            "none of your jobs is running on this machine; specify the directory of a job that was started with "
            "--log-dir"
        )
    if "://" in target:
        return PageAddress.parse(target)
    for directory in (Path(target), runs_directory() / target):
        found = read_run(directory)
        if found is not None and found.state is RunStatus.RUNNING:
            return _of(found)
        if found is not None:
            raise NoRunningJobError(
                f"{target} is not running: {found.state.value}; `paceline report {target}` shows what it has recorded"
            )
    raise NoRunningJobError(
        f"{target} is neither the directory of a job nor the address of a page; `paceline runs` lists the jobs"
    )


def _of(run: JobRun) -> PageAddress | JobRun:
    path = run.directory / ADDRESS_FILE
    if not path.is_file():
        return run
    try:
        facts = json.loads(path.read_text())
        return PageAddress(facts["token"], port=facts.get("port", 0), prefix=facts["prefix"], path=facts.get("path"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoRunningJobError(f"{path} cannot be read as the address of a page ({error})") from error


def poller_of(job: PageAddress | JobRun) -> Callable[[], dict[str, Any]]:
    """Returns a function that fetches the job's state as decoded JSON. It raises `PageUnreachableError` on failure."""
    if isinstance(job, PageAddress):
        return lambda: picture(job)
    view = ExternalCollector(job)

    def look() -> dict[str, Any]:
        try:
            taken: dict[str, Any] = json.loads(msgspec.json.encode(view.look()))
        except OutOfReachError as error:
            raise PageUnreachableError(str(error)) from error
        return taken

    return look

"""Server for the page, and the page's address.

The server runs on a separate thread, so that its failures do not affect the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import logging
import os
import secrets
import shlex
import socket
import stat
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.security.own_files import write_own
from paceline.operate.dashboard.access import Access
from paceline.operate.dashboard.job_sample import JobSample

if TYPE_CHECKING:
    from paceline.operate.dashboard.event_stream import Broadcaster


ADDRESS_FILE = "page.json"
"""The name of the file with the page's address and token, located in the job's directory."""

_SUGGESTED_PORT = 8080  # port on the user's own machine when the page uses a Unix socket
_STOP_S = 2.0
_START_S = 20.0
_MOST_ERRORS = 3
_LAST_S = 1  # time limit for responses in progress when the page is closed


class AddressError(ValueError):
    """Raised if the page cannot listen on its address."""


class MissingDashError(ValueError):
    """Raised if packages required by the page are not installed."""


@dataclass(frozen=True)
class ListenAddress:
    """Address of the page: `port` on loopback (0 for any free port), or the Unix socket `path`."""

    port: int = 0
    path: str | None = None

    def listen(self) -> socket.socket:
        """Opens a listening socket.

        Raises:
            AddressError: the address is in use, or the socket's directory does not exist.
        """
        return _listen_on_path(self.path) if self.path is not None else _listen_on_port(self.port)


def lines(listener: socket.socket, token: str, prefix: str = "") -> list[str]:
    """Returns the lines to print: the address, and commands for opening the page from another machine."""
    user, host = getpass.getuser(), socket.gethostname()
    name = listener.getsockname()
    query = f"{prefix}/?token={token}"
    if isinstance(name, str):
        ssh = f"ssh -L {_SUGGESTED_PORT}:{shlex.quote(name)} {user}@{host}"
        return [
            f"the page is on the Unix socket {name}; from your machine: {ssh}",
            f"then open http://localhost:{_SUGGESTED_PORT}{query}",
        ]
    port = name[1]
    return [
        f"the page is at http://localhost:{port}{query}",
        f"from another machine, first: ssh -L {port}:localhost:{port} {user}@{host}",
    ]


def write_address(path: Path, listener: socket.socket, token: str, prefix: str) -> None:
    """Writes the page's address to a file that only this user can read, if possible."""
    name = listener.getsockname()
    place = {"path": name} if isinstance(name, str) else {"port": name[1]}
    with contextlib.suppress(OSError):
        write_own(str(path), json.dumps({"token": token, "prefix": prefix, **place}).encode())


def _listen_on_port(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"--dash-port {port}: the page cannot listen on port {port} of loopback ({error.strerror}); without the "
            "flag, a free port is used"
        ) from error
    return listener


def _listen_on_path(path: str) -> socket.socket:
    """Opens a socket that only this user can access. Replaces an old socket on which no process listens."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressError(f"--dash-socket {path}: a file with this name exists and is not a socket")
        if _is_served(path):
            raise AddressError(f"--dash-socket {path}: another process serves that socket; choose another path")
        os.unlink(path)
    if not Path(path).parent.is_dir():
        raise AddressError(f"--dash-socket {path}: the directory {Path(path).parent} does not exist")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # on Linux, bind() creates the file with the mode of the socket's inode
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise AddressError(f"--dash-socket {path}: the page cannot listen there ({error.strerror})") from error
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


class DashboardServer:
    """Serves the page until `close` is called.

    Args:
        listener: the listening socket; the server closes it.
        look: a function that takes a sample of the job; called on the dashboard thread.
        access: the access rules.
        prefix: the path under which a proxy serves the page.
        actions: the page's actions by name; see `application`.
        complain: a function called with a one-line message if the page fails.

    Raises:
        MissingDashError: Starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        listener: socket.socket,
        look: Callable[[], JobSample],
        access: Access,
        prefix: str = "",
        actions: dict[str, Callable[[], str]] | None = None,
        complain: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_installed()
        self._listener = listener
        name = listener.getsockname()
        self._path = name if isinstance(name, str) else ""
        self._look = look
        self._access = access
        self._prefix = prefix
        self._actions = actions or {}
        self._complain = complain
        self._broadcaster: Broadcaster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-page", daemon=True)
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether a page is open or `paceline top` requests the state."""
        return self._broadcaster is not None and self._broadcaster.is_watched

    def close(self) -> None:
        """Stops the server and waits at most two seconds for the server's thread; idempotent."""
        self._began.wait(_START_S)
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_STOP_S)
        self._listener.close()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except Exception as error:  # an error in the page must not terminate the job
            self._complain(f"the page has failed and is closed; the job continues ({type(error).__name__}: {error})")
        finally:
            self._began.set()

    async def _serve(self) -> None:
        import uvicorn

        from paceline.operate.dashboard.application import PageConnections, application, protocol_of
        from paceline.operate.dashboard.event_stream import Broadcaster

        connections = PageConnections()
        broadcaster = self._broadcaster = Broadcaster(self._look, life=secrets.token_hex(4))
        config = uvicorn.Config(
            application(broadcaster, self._access, self._prefix, self._actions, connections.passed),
            loop="asyncio",
            http=protocol_of(connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=16384,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST_S,
        )
        server = uvicorn.Server(config)
        logger, errors = logging.getLogger("uvicorn.error"), _RequestErrors(self._complain)
        logger.addHandler(errors)
        logger.propagate = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._began.set()
        sampling = asyncio.create_task(broadcaster.run())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            await asyncio.wait([sampling, serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if broadcaster.is_watched and not sampling.done():
                broadcaster.sample()  # takes a last sample, which contains the job's outcome
            broadcaster.end()
            server.should_exit = True
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([sampling, serving], timeout=_STOP_S)
            logger.removeHandler(errors)
        for task in (sampling, serving):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class _RequestErrors(logging.Handler):
    """Reports exceptions raised while the page's requests are handled, each on one line, except for cancelled requests.

    At most `_MOST_ERRORS` exceptions are reported, because anyone could fill the log with malformed requests. The
    errors of the HTTP library are not reported, because they describe the request.
    """

    def __init__(self, complain: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._complain = complain
        self._thread = threading.get_ident()  # this page's thread; all pages share the logger
        self._left = _MOST_ERRORS

    def emit(self, record: logging.LogRecord) -> None:
        """Reports one record."""
        error = record.exc_info[1] if record.exc_info else None
        is_mine = record.thread == self._thread
        if not is_mine or error is None or isinstance(error, asyncio.CancelledError):
            return
        if self._left and not type(error).__module__.startswith("h11."):
            self._left -= 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._complain(
                f"the page could not answer a request ({type(error).__name__}: {error}, in {frame.filename}:"
                f"{frame.lineno}); the job is not affected{'' if self._left else '; further errors are not reported'}"
            )


def check_installed() -> None:
    """Checks that the packages required by the page are installed, without importing them.

    Raises:
        MissingDashError: a package is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingDashError(
            f"--dash needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'paceline[dash]'"
        )

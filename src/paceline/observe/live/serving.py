"""Runs the page in a thread of its own, so that whatever happens to it does not disturb the job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.observe.live.access import Access
from paceline.observe.live.sample import Sample

if TYPE_CHECKING:
    from paceline.observe.live.hub import Hub

_STOP_S = 2.0
_START_S = 20.0
_LAST_S = 0.2  # for the last message to reach the viewers


class MissingDashError(ValueError):
    """The packages that the page needs are not installed."""


class Serving:
    """A page that is being served until `close`.

    Args:
        listener: a listening socket, which it takes over.
        look: takes a sample of the job; it is called in the page's thread.
        access: who may read it.
        prefix: the path under which a proxy serves it.
        actions: what may be asked for.
        complain: is told once, in a line, if the page fails; the job goes on.

    Raises:
        MissingDashError: Starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        listener: socket.socket,
        look: Callable[[], Sample],
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
        self._hub: Hub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-page", daemon=True)
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether anybody looks, with a page that is open or as `paceline top` does."""
        return self._hub is not None and self._hub.is_watched

    def close(self) -> None:
        """Ends the page; waits for its thread for two seconds at most. Idempotent."""
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
        except Exception as error:  # the page is a convenience; nothing that happens here may end the job
            self._complain(f"the page has failed and is gone; the job goes on ({type(error).__name__}: {error})")
        finally:
            self._began.set()

    async def _serve(self) -> None:
        import uvicorn

        from paceline.observe.live.connections import PageConnections, protocol_of
        from paceline.observe.live.hub import Hub
        from paceline.observe.live.server import application

        connections = PageConnections()
        hub = self._hub = Hub(self._look, life=secrets.token_hex(4))
        config = uvicorn.Config(
            application(hub, self._access, self._prefix, self._actions, connections.passed),
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
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._began.set()
        sampling = asyncio.create_task(hub.run())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            await asyncio.wait([sampling, serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if hub.is_watched and not sampling.done():
                hub.sample()  # how the job has ended
                await asyncio.sleep(_LAST_S)
            server.should_exit = server.force_exit = True
            sampling.cancel()
            await asyncio.wait([sampling, serving], timeout=_STOP_S)
        for task in (sampling, serving):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def check_installed() -> None:
    """Checks that the page's packages can be imported, without importing them.

    Raises:
        MissingDashError: one of them is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingDashError(
            f"--dash needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'paceline[dash]'"
        )

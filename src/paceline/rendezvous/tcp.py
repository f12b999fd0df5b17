"""Opens the store that rank 0 serves over TCP and the other ranks dial."""

from __future__ import annotations

from datetime import timedelta

from paceline.errors import PacelineError
from paceline.rendezvous.staying import end_staying
from paceline.store.base import Store
from paceline.store.tcp import PortInUseError, TCPStore

_ANOTHER_RANK_0 = timedelta(seconds=5)


def serve_or_connect(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Serves on rank 0, connects on the others.

    Raises:
        PortInUseError: on rank 0, another program has the port.
        StoreConnectionError: nobody serves there.
    """

    def connect(serve: bool, within: timedelta) -> Store:
        store = TCPStore(host, port, world_size, serve, within, wait_for_workers=False)
        store.set_timeout(timeout)
        return store

    if rank != 0:
        return connect(False, timeout)
    end_staying()
    try:
        return connect(True, timeout)
    except PortInUseError as error:
        # Another process that was also started as rank 0 may serve there; then all ranks have to hear of it.
        try:
            return connect(False, min(timeout, _ANOTHER_RANK_0))
        except (PacelineError, OSError):
            raise error from None

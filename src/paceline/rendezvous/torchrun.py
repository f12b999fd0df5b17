"""Rendezvous under torchrun: its own TCPStore holds MASTER_PORT, so the ranks of one machine meet in a file store."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import quote

from paceline.security.own_files import own_directory
from paceline.store.base import Store
from paceline.store.file import FileStore


def open_file(port: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store of the ranks that torchrun started on this machine.

    Raises:
        ValueError: there are several machines.
        RendezvousError: other users have access to the directory for such stores.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise ValueError(
            "torchrun holds MASTER_PORT for a store of its own, so ranks on several machines cannot meet there; "
            "give init_method='tcp://host:port' with another port"
        )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = quote(f"{run}-{port}-{attempt}", safe="")
    return FileStore(os.path.join(own_directory(), name), world_size, timeout)

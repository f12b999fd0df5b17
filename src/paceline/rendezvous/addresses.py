"""Reads `tcp://host:port` and `file:///path`: where the ranks meet, and this one's `?rank=..&world_size=..`."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from paceline.rendezvous.environment import STORE, is_torch_store
from paceline.rendezvous.tcp import serve_or_connect
from paceline.store.base import Store
from paceline.store.file import FileStore


def place(url: str, rank: int, world_size: int) -> tuple[int, int]:
    """Returns rank and world size; where an argument is -1, takes it from the URL.

    Raises:
        ValueError: the URL does not have them, or they are no whole numbers.
    """
    split = urlsplit(url)
    query = parse_qs(split.query)
    if rank < 0 and "rank" in query:
        rank = _whole(query["rank"][0], "rank", split)
    if world_size < 0 and "world_size" in query:
        world_size = _whole(query["world_size"][0], "world_size", split)
    if rank < 0 or world_size < 0:
        missing = " and ".join(name for name, value in (("rank", rank), ("world_size", world_size)) if value < 0)
        raise ValueError(
            f"{split.scheme}:// needs {missing} as arguments of init_process_group; it has no other source"
        )
    return rank, world_size


def _whole(value: str, name: str, split: SplitResult) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} in {split.geturl()!r} is {value!r}; it must be a whole number") from None


def is_launchers(url: str) -> bool:
    """Returns whether no rank can serve a store at the address, since it is MASTER_PORT and the launcher serves one."""
    try:
        port = urlsplit(url).port
    except ValueError:
        return False
    return port is not None and STORE in os.environ and is_torch_store(port)


def open_store(url: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store at the address.

    Raises:
        ValueError: the address is incomplete.
        StoreConnectionError: nobody serves it.
    """
    split = urlsplit(url)
    if split.scheme == "file":
        if split.netloc or not split.path:
            raise ValueError(f"{url!r} must name an absolute path after three slashes: file:///shared/path")
        return FileStore(unquote(split.path), world_size, timeout)
    try:
        host, port = split.hostname, split.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if not host or not port:
        raise ValueError(f"{url!r} must name rank 0's host and a port: tcp://host:port, tcp://[::1]:port for IPv6")
    return serve_or_connect(host, port, rank, world_size, timeout)

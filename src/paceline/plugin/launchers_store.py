"""Lets torch.distributed meet several times in the store that `paceline run` serves for it, or in one of its own.

The launcher's store outlives a process group, and so do the keys of that group. Torch would find the addresses of ended
processes there when a program makes its default group again, so each meeting after the first has a prefix of its own.
Torch would also take every other address for the launcher's; at those, rank 0 serves the store as without a launcher.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

_MAKER = "_create_c10d_store"
_LONGEST_PAUSE_S = 0.25


@functools.cache
def take_over() -> None:
    """Replaces the function by which torch.distributed opens a store for `env://` and `tcp://`; idempotent."""
    rendezvous = vars(import_module("torch.distributed.rendezvous"))
    original = rendezvous[_MAKER]
    signature = inspect.signature(original)
    meetings = 0

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        from paceline.rendezvous.environment import is_torch_store

        nonlocal meetings
        given = signature.bind(*args, **options).arguments
        if is_torch_store(given["port"]):
            _await_store(given["hostname"], given["port"], given["timeout"])
            store = original(*args, **options)
            meetings += 1
            return store if meetings == 1 else PrefixStore(f"meeting/{meetings}", store)
        more = {name: given[name] for name in ("use_libuv",) if name in given}
        return TCPStore(
            host_name=given["hostname"],
            port=given["port"],
            world_size=given["world_size"],
            is_master=given["rank"] == 0,
            timeout=given["timeout"],
            multi_tenant=True,
            **more,
        )

    rendezvous[_MAKER] = make


def _await_store(host: str, port: int, timeout: timedelta) -> None:
    """Has the launcher open its store for torch, and returns when that listens, or the time is up.

    Torch's own client would report each attempt that came too early, and then wait for a second.
    """
    from paceline.rendezvous.environment import TORCH_STORE_REQUESTS

    if path := os.environ.get(TORCH_STORE_REQUESTS):
        with contextlib.suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as pipe:
            pipe.write(b"\n")
    until_s, pause_s = time.monotonic() + timeout.total_seconds(), 0.002
    while (left_s := until_s - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), left_s):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

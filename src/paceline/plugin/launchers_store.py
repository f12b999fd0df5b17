"""Lets torch.distributed meet several times in the store that `paceline run` serves for it, or in one of its own.

The launcher's store outlives a process group, and so do the keys of that group. Torch would find the addresses of ended
processes there when a program makes its default group again, so each meeting after the first has a prefix of its own.
Torch would also take every other address for the launcher's; at those, rank 0 serves the store as without a launcher.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

_MAKER = "_create_c10d_store"


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

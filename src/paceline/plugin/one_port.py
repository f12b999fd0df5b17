"""In a job with one port, torch.distributed's `env://` meets at a store of Paceline's.

Torch's own store would need another port. This is installed at the end of `import torch`, so it imports the rest when
it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as TorchStore

    from paceline.store.base import Store

_stores: list[Store] = []  # the one that this process uses for all its meetings; rank 0 serves it until it ends
_lent: list[TorchStore] = []  # of this process's meetings; torch's C++ keeps only its own side of a store alive


def take_over() -> None:
    """Replaces what torch.distributed does for `env://`, unless torchrun, which serves a store itself, started this."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torch.distributed also has a function of this name
        vars(import_module("torch.distributed.rendezvous"))["_rendezvous_handlers"]["env"] = meet


def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """Yields the store, the rank and the world size, as torch's own handler does.

    Raises:
        ValueError: the environment has no rank, world size or address.
        StoreError: nobody serves the store.
    """
    from paceline.plugin.lending import LentStore
    from paceline.rendezvous.environment import open_store, place
    from paceline.store.base import DEFAULT_TIMEOUT
    from paceline.store.prefix import PrefixStore

    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    query = parse_qs(urlsplit(url).query)
    rank, world_size = place(*(int(query[name][0]) if name in query else -1 for name in ("rank", "world_size")))
    if not _stores:
        _stores.append(open_store(rank, world_size, timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    here = PrefixStore(f"torch/{attempt}/{len(_lent)}", _stores[0])
    here.set_timeout(timeout)
    _lent.append(LentStore(here))
    yield _lent[-1], rank, world_size
    raise RuntimeError("torch.distributed cannot meet a second time in one rendezvous by env://")

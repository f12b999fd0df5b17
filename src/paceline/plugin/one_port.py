"""In a job with one port, torch.distributed's `env://` meets at a store of Paceline's: torch's own would need another port.

It is installed at the end of `import torch`, so it imports the rest when it is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import rendezvous as torchs

if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore

    from paceline.store.base import Store

_lent: list[TorchStore] = []  # of this process's meetings; torch's C++ keeps only its own side of a store alive


def take_over() -> None:
    """Replaces what torch.distributed does for `env://`, unless torchrun, which has a store of its own, started this."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        torchs._rendezvous_handlers["env"] = meet


def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """Yields the store, the rank and the world size, as torch's own handler does.

    Raises:
        ValueError: the environment has no rank, world size or address.
        StoreError: nobody serves the store.
    """
    from paceline.plugin.lending import LentStore
    from paceline.rendezvous.environment import place
    from paceline.store.base import DEFAULT_TIMEOUT
    from paceline.store.prefix import PrefixStore

    query = {name: int(values[0]) for name, values in parse_qs(urlsplit(url).query).items()}
    rank, world_size = place(query.get("rank", -1), query.get("world_size", -1))
    store = _open_store(rank, world_size, timeout if timeout is not None else DEFAULT_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _lent.append(LentStore(PrefixStore(f"torch/{attempt}/{len(_lent)}", store)))
    yield _lent[-1], rank, world_size
    raise RuntimeError("torch.distributed cannot meet a second time in one rendezvous by env://")


@functools.cache
def _open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Returns the store, which this process uses for all its meetings: rank 0 serves it until it ends."""
    from paceline.rendezvous.environment import open_store

    return open_store(rank, world_size, timeout)

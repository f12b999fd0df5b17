"""Paceline as a torch.distributed backend: `torch.distributed.init_process_group("paceline")`.

PyTorch locates `register` through an entry point and calls it at the end of `import torch`. Therefore `register` never
raises an exception, and this module imports other modules only when needed. torch.distributed's `env://` rendezvous
uses a Paceline store, because torch's own store would require a second port per job.

May use: `group` and below. Start reading at `process_group.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as TorchStore

    from paceline.comm.store.store import Store


_stores: list[Store] = []  # at most one, for all rendezvous in this process; rank 0's store includes the server
_lent: list[TorchStore] = []  # one per rendezvous; torch's C++ code does not keep Python stores alive


def register() -> None:
    """Registers the backend "paceline" with torch.distributed; logs a warning on failure."""
    try:
        import torch.distributed as torch_dist

        if not torch_dist.is_available() or "paceline" in torch_dist.Backend.backend_list:
            return
        torch_dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu", "cuda"])
        if find_spec("torch.distributed._dist2") is not None:  # PyTorch 2.8 to 2.13
            import_module("torch.distributed._dist2").register_backend("paceline", _create_alone)
        if "torch" in os.environ.get("PACELINE_COMPAT", "").split(","):  # set by `paceline run --compat torch`
            import_module("paceline.interop.torch_backend.patches").replace_gloo()
        if os.environ.get("PACELINE_TORCH_STORE"):  # set by `paceline run`, which serves torch's store on MASTER_PORT
            patches = import_module("paceline.interop.torch_backend.patches")
            patches.replace_store_factory()
            patches.request_store_for_clients()
            patches.record_store_waits()
        if os.environ.get("PACELINE_PORT"):
            replace_env_handler()
    except Exception as error:
        import logging

        # Uses logging, because a filter could turn a Python warning into an error and break `import torch`.
        logging.getLogger(__name__).warning(
            "the backend 'paceline' could not be registered with torch.distributed: %r", error
        )


def _create(options: object, pg_options: object = None) -> object:
    from paceline.interop.torch_backend.device_backend import create

    return create(options, pg_options)


def _create_alone(store: Any, rank: int, world_size: int, timeout: Any, device: Any, **options: object) -> object:
    from paceline.interop.torch_backend.device_backend import create_alone

    return create_alone(store, rank, world_size, timeout, device, options)


def lend_default_group() -> None:
    """Creates torch.distributed's default group from Paceline's default group, with the backend "paceline".

    All ranks must call this after `paceline.init_process_group()`. The rendezvous uses Paceline's store and needs
    neither the environment variables nor the port of torch's `env://`. Destroy torch's group with
    `torch.distributed.destroy_process_group()` before you destroy Paceline's.

    Raises:
        ValueError: Paceline's default group does not exist, or torch's default group already exists.
    """
    import torch.distributed as torch_dist

    from paceline.comm.group.default import default_world
    from paceline.comm.store.store import PrefixStore
    from paceline.interop.torch_backend.rendezvous import StoreForTorch

    register()
    world = default_world()
    rank, size, timeout = world.group.rank(), world.group.size(), timedelta(seconds=world.timeout_s)
    store = StoreForTorch(PrefixStore("torch", world.store))
    torch_dist.init_process_group("paceline", store=store, rank=rank, world_size=size, timeout=timeout)
    vars(torch_dist.group.WORLD)["lent_store"] = store  # torch's C++ code does not keep Python stores alive


def replace_env_handler() -> None:
    """Replaces torch.distributed's handler for `env://`, except under torchrun, which serves its own store."""
    # `import_module`, because the attribute `rendezvous` is a function
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        vars(import_module("torch.distributed.rendezvous"))["_rendezvous_handlers"]["env"] = env_rendezvous_handler


def env_rendezvous_handler(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[TorchStore, int, int]]:
    """Yields the store, the rank and the world size, like torch's own handler."""
    from paceline.comm.rendezvous.environment import open_store, rank_and_world_size
    from paceline.comm.store.store import DEFAULT_TIMEOUT, PrefixStore
    from paceline.interop.torch_backend.rendezvous import StoreForTorch

    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    query = parse_qs(urlsplit(url).query)
    rank, world_size = rank_and_world_size(
        *(int(query[name][0]) if name in query else -1 for name in ("rank", "world_size"))
    )
    if not _stores:
        _stores.append(open_store(rank, world_size, timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"torch/{attempt}/{len(_lent)}", _stores[0])
    store.set_timeout(timeout)
    _lent.append(StoreForTorch(store))
    yield _lent[-1], rank, world_size
    raise RuntimeError("torch.distributed cannot use the same env:// rendezvous a second time")

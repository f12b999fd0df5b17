"""Replacements for private functions in torch.distributed.

- `replace_gloo` (`paceline run --compat torch`): torch.distributed creates all groups in one function. The replacement
  requests the backend "paceline" instead of gloo. `get_backend`, profiles and DDP's logging still report gloo, because
  programs may depend on the name.
- `replace_store_factory`: the store that `paceline run` serves for torch outlives process groups. A program that
  creates its default group again would find the addresses of earlier processes, so each rendezvous after the first uses
  its own key prefix. The replacement also prevents torch from using the launcher's store for other addresses; for such
  addresses, rank 0 serves a store, as without a launcher.
- `request_store_for_clients`: the launcher's store only starts listening on request. A program that creates a client at
  MASTER_PORT itself, with `TCPStore`, requests the store with its first attempt to connect.
- `record_store_waits`: a program's wait for a key in a store is not a recorded call. The replacements for the store's
  methods record the key of a long wait, so that the launcher can report it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from paceline import _core

_STORE_FACTORY = "_create_c10d_store"
_LONGEST_PAUSE_S = 0.25
_SHORT_WAIT_S = 2.0  # shorter waits on a store are not recorded
_GRACE_S = 1.0  # time for a rank to start a store of its own before clients request the launcher's
_TCP_STORE_ARGUMENTS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"),
    *("master_listen_fd", "use_libuv"),
)
_TCP_STORE_TIMEOUT = timedelta(minutes=5)  # torch's default
_GLOO, _OURS = "gloo", "paceline"
_MIXES_FROM = (2, 14)  # the first PyTorch release that permits a Python backend in a combination of backends
_GROUP_FACTORY = "_new_process_group_helper"
_FIGURES = "_get_ddp_logging_data"


@functools.cache
def replace_gloo() -> None:
    """Makes torch.distributed create Paceline groups instead of gloo groups for CPU tensors. Idempotent."""
    original = getattr(c10d, _GROUP_FACTORY)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        requested = c10d.Backend(str(given.arguments["backend"]))
        has_options = any(given.arguments.get(name) is not None for name in ("backend_options", "pg_options"))
        ours = None if has_options else in_place_of(requested)
        if not given.arguments["global_ranks_in_group"] and given.arguments["group_rank"] == 0:
            _report_replacement(requested, ours, given.arguments["group_size"], has_options)
        if ours is None:
            return original(*args, **options)
        given.arguments["backend"] = c10d.Backend(ours)
        group, store = original(*given.args, **given.kwargs)
        if group in c10d._world.pg_map:  # true only on members of the group
            c10d._world.pg_map[group] = (requested, store)
            # Imported late, because `import torch` loads this module.
            from paceline.interop.torch_backend.device_backend import paceline_group_of

            if (part := paceline_group_of(group)) is not None:
                part.report_backend_as(_GLOO)
        return group, store

    setattr(c10d, _GROUP_FACTORY, make)
    _keep_requested_names()


def in_place_of(requested: str) -> str | None:
    """Returns the backend string that replaces `requested`, or None if Paceline does not replace any part of it."""
    devices = dict(c10d.BackendConfig(c10d.Backend(requested)).get_device_backend_map())
    if devices.get("cpu") != _GLOO:
        return None
    of_gpus = devices.get("cuda") if torch.cuda.device_count() else None
    if of_gpus is None:
        return _OURS
    if release() >= _MIXES_FROM:
        return f"cpu:{_OURS},cuda:{of_gpus}"
    return _OURS if of_gpus == _GLOO else None


def release() -> tuple[int, int]:
    """Returns PyTorch's release as a tuple such as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _keep_requested_names() -> None:
    """Makes the logging data of PyTorch's DDP report the backend that the program requested."""
    original: Callable[[DistributedDataParallel], dict[str, Any]] = getattr(DistributedDataParallel, _FIGURES)

    @functools.wraps(original)
    def figures(self: DistributedDataParallel) -> dict[str, Any]:
        found = original(self)
        if found.get("backend_name") == _OURS:
            found["backend_name"] = c10d.get_backend(self.process_group)
        return found

    setattr(DistributedDataParallel, _FIGURES, figures)


def _report_replacement(requested: str, ours: str | None, size: int, has_options: bool) -> None:
    """Prints one line on rank 0 that states whether the default group uses Paceline."""
    named = "no backend" if requested == "undefined" else f"the backend {requested}"
    who = (
        f"paceline: --compat torch: torch.distributed's group of {size} ranks, for which the script specifies {named},"
    )
    if ours is not None:
        text = f"{who} uses Paceline's engine for CPU tensors"
    elif has_options:
        text = f"{who} is unchanged because it has pg_options, which are for that backend only"
    elif c10d.BackendConfig(c10d.Backend(requested)).get_device_backend_map().get("cpu") == _GLOO:
        text = (
            f"{who} is unchanged: with nccl in the same group, this requires PyTorch 2.14 or newer (this is "
            f"{torch.__version__})"
        )
    else:
        text = f"{who} is unchanged: it has no gloo, which Paceline would replace"
    print(text, file=sys.stderr, flush=True)


@functools.cache
def replace_store_factory() -> None:
    """Replaces the function that creates torch.distributed's store for `env://` and `tcp://`. Idempotent."""
    rendezvous = vars(import_module("torch.distributed.rendezvous"))
    original = rendezvous[_STORE_FACTORY]
    signature = inspect.signature(original)
    rendezvous_count = 0

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        from paceline.comm.rendezvous.environment import is_torch_store, require_started

        nonlocal rendezvous_count
        given = signature.bind(*args, **options).arguments
        if is_torch_store(given["port"]):
            require_started(given["rank"], given["world_size"])
            _await_store(given["hostname"], given["port"], given["timeout"])
            store = original(*args, **options)
            rendezvous_count += 1
            return store if rendezvous_count == 1 else PrefixStore(f"rendezvous/{rendezvous_count}", store)
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

    rendezvous[_STORE_FACTORY] = make


@functools.cache
def request_store_for_clients() -> None:
    """Makes clients at MASTER_PORT (`TCPStore(host, port)`) request the launcher's store. Idempotent.

    If a rank serves a store at this port, the launcher's store is not needed, and clients connect to that rank.
    """
    # `import torch` loads this file before torch.distributed has this name
    from torch._C._distributed_c10d import TCPStore

    original = TCPStore.__init__

    @functools.wraps(original)
    def make(store: TCPStore, *args: Any, **options: Any) -> None:
        from paceline.comm.rendezvous.environment import is_torch_store

        given = {**dict(zip(_TCP_STORE_ARGUMENTS, args, strict=False)), **options}
        host, port = given.get("host_name"), given.get("port")
        if not isinstance(host, str) or not isinstance(port, int) or not is_torch_store(port):
            return original(store, *args, **options)
        if not given.get("is_master", False):
            timeout = given.get("timeout")
            _await_store(host, port, timeout if isinstance(timeout, timedelta) else _TCP_STORE_TIMEOUT, _GRACE_S)
        elif given.get("master_listen_fd") is None and _is_listening(host, port):
            given["is_master"] = False  # a client that did not wait for this rank has requested the launcher's store
            return original(store, **given)
        return original(store, *args, **options)

    setattr(TCPStore, "__init__", make)  # noqa: B010  # mypy does not permit the assignment


@functools.cache
def record_store_waits() -> None:
    """Patches torch's stores so that methods that wait for keys record these keys. Idempotent."""
    for name in ("get", "wait", "multi_get", "queue_pop"):
        setattr(c10d.Store, name, _recorded(getattr(c10d.Store, name)))


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(store: c10d.Store, *args: Any, **options: Any) -> Any:
        from paceline.comm.record.spans import is_called_by_main_program  # late, because `import torch` loads this file

        if not _core.is_recording() or not is_called_by_main_program():
            return method(store, *args, **options)
        with _StoreWait(method.__name__, args[0] if args else next(iter(options.values()), "")):
            return method(store, *args, **options)

    return call


class _StoreWait:
    """A wait for keys in torch's store. A timer records the wait if it is long, because the wait blocks its thread."""

    def __init__(self, method: str, keys: str | Sequence[str]) -> None:
        self._method, self._keys = method, [keys] if isinstance(keys, str) else list(keys)
        self._lock = threading.Lock()
        self._timer = threading.Timer(_SHORT_WAIT_S, self._record)
        self._timer.daemon = True
        self._has_ended = False
        self._stamp = 0

    def __enter__(self) -> None:
        self._began_s = time.monotonic()
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            _core.record_end(self._stamp)

    def _record(self) -> None:
        with self._lock:
            if not self._has_ended:
                from paceline.comm.record.spans import begin_store_wait

                self._stamp = begin_store_wait(self._method, self._keys, self._began_s)


def _await_store(host: str, port: int, timeout: timedelta, grace_s: float = 0.0) -> None:
    """Waits until a store is listening or the timeout has passed. Requests torch's store from the launcher.

    A rank has `grace_s` seconds to start a store of its own on this port before the launcher's store is requested.
    Without this wait, torch's client would log each failed attempt and pause for a second.
    """
    now_s = time.monotonic()
    until_s, pause_s = now_s + timeout.total_seconds(), 0.002
    request_s = min(now_s + grace_s, until_s)
    is_requested = False
    while True:
        if not is_requested and time.monotonic() >= request_s:
            _request_store()
            is_requested = True
        if (left_s := until_s - time.monotonic()) <= 0 or _is_listening(host, port, left_s):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _request_store() -> None:
    from paceline.comm.rendezvous.environment import TORCH_STORE_REQUESTS

    if path := os.environ.get(TORCH_STORE_REQUESTS):
        with contextlib.suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as pipe:
            pipe.write(b"\n")


def _is_listening(host: str, port: int, timeout_s: float = 1.0) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True

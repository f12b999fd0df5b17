"""PyTorch's process groups, constructed directly rather than through torch.distributed.

In PyTorch, a watchdog thread terminates the process if a call on a device fails or times out. Paceline enforces
timeouts itself. Groups are therefore constructed with settings that disable this thread, and are stopped with
`OwnedProcessGroup.abort`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.adapters.device_streams import activated
from paceline.comm.store.store import Store

# PyTorch's own timeout for calls, which must never expire. In milliseconds, it must fit in 31 bits.
NEVER = timedelta(days=20)
_ABORTING_S = 10.0
_POLLING_S = 0.01

_WITHOUT_WATCHDOG: Mapping[str, str | None] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a failed call must not terminate the process
    "NCCL_ASYNC_ERROR_HANDLING": None,  # the former name of the same setting
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # `wait` must not block the thread
    "NCCL_BLOCKING_WAIT": None,
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a late heartbeat must not terminate the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a device error must not terminate the process
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # would re-enable TORCH_NCCL_ASYNC_ERROR_HANDLING
    "NCCL_DESYNC_DEBUG": None,
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # irrelevant: each direction has its own group
}
_environment = threading.Lock()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Sets the variables and debug level that PyTorch reads when it constructs a group; restores them on exit.

    The debug level matters because TORCH_DISTRIBUTED_DEBUG=DETAIL implies TORCH_NCCL_DESYNC_DEBUG.
    """
    with _environment:
        before = {name: os.environ.get(name) for name in _WITHOUT_WATCHDOG}
        level = torch_dist.get_debug_level()
        _set_variables(_WITHOUT_WATCHDOG)
        if level == torch_dist.DebugLevel.DETAIL:
            torch_dist.set_debug_level(torch_dist.DebugLevel.INFO)
        try:
            yield
        finally:
            torch_dist.set_debug_level(level)
            _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class TorchStore(c10d.Store):
    """Adapter through which a process group uses Paceline's store as if it were one of PyTorch's stores.

    Args:
        prefix: a prefix for all keys.
        deadline: the value of `time.monotonic()` after which waiting for a key fails. If None, the store's
            timeout applies.
    """

    def __init__(self, store: Store, prefix: str = "", deadline: float | None = None) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self.deadline = deadline

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        if self.deadline is not None:
            self.wait([key])
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number and returns the sum."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns True if all keys are set."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys."""
        if self.deadline is not None:
            remaining = timedelta(seconds=max(0.0, self.deadline - time.monotonic()))
            timeout = remaining if timeout is None else min(timeout, remaining)
        self._store.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it was set."""
        return self._store.delete_key(self._prefix + key)

    def clone(self) -> TorchStore:
        """Returns the store itself, which is thread-safe."""
        return self


class OwnedProcessGroup:
    """A PyTorch process group that is shut down exactly once, by `shut_down` or `abort`.

    Args:
        group: the PyTorch process group, which this object shuts down.
        store: the group's store, kept alive because the group does not hold a reference to it.

    Attributes:
        device: the device of the group's tensors. The threads that end the group make this device current, because NCCL
            restores a thread's current device after it has released a communicator, and thereby creates a context on
            that device.
    """

    def __init__(self, group: Any, store: c10d.Store) -> None:
        self.group = group
        self.device = torch.device("cpu")
        self._store = store
        self._ended = False

    def error(self) -> str | None:
        """Returns the name of an error that the library has reported for a call in progress, or None."""
        try:
            error = self.group.get_error()
        except (AttributeError, RuntimeError):  # not all releases and groups report errors
            return None
        return None if error.name == "SUCCESS" else f"{error.name}"

    def abort(self) -> None:
        """Aborts the group immediately; its calls' results are undefined. Idempotent; any thread may call this."""
        if not self._ended:
            self._ended = True
            run_bounded(self._end_now, time.monotonic() + _ABORTING_S, "abort")

    def shut_down(self, deadline: float, stopped: Callable[[], bool]) -> bool:
        """Shuts down the group when its calls are complete on all ranks; returns whether this succeeded in time.

        If the shutdown does not succeed, or if `stopped` returns True, the group is aborted. Idempotent.
        """
        if self._ended:
            return True
        self._ended = True
        if _method(self.group, "shutdown") is None:
            return True
        if run_bounded(self._end, deadline, "shutdown", stopped):
            return True
        run_bounded(self._end_now, time.monotonic() + _ABORTING_S, "abort")
        return False

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError), activated(self.device):  # raised by groups that need no shutdown
            if (shutdown := _method(self.group, "shutdown")) is not None:
                shutdown()

    def _end_now(self) -> None:
        abort = _method(self.group, "abort")
        with contextlib.suppress(RuntimeError), contextlib.ExitStack() as on_device:
            with contextlib.suppress(RuntimeError):  # a failed device may refuse to become current
                on_device.enter_context(activated(self.device))
            if abort is not None:
                abort()


def _method(group: Any, name: str) -> Callable[[], object] | None:
    """Returns a group's method, or None; in older releases of PyTorch, the name may begin with an underscore."""
    method: Callable[[], object] | None = getattr(group, name, None) or getattr(group, f"_{name}", None)
    return method


def run_bounded(
    function: Callable[[], object], deadline: float, name: str, stopped: Callable[[], bool] = lambda: False
) -> bool:
    """Runs a function, which might hang, on a separate thread; returns whether it completed before `deadline`.

    Args:
        function: a function that may block forever.
        deadline: the value of `time.monotonic()` at which to give up. The thread then keeps running.
        stopped: a function that is polled during the wait; the wait ends when it returns True.

    Raises:
        Exception: `function` raised it.
    """
    ended = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised again on the calling thread
            raised.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name=f"paceline-{name}", daemon=True).start()
    while not ended.wait(_POLLING_S):
        if stopped() or time.monotonic() > deadline:
            break
    if raised:
        raise raised[0]
    return ended.is_set()


def device_types(backend: str) -> list[str]:
    """Returns the types of accelerators that a backend supports, according to torch.distributed's registry."""
    served = [
        device_type
        for device_type, name in c10d.Backend.default_device_backend_map.items()
        if name == backend and device_type != "cpu"
    ]
    return served or [device for device in c10d.Backend.backend_capability.get(backend, ()) if device != "cpu"]


def is_registered(backend: str) -> bool:
    """Returns True if torch.distributed can create a process group with this name for an accelerator."""
    if backend in ("gloo", "mpi", "ucc", "fake", "paceline", "threaded"):
        return False
    return hasattr(c10d, f"ProcessGroup{backend.upper()}") or backend.upper() in c10d.Backend._plugins


def backend_for(device_type: str) -> str | None:
    """Returns the backend that PyTorch uses for this type of accelerator, or None if there is none."""
    backend = c10d.Backend.default_device_backend_map.get(device_type)
    return backend if backend is not None and is_registered(backend) else None


def construct(backend: str, store: TorchStore, rank: int, size: int) -> OwnedProcessGroup:
    """Constructs a backend's process group for an accelerator.

    A group that connects during construction, rather than in its first call, waits for the other ranks, possibly for
    too long. Use `run_bounded` to limit the wait.
    """
    with _without_watchdog() if backend.startswith("nccl") else contextlib.nullcontext():
        return OwnedProcessGroup(_constructed(backend, store, rank, size), store)


def _constructed(backend: str, store: TorchStore, rank: int, size: int) -> Any:
    kind = getattr(c10d, f"ProcessGroup{backend.upper()}", None)
    if kind is not None:
        # Since release 2.15, PyTorch also registers functions for its own backends once a program uses them. The
        # function for nccl returns another class, which has its own watchdog and is bound to the device LOCAL_RANK.
        settings = kind.Options()
        settings._timeout = NEVER
        return kind(store, rank, size, settings)
    plugin = c10d.Backend._plugins[backend.upper()]
    if plugin.extended_api:
        options = c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id, options.global_ranks_in_group = NEVER, "", list(range(size))
        return plugin.creator_fn(options, None)
    return plugin.creator_fn(store, rank, size, NEVER)


def version_of(backend: str) -> str:
    """Returns the name of a backend's library and, if PyTorch reports it, the version, for error messages."""
    if backend != "nccl":
        return backend
    library = "RCCL" if torch.version.hip else "NCCL"
    with contextlib.suppress(RuntimeError, AttributeError):
        return f"{library} {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return library

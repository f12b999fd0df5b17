"""Adapters between Paceline's stores and those of torch.distributed, and creation of torch's default group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as torch_dist
from torch._C._distributed_c10d import Store as TorchStore

from paceline.comm.group.default import default_world
from paceline.comm.store.store import PrefixStore, Store, StoreAnswer, StoreOp, StoreStatus

# The adapter polls, because torch's own `wait` prints a warning on each timeout and cannot be interrupted. The pause
# between polls increases with the time waited, so that polls are rare and waits are extended by at most a sixteenth.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHARE_OF_WAIT = 0.001, 0.25, 1 / 16


class StoreForTorch(TorchStore):
    """A torch.distributed store backed by a Paceline store. Implements the methods that process groups use."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        """Sets `key` to `value`."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of `key`; waits until it is set."""
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the integer stored at `key`; returns the sum."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all `keys` exist now."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Sets `key` if its value equals `expected_value`; returns the value of `key` afterward."""
        return self._store.compare_set(key, expected_value, desired_value)

    def append(self, key: str, value: bytes | str) -> None:
        """Appends `value` to the value of `key`."""
        self._store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns the values of `keys`; waits until all are set."""
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        """Sets each of `keys` to the value at the same position."""
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """Returns True, because `append`, `multi_get` and `multi_set` are available."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all `keys` exist."""
        self._store.wait(keys, timeout)

    def clone(self) -> StoreForTorch:
        """Returns the store itself, which is thread-safe."""
        return self


def make_torch_default_group() -> None:
    """Creates torch's default group from Paceline's default group. All ranks must call this.

    The rendezvous uses Paceline's store, so torch's environment variables need not be set.

    Raises:
        ValueError: Paceline's default group does not exist, or torch's default group already exists.
    """
    world = default_world()
    store = StoreForTorch(PrefixStore("torch", world.store))
    torch_dist.init_process_group(
        "paceline",
        store=store,
        rank=world.group.rank(),
        world_size=world.group.size(),
        timeout=timedelta(seconds=world.timeout_s),
    )
    vars(torch_dist.group.WORLD)["lent_store"] = store  # torch's C++ code does not keep Python stores alive


class StoreFromTorch(Store):
    """A Paceline store backed by a torch.distributed store. Supports the operations of engines except last wills."""

    def __init__(self, store: TorchStore, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._store = store

    def __repr__(self) -> str:
        return f"torch.distributed's {type(self._store).__name__}"

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        names = [field.decode() for field in (fields[:1] if op is StoreOp.SET else fields)]
        if op is StoreOp.SET:
            self._store.set(names[0], fields[1].decode())
            return StoreStatus.OK, 0, []
        if op is StoreOp.LAST_WILL:
            return StoreStatus.OK, 0, []
        if op is StoreOp.CHECK:
            return StoreStatus.OK, int(self._store.check(names)), []
        if op not in (StoreOp.GET, StoreOp.WAIT, StoreOp.MULTI_GET):
            return StoreStatus.REFUSED, 0, [b"the engine does not need it"]
        if not self._wait_for(names, timeout_s) and (
            absent := [name for name in names if not self._store.check([name])]
        ):
            return StoreStatus.TIMED_OUT, 0, [name.encode() for name in absent]
        return StoreStatus.OK, 0, [] if op is StoreOp.WAIT else [self._store.get(name) for name in names]

    def _wait_for(self, names: list[str], timeout_s: float) -> bool:
        """Waits until all keys exist; returns False on timeout."""
        started_s = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                return False
            pause_s = min(max(_FIRST_PAUSE_S, waited_s * _SHARE_OF_WAIT), _LONGEST_PAUSE_S)
            time.sleep(min(pause_s, timeout_s - waited_s))
        return True

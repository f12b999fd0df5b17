"""Makes Paceline's default group available to torch.distributed without a second rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as torch_dist
from torch._C._distributed_c10d import Store as TorchStore

from paceline.group.default import default_world
from paceline.store.base import Store
from paceline.store.prefix import PrefixStore


class LentStore(TorchStore):
    """Presents a store of Paceline's as one of torch.distributed, with what process groups need of it."""

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
        """Adds `amount` to the number under `key`, and returns the sum."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all `keys` exist now."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Sets `key` if it has the expected value, and returns its value afterwards."""
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
        """Returns True: `append`, `multi_get` and `multi_set` are available."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all `keys` exist."""
        self._store.wait(keys, timeout)

    def clone(self) -> LentStore:
        """Returns the store itself, which several threads may use at once."""
        return self


def lend() -> None:
    """Makes torch's default group, over Paceline, from the ranks of Paceline's; every rank calls this.

    The ranks meet over Paceline's store, so torch's variables need not be set.

    Raises:
        ValueError: Paceline's default group does not exist, or torch's exists already.
    """
    world = default_world()
    store = LentStore(PrefixStore("torch", world.store))
    torch_dist.init_process_group(
        "paceline", store=store, rank=world.group.rank(), world_size=world.group.size(), timeout=world.timeout
    )
    vars(torch_dist.group.WORLD)["lent_store"] = store  # torch's C++ keeps only its own side of the store alive

"""The plug-in's view of a store of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.errors import StoreTimeoutError
from paceline.plugin.store import BorrowedStore


class LateStore:
    """A store of torch's in which the key is set at the moment when the wait for it has timed out."""

    def __init__(self, comes: bool) -> None:
        self.comes = comes

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise RuntimeError(f"wait timeout, keys: {keys}")

    def check(self, keys: list[str]) -> bool:
        return self.comes

    def get(self, key: str) -> bytes:
        return b"here"


def test_a_key_that_comes_with_the_time_out_is_found():
    assert BorrowedStore(LateStore(comes=True), timedelta(seconds=1)).get("key") == b"here"


def test_a_key_that_does_not_come_is_named():
    store = BorrowedStore(LateStore(comes=False), timedelta(seconds=0.01))
    with pytest.raises(StoreTimeoutError, match="key"):
        store.get("key")

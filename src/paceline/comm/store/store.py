"""Interface of all stores, an in-process store (`HashStore`), and a prefixed view of a store (`PrefixStore`).

Each call performs one operation, which subclasses implement in `_apply`.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum

from paceline import _core
from paceline.durations import Timeout, to_seconds
from paceline.errors import StoreError, StoreQueueEmptyError, StoreTimeoutError

DEFAULT_TIMEOUT = timedelta(seconds=300)
_SHORT_S = 2.0  # shorter waits are not recorded


class StoreOp(IntEnum):
    """The operations of a store; the values are part of the protocol."""

    SET = 1
    GET = 2
    ADD = 3
    COMPARE_SET = 4
    WAIT = 5
    CHECK = 6
    DELETE = 7
    COUNT = 8
    MULTI_GET = 9
    MULTI_SET = 10
    APPEND = 11
    QUEUE_PUSH = 12
    QUEUE_POP = 13
    QUEUE_LENGTH = 14
    LAST_WILL = 15
    LIST_KEYS = 16


class StoreStatus(IntEnum):
    """The possible statuses of an answer; the values are part of the protocol."""

    OK = 0
    TIMED_OUT = 1
    REFUSED = 2


StoreAnswer = tuple[StoreStatus, int, list[bytes]]


class Store(ABC):
    """A key-value store that the ranks in a job share. Keys are strings, and values are bytes (or text in UTF-8).

    Every wait fails after `timeout` with a `StoreTimeoutError` that lists the missing keys.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout_s = to_seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout for `get`, `wait` and other blocking calls. Default: 300 s."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets `timeout`."""
        self._timeout_s = to_seconds(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets `key` to `value`."""
        self._request(StoreOp.SET, [_key(key), _bytes(value)])

    def get(self, key: str) -> bytes:
        """Waits until `key` is set and returns its value."""
        return self._wait_and_request(StoreOp.GET, [_key(key)], None)[1][0]

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the number stored under `key` (0 if there is none) and returns the sum.

        Raises:
            StoreError: the value is not a decimal number that fits in 64 bits.
        """
        if not hasattr(amount, "__index__"):
            raise TypeError(f"a store adds integers, not {type(amount).__name__}; convert the amount first")
        return self._request(StoreOp.ADD, [_key(key)], operator.index(amount))[0]

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Sets `key` to `desired_value` if its value is `expected_value`; a missing key counts as empty.

        Returns the key's value after the operation, or `expected_value` if the key is still missing.
        """
        return self._request(StoreOp.COMPARE_SET, [_key(key), _bytes(expected_value), _bytes(desired_value)])[1][0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until all `keys` exist."""
        self._wait_and_request(StoreOp.WAIT, _keys(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all `keys` exist now."""
        return self._request(StoreOp.CHECK, _keys(keys))[0] == 1

    def delete_key(self, key: str) -> bool:
        """Removes `key`; returns whether it existed."""
        return self._request(StoreOp.DELETE, [_key(key)])[0] == 1

    def num_keys(self) -> int:
        """Returns the number of keys, including queues; a shared store counts the keys from all its users."""
        return self._request(StoreOp.COUNT, [])[0]

    def list_keys(self) -> list[str]:
        """Returns the keys that have a value, in no particular order. Queues are omitted, as in torch's stores.

        A `PrefixStore` returns only the keys that it can access, without its prefix.
        """
        return [key.decode(errors="replace") for key in self._request(StoreOp.LIST_KEYS, [])[1]]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of `keys` in the same order; waits until all keys are set."""
        return self._wait_and_request(StoreOp.MULTI_GET, _keys(keys), None)[1]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Sets each of `keys` to the value at the same index, in one operation."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values; each key needs one value")
        fields = [part for key, value in zip(_keys(keys), values, strict=True) for part in (key, _bytes(value))]
        self._request(StoreOp.MULTI_SET, fields)

    def append(self, key: str, value: bytes | str) -> None:
        """Appends `value` to the value of `key`; sets it if the key is missing."""
        self._request(StoreOp.APPEND, [_key(key), _bytes(value)])

    def has_extended_api(self) -> bool:
        """Returns True, because append, multi_get, multi_set and the queues are supported."""
        return True

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Puts `value` at the end of the queue `key`."""
        self._request(StoreOp.QUEUE_PUSH, [_key(key), _bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Removes and returns the first value of the queue `key`, waiting for one if `block` is True.

        Raises:
            StoreQueueEmptyError: the queue is empty, and `block` is False.
        """
        if block:
            return self._wait_and_request(StoreOp.QUEUE_POP, [_key(key)], None)[1][0]
        try:
            return self._wait_and_request(StoreOp.QUEUE_POP, [_key(key)], 0)[1][0]
        except StoreTimeoutError:
            raise StoreQueueEmptyError(f"the queue {key!r} of {self} is empty; queue_pop timed out at once") from None

    def queue_len(self, key: str) -> int:
        """Returns the number of values in the queue `key`."""
        return self._request(StoreOp.QUEUE_LENGTH, [_key(key)])[0]

    def set_last_will(self, key: str, value: bytes | str | None) -> None:
        """Makes the store set `key` to `value` when this process's connection is lost or closed.

        Each key has its own will. A later call for the same key replaces the value, and None withdraws the will. A
        `HashStore` exists only as long as its process, and ignores wills.
        """
        self._request(StoreOp.LAST_WILL, [_key(key), _bytes("" if value is None else value)], int(value is None))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until this method has been called `world_size` times with `key`, which must not be reused."""
        if self.add(f"{key}/arrived", 1) == world_size:
            self.set(f"{key}/all", b"")
        self.wait([f"{key}/all"], timeout)

    def clone(self) -> Store:
        """Returns this store. Threads can share a store, since each waiting thread uses its own connection."""
        return self

    def close(self) -> None:
        """Releases the store's connections, file or server; idempotent."""

    def _request(self, op: StoreOp, fields: list[bytes], number: int = 0) -> tuple[int, list[bytes]]:
        status, number, values = self._apply(op, number, fields, self._timeout_s)
        if status is StoreStatus.REFUSED:
            raise StoreError(f"{self} refused {op.name.lower()}({_names(fields[:1])}): {values[0].decode()}")
        return number, values

    def _wait_and_request(self, op: StoreOp, keys: list[bytes], timeout: Timeout | None) -> tuple[int, list[bytes]]:
        wait_s = self._timeout_s if timeout is None else to_seconds(timeout)
        started = time.monotonic()
        short_s = min(wait_s, _SHORT_S)
        status, number, values = self._apply(op, max(0, int(short_s * 1000)), keys, short_s)
        if status is StoreStatus.TIMED_OUT and short_s < wait_s:
            left_s = wait_s - short_s
            with _recorded(op, values, started):
                status, number, values = self._apply(op, max(0, int(left_s * 1000)), keys, left_s)
        if status is StoreStatus.TIMED_OUT:
            raise StoreTimeoutError(
                f"waited {time.monotonic() - started:.1f} s in {self} for {_names(keys)}; "
                f"never set: {_names(values)}. The rank that should set it is late, dead, or uses another store"
            )
        if status is StoreStatus.REFUSED:
            raise StoreError(f"{self} refused {op.name.lower()}({_names(keys)}): {values[0].decode()}")
        return number, values

    @abstractmethod
    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        """Performs `op`. `number` is a waiting operation's timeout in ms; on timeout, the answer lists missing keys."""


@contextlib.contextmanager
def _recorded(op: StoreOp, missing: list[bytes], since_s: float) -> Iterator[None]:
    """Records a wait for missing keys, so that a diagnosis can list them."""
    if not _core.is_recording():
        yield
        return
    from paceline.comm.record.spans import begin_store_wait, is_called_by_main_program  # slow to import

    stamp = 0
    if is_called_by_main_program():
        stamp = begin_store_wait(op.name.lower(), [key.decode(errors="replace") for key in missing], since_s)
    try:
        yield
    finally:
        _core.record_end(stamp)


def _bytes(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store's values are bytes or str, not {type(value).__name__}; encode it first")


def _key(key: str) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a store's keys are str, not {type(key).__name__}; pass str(key)")
    return key.encode()


def _keys(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys is {keys!r}; it must be a list of keys, [{keys!r}] for one")
    return [_key(key) for key in keys]


def _names(keys: list[bytes]) -> str:
    return ", ".join(repr(key.decode(errors="replace")) for key in keys)


class HashStore(Store):
    """A store in this process's memory, which its threads share.

    >>> store = HashStore()
    >>> store.add("steps", 2)
    2
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = _core.StoreTable()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return "HashStore()"

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        with self._changed:
            done = self._changed.wait_for(lambda: self._try(op, number, fields), timeout_s)
            if done is None:
                return StoreStatus.TIMED_OUT, 0, self._table.missing(op, fields)
            self._changed.notify_all()
            return done

    def _try(self, op: StoreOp, number: int, fields: list[bytes]) -> StoreAnswer | None:
        done = self._table.apply(op, number, fields)
        return None if done is None else (StoreStatus(done[0]), done[1], done[2])


_WITHOUT_KEYS = {StoreOp.COUNT, StoreOp.LIST_KEYS}
_EVERY_FIELD_A_KEY = {StoreOp.WAIT, StoreOp.CHECK, StoreOp.MULTI_GET}


class PrefixStore(Store):
    """A view of `store` with `prefix` and a slash before every key.

    >>> from paceline.comm.store.store import HashStore
    >>> store = HashStore()
    >>> PrefixStore("run", store).set("seed", "7")
    >>> store.get("run/seed")
    b'7'
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            kind = f"{type(store).__module__}.{type(store).__qualname__}"
            raise TypeError(f"PrefixStore: store is a {kind}; it must be one of Paceline's, such as paceline.TCPStore")
        super().__init__(store.timeout)
        self.prefix = prefix
        self.underlying_store = store
        self._bytes = prefix.encode() + b"/"

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"

    def close(self) -> None:
        """Closes the underlying store."""
        self.underlying_store.close()

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        if op in _WITHOUT_KEYS:
            keys = fields
        elif op in _EVERY_FIELD_A_KEY:
            keys = [self._bytes + key for key in fields]
        elif op is StoreOp.MULTI_SET:
            keys = [self._bytes + field if index % 2 == 0 else field for index, field in enumerate(fields)]
        else:
            keys = [self._bytes + fields[0], *fields[1:]]
        status, answer, values = self.underlying_store._apply(op, number, keys, timeout_s)
        if status is StoreStatus.TIMED_OUT or (op is StoreOp.LIST_KEYS and status is StoreStatus.OK):
            values = [key[len(self._bytes) :] for key in values if key.startswith(self._bytes)]
        return status, answer, values

"""A view of a store that puts a prefix before every key."""

from __future__ import annotations

from paceline.store.base import Answer, Op, Status, Store

_WITHOUT_KEYS = {Op.COUNT}
_EVERY_FIELD_A_KEY = {Op.WAIT, Op.CHECK, Op.MULTI_GET}


class PrefixStore(Store):
    """A view of `store` with `prefix` and a slash before every key.

    >>> from paceline.store.hash import HashStore
    >>> store = HashStore()
    >>> PrefixStore("run", store).set("seed", "7")
    >>> store.get("run/seed")
    b'7'
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store.timeout)
        self.prefix = prefix
        self.underlying_store = store
        self._bytes = prefix.encode() + b"/"

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"

    def close(self) -> None:
        """Closes the underlying store."""
        self.underlying_store.close()

    def _apply(self, op: Op, number: int, fields: list[bytes], timeout_s: float) -> Answer:
        if op in _WITHOUT_KEYS:
            keys = fields
        elif op in _EVERY_FIELD_A_KEY:
            keys = [self._bytes + key for key in fields]
        elif op is Op.MULTI_SET:
            keys = [self._bytes + field if at % 2 == 0 else field for at, field in enumerate(fields)]
        else:
            keys = [self._bytes + fields[0], *fields[1:]]
        status, answer, values = self.underlying_store._apply(op, number, keys, timeout_s)
        if status is Status.TIMED_OUT:
            values = [key[len(self._bytes) :] for key in values]
        return status, answer, values

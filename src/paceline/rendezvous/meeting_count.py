"""How often this process has met others at a place: a store that outlives a group keeps the names of its ranks.

The number is the same on every rank, since every rank makes the same groups.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

from paceline.store.base import Store
from paceline.store.prefix import PrefixStore

_at_address: Counter[str] = Counter()
_at_store: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()


def next_at_address(address: str) -> int:
    """1 for the first meeting at `address`, 2 for the second."""
    _at_address[address] += 1
    return _at_address[address]


def next_at_store(store: Store) -> int:
    """The same for a store; another view of it with the same prefix is the same place."""
    prefix = ""
    while isinstance(store, PrefixStore):
        prefix = f"{store.prefix}/{prefix}"
        store = store.underlying_store
    rounds = _at_store.setdefault(store, Counter())
    rounds[prefix] += 1
    return rounds[prefix]

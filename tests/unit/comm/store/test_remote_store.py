"""The last will of a connection to a store: the key that is set when the connection ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from store_kinds import DEADLINE_S, KINDS, SECRET, SHORT

from paceline import FileStore, PrefixStore, Store, TCPStore
from paceline.comm.store.remote_store import connect_unix
from paceline.errors import StoreTimeoutError

pytestmark = pytest.mark.usefixtures("no_secret")


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = KINDS[request.param](tmp_path)
    made.set_timeout(timedelta(seconds=DEADLINE_S))
    yield made
    made.close()
    if hasattr(made, "server"):
        made.server.close()


@pytest.mark.parametrize("kind", ["tcp", "prefix of tcp", "unix", "file"])
def test_the_last_will_of_a_connection_is_done_when_it_ends(kind: str, tmp_path: Path) -> None:
    store = KINDS[kind](tmp_path)
    tail = store
    while isinstance(tail, PrefixStore):
        tail = tail.underlying_store
    address = ("127.0.0.1", tail.port) if isinstance(tail, TCPStore) else None

    def another() -> Store:
        if kind == "file":
            return FileStore(tmp_path / "store")
        other = TCPStore(*address) if address else connect_unix(str(tmp_path / "store"), SECRET)
        return PrefixStore("a", PrefixStore("b", other)) if kind.startswith("prefix") else other

    for taken_back in (True, False):
        testator = another()
        testator.set_last_will("will", "the last")
        if taken_back:
            testator.set_last_will("will", None)
        testator.close()
        if taken_back:
            with pytest.raises(StoreTimeoutError):
                store.wait(["will"], SHORT)
        else:
            store.wait(["will"], timedelta(seconds=DEADLINE_S))
            assert store.get("will") == b"the last"
    store.close()
    if kind == "unix":
        store.server.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_each_key_has_a_last_will_of_its_own(kind: str, tmp_path: Path) -> None:
    store = KINDS[kind](tmp_path)
    testator = TCPStore("127.0.0.1", store.port) if isinstance(store, TCPStore) else FileStore(tmp_path / "store")
    for key in ("one", "two", "three"):
        testator.set_last_will(key, f"of {key}")
    testator.set_last_will("two", None)
    testator.close()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    assert store.multi_get(["one", "three"]) == [b"of one", b"of three"]
    assert not store.check(["two"])
    store.close()

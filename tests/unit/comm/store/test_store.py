"""Guarantees common to all kinds of stores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from store_kinds import DEADLINE_S, KINDS, SHORT

from paceline import HashStore, PrefixStore, Store
from paceline.errors import StoreError, StoreTimeoutError

pytestmark = pytest.mark.usefixtures("no_secret")


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = KINDS[request.param](tmp_path)
    made.set_timeout(timedelta(seconds=DEADLINE_S))
    yield made
    made.close()
    if hasattr(made, "server"):
        made.server.close()


def test_values_are_bytes_and_strings_are_encoded(store: Store) -> None:
    store.set("text", "grün")
    store.set("bytes", b"\0\xff")
    store.set("empty", b"")
    assert store.multi_get(["bytes", "text", "empty"]) == [b"\0\xff", "grün".encode(), b""]


@pytest.mark.parametrize("value", [3, None, ["a"]])
def test_other_values_are_refused(store: Store, value: object) -> None:
    with pytest.raises(TypeError, match="bytes or str"):
        store.set("key", value)


class Two:
    def __index__(self) -> int:
        return 2


def test_keys_and_amounts_of_other_types_are_refused(store: Store) -> None:
    calls = [
        store.get,
        store.delete_key,
        store.queue_len,
        lambda key: store.set(key, "x"),
        lambda key: store.wait([key]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="keys are str, not int"):
            call(1)
    with pytest.raises(TypeError, match="adds integers, not float"):
        store.add("n", 1.5)
    assert store.add("n", Two()) == 2  # like a NumPy integer


def test_a_string_is_not_a_list_of_keys(store: Store) -> None:
    with pytest.raises(TypeError, match="list of keys"):
        store.wait("key")


def test_add_counts_in_decimal(store: Store) -> None:
    assert store.add("n", 0) == 0
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_add_to_what_is_no_number_is_refused_and_changes_nothing(store: Store) -> None:
    store.set("name", "paceline")
    with pytest.raises(StoreError, match=r"add\('name'\).*not a number"):
        store.add("name", 1)
    assert store.get("name") == b"paceline"


def test_add_beyond_64_bits_is_refused(store: Store) -> None:
    store.set("n", str(2**63 - 1))
    with pytest.raises(StoreError, match="64 bits"):
        store.add("n", 1)


def test_compare_set_changes_only_what_is_expected(store: Store) -> None:
    assert store.compare_set("key", "old", "new") == b"old"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


def test_keys_are_deleted_and_counted(store: Store) -> None:
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.num_keys() == before + 2
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.check(["b"])
    assert not store.check(["a", "b"])
    assert store.num_keys() == before + 1


def test_keys_with_a_value_are_listed(store: Store) -> None:
    before = set(store.list_keys())
    store.multi_set(["a", "p/x", "p/y/z", "pq/w"], [""] * 4)
    store.add("p/n", 1)
    store.queue_push("queue", "1")
    store.delete_key("a")
    assert sorted(set(store.list_keys()) - before) == ["p/n", "p/x", "p/y/z", "pq/w"]
    inner = PrefixStore("p", store)
    assert sorted(inner.list_keys()) == ["n", "x", "y/z"]
    assert PrefixStore("y", inner).list_keys() == ["z"]
    assert PrefixStore("none", store).list_keys() == []


def test_multi_set_needs_a_value_for_each_key(store: Store) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


def test_append_makes_or_lengthens_a_value(store: Store) -> None:
    store.append("log", "one ")
    store.append("log", b"two")
    assert store.get("log") == b"one two"
    assert store.has_extended_api()


def test_queues_are_first_in_first_out(store: Store) -> None:
    assert store.queue_len("q") == 0
    for each in ("1", "2", "3"):
        store.queue_push("q", each)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"2", b"3"]
    with pytest.raises(StoreTimeoutError, match="'q'"):
        store.queue_pop("q", block=False)


def test_a_wait_that_ends_names_the_missing_keys(store: Store) -> None:
    store.set("here", b"")
    with pytest.raises(StoreTimeoutError, match=r"never set: 'gone', 'away'\.") as error:
        store.wait(["here", "gone", "away"], SHORT)
    assert isinstance(error.value, TimeoutError)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(StoreTimeoutError, match="'gone'"):
        store.get("gone")


def test_a_thread_that_waits_is_woken_and_holds_up_no_other(store: Store) -> None:
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(store.get("late"))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: got.append(store.queue_pop("queue")))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    store.set("late", b"come")
    store.queue_push("queue", b"come")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == [b"come"] * 4
    assert time.monotonic() - started < DEADLINE_S / 2


def test_threads_add_without_losing_one(store: Store) -> None:
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert store.add("n", 0) == 200


def test_large_values_come_back_whole(store: Store) -> None:
    value = os.urandom(1 << 20) * 8
    store.set("large", value)
    assert store.get("large") == value


def test_a_prefix_is_a_name_space_of_the_store_below() -> None:
    below = HashStore()
    store = PrefixStore("run", below)
    store.multi_set(["a", "b"], ["1", "2"])
    store.queue_push("q", "3")
    assert below.multi_get(["run/a", "run/b"]) == [b"1", b"2"]
    assert below.queue_pop("run/q") == b"3"
    with pytest.raises(StoreTimeoutError, match="never set: 'c'"):
        store.wait(["a", "c"], SHORT)


def test_a_hash_store_keeps_no_last_will() -> None:
    store = HashStore()
    store.set_last_will("will", "the last")
    store.close()
    assert not store.check(["will"])

"""Groups formed by torch.distributed have unique identities, and the plug-in reads torch's stores."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _world

from paceline import HashStore as OwnHashStore
from paceline.errors import RendezvousTimeoutError, StoreTimeoutError
from paceline.interop.torch_backend.rendezvous import (
    GroupRendezvous,
    StoreForTorch,
    StoreFromTorch,
    form_group,
    require_own_device,
)


def rendezvous(name: str, rank: int = 0, occasion: str = "") -> GroupRendezvous:
    return GroupRendezvous(None, rank, 2, timedelta(seconds=1), [0, 1], name, occasion)


def test_groups_of_the_same_ranks_have_different_identities():
    assert rendezvous("1").identity != rendezvous("2").identity
    assert rendezvous("1").identity != rendezvous("1", occasion="reconfigure/1").identity
    assert rendezvous("1").identity not in (0, rendezvous("").identity)


def test_all_members_have_the_same_identity():
    assert rendezvous("1", rank=0).identity == rendezvous("1", rank=1).identity


@pytest.mark.parametrize("wrapped", [lambda store: store, lambda store: PrefixStore("prefix", store)])
def test_a_store_for_torch_deletes_and_counts_keys(wrapped):
    python_store = StoreForTorch(OwnHashStore())  # torch's C++ code does not keep it alive
    store = wrapped(python_store)
    store.set("a", "1")
    store.set("b", "2")
    assert store.delete_key("b")
    assert not store.delete_key("b")
    assert store.num_keys() == 1
    assert store.get("a") == b"1"


def test_a_store_for_torch_has_queues_and_a_timeout():
    store = StoreForTorch(OwnHashStore())
    store.set_timeout(timedelta(milliseconds=10))
    assert store.timeout == timedelta(milliseconds=10)
    with pytest.raises(StoreTimeoutError, match="absent"):
        store.get("absent")
    store.queue_push("queue", "1")
    assert store.queue_len("queue") == 1
    assert store.queue_pop("queue") == b"1"
    store.set("a", "1")
    assert store.list_keys() == ["a"]


class LateStore:
    """A torch store in which the key is set only after `questions` requests."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def check(self, keys: list[str]) -> bool:
        self.questions -= 1
        return self.questions < 0

    def get(self, key: str) -> bytes:
        return b"here"


def store_of_torchs(kind: str, path: object) -> object:
    if kind == "file":
        return FileStore(str(path), 1)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if kind == "tcp" else HashStore()


def test_a_key_that_comes_with_the_time_out_is_found():
    assert StoreFromTorch(LateStore(questions=1), timedelta(0)).get("key") == b"here"


def test_a_key_that_does_not_come_is_named():
    store = StoreFromTorch(HashStore(), timedelta(seconds=0.01))
    store.set("there", "1")
    with pytest.raises(StoreTimeoutError, match=r"never set: 'key'\."):
        store.wait(["there", "key"])


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_torch_prints_no_warning_about_a_late_key(kind, tmp_path, capfd):
    theirs = store_of_torchs(kind, tmp_path / "store")
    store = StoreFromTorch(theirs, timedelta(seconds=60))
    late = threading.Timer(0.3, lambda: theirs.set("key", "value"))
    late.start()
    with pytest.raises(StoreTimeoutError):
        store.wait(["key"], timedelta(seconds=0.1))
    assert store.get("key") == b"value"
    late.join()
    assert capfd.readouterr().err == ""


def test_a_wait_can_be_interrupted():
    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    store, before = StoreFromTorch(HashStore(), timedelta(seconds=300)), signal.signal(signal.SIGUSR1, interrupt)
    alarm = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    alarm.start()
    try:
        with pytest.raises(InterruptedError):
            store.get("key")
    finally:
        alarm.join()
        signal.signal(signal.SIGUSR1, before)


def test_tensors_of_another_backend_are_not_staged(monkeypatch):
    group = object()
    monkeypatch.setitem(_world.pg_names, group, "7")
    monkeypatch.setitem(_world.pg_backend_config, group, "cpu:paceline,cuda:nccl")
    require_own_device("7", torch.device("cpu"))
    require_own_device("7", torch.device("xpu", 0))
    require_own_device("8", torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=r"group '7' was requested .*did not create nccl for tensors on cuda:0"):
        require_own_device("7", torch.device("cuda", 0))


def test_groups_of_one_name_with_other_members_never_meet():
    """Ranks that create groups in different orders give two groups the same name."""
    store, limit = HashStore(), timedelta(seconds=0.5)
    alone = form_group(GroupRendezvous(store, 0, 1, limit, [0], "1"))
    try:
        with pytest.raises(RendezvousTimeoutError):
            form_group(GroupRendezvous(store, 1, 2, limit, [0, 1], "1"), limit)
    finally:
        alone.group.close()

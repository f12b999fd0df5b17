"""`timedelta.max` disables the timeout in every call that accepts one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import paceline as dist
from paceline.comm.rendezvous.rendezvous import rendezvous

EVER = timedelta.max


def take_for_ever() -> None:
    dist.init_process_group(timeout=EVER)
    group = dist.new_group(timeout=EVER)
    for each in (None, group):
        dist.all_reduce(torch.ones(3), group=each)
        dist.all_reduce(torch.ones(3), group=each, timeout=EVER)
        dist.barrier(each, timeout=EVER)
        dist.monitored_barrier(each, timeout=EVER)
        work = dist.all_reduce(torch.ones(3), group=each, async_op=True, timeout=EVER)
        assert work is not None
        work.wait(EVER)
        objects = [dist.get_rank()]
        dist.broadcast_object_list(objects, 0, group=each, timeout=EVER)
        assert objects == [0]
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1, group=each, timeout=EVER)
        else:
            dist.recv(torch.ones(3), 0, group=each, timeout=EVER)
        later = dist.isend if dist.get_rank() == 0 else dist.irecv
        message = later(torch.ones(100_000), 1 - dist.get_rank(), group=each, timeout=EVER)
        assert message is not None
        message.wait(EVER)
    assert isinstance(group, dist.ProcessGroup)
    group.set_timeout(EVER)
    assert group.timeout > timedelta(days=36_000)
    dist.destroy_process_group()


def test_every_call_of_ranks_takes_timedelta_max(ranks):
    ranks(2)(take_for_ever)


def test_every_call_between_hosts_takes_timedelta_max(hosts):
    hosts(2, 1)(take_for_ever)


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda _: dist.HashStore(EVER),
    "file": lambda directory: dist.FileStore(str(directory / "store"), 1, EVER),
    "tcp": lambda _: dist.TCPStore("127.0.0.1", 0, 1, True, EVER),
}


@pytest.mark.parametrize("kind", STORES)
def test_every_store_takes_timedelta_max(kind, tmp_path):
    store = STORES[kind](tmp_path)
    store.set_timeout(EVER)
    assert store.timeout > timedelta(days=36_000)
    store.set("key", b"value")
    store.wait(["key"], EVER)
    assert store.get("key") == b"value" and store.multi_get(["key"]) == [b"value"]
    store.close()


def test_a_rendezvous_takes_an_infinite_timeout(tmp_path):
    joined = rendezvous(f"file://{tmp_path}/rendezvous", None, 1, 0, float("inf"))
    assert joined.rank == 0
    joined.store.close()

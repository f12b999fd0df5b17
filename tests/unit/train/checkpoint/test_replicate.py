"""Copies of a checkpoint in the memory of two hosts, and the newest complete copy."""

from __future__ import annotations

import doctest
import threading
from contextlib import closing
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path

import pytest
from checkpoint_copies import ROOT, PipeChannel, copy_as, copying_of, looked, steps_of, two_hosts

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.peer_memory.client import dial
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy, CachedCheckpoint, Inventory
from paceline.train.checkpoint.peer_memory.server import CacheServer
from paceline.train.checkpoint.replicate import newest_cached, replicate_checkpoint


def inventory(vault: str, *entries: CachedCheckpoint) -> Inventory:
    return Inventory(vault, "", entries)


def test_the_newest_copy_with_all_files_is_found() -> None:
    files = {"a": 1, "b": 2}
    one = inventory("one", CachedCheckpoint("x", 4, 40, {"a": 1}, files), CachedCheckpoint("y", 5, 50, {"a": 1}, files))
    two = inventory(
        "two",
        CachedCheckpoint("x", 4, 40, {"b": 2}),
        CachedCheckpoint("y", 5, 50, {"b": 1}),
        CachedCheckpoint("z", 6, 60, {"b": 2}),
    )
    found, why = newest_cached([one, two, one])
    assert found is not None
    assert (found.token, found.sequence, found.step, found.describers) == ("x", 4, 40, ["one"])
    assert found.holders == {"a": ["one"], "b": ["two"]}
    assert why == ["the copies of step 60 were not finished", "no launcher has b of the copies of step 50"]
    assert newest_cached([two]) == (None, [f"the copies of step {step} were not finished" for step in (60, 50, 40)])
    assert newest_cached([]) == (None, [])


def copy_by_threads(step: int, keep: str | None, addresses: list[str]) -> None:
    ends = Pipe()
    with ends[0], ends[1]:
        other = threading.Thread(target=copy_as, args=(1, step, keep, addresses, PipeChannel(1, ends[1])))
        other.start()
        copy_as(0, step, keep, addresses, PipeChannel(0, ends[0]))
        other.join()


def test_either_host_has_all_of_a_copy(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses:
        for step in (1, 2, 3):
            copy_by_threads(step, f"t{step - 1}", addresses)
        for left in ([addresses[0]], [addresses[1]], addresses):
            found, why = newest_cached(looked(left))
            assert found is not None
            assert (found.step, why) == (3, [])
            assert steps_of(found, left) == {3}


def test_a_copy_with_other_bytes_is_noticed(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses:
        copy_by_threads(1, None, addresses)
        (whole, _) = looked(addresses)
        entry = whole.entries[0]
        with closing(dial(addresses[0])) as client:
            manifest = client.manifest(ROOT, entry.token)
            files = {}
            for name, nbytes in entry.held.items():
                files[name] = bytearray(nbytes)
                client.read_into(ROOT, entry.token, name, 0, memoryview(files[name]))
            files["rank_00001_000.safetensors"][-1] ^= 1
            client.begin(BeginCopy("/other", entry.token, 1, 1, None, 10))
            for name, data in files.items():
                client.write("/other", entry.token, name, [memoryview(data)])
                client.finish("/other", entry.token, name)
            client.commit("/other", entry.token, manifest, {**entry.held}, {})
            found, _ = newest_cached([client.look("/other")])
        assert found is not None
        with pytest.raises(CheckpointDamagedError, match="rank_00001_000.safetensors was changed"):
            steps_of(found, addresses[:1], root="/other")


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(import_module("paceline.train.checkpoint.replicate")).failed == 0


def test_of_one_sequence_the_later_step_is_newer() -> None:
    entries = [
        CachedCheckpoint("z", 6, 60, {}, {}),
        CachedCheckpoint("a", 6, 70, {}, {}),
        CachedCheckpoint("b", 6, None, {}, {}),
    ]
    found, _ = newest_cached([Inventory("vault", "", entries)])
    assert found is not None and found.step == 70


class LostRankChannel:
    """The channel of rank 0 after the other rank has died."""

    rank, size, me = 0, 2, "rank 0"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def gather(self, mine: bytes) -> list[bytes]:
        raise CheckpointError("rank 1 died while a checkpoint was being written")

    def broadcast(self, data: bytes) -> bytes:
        self.sent.append(data)
        return data


def test_a_rank_that_is_not_heard_keeps_nobody_waiting(tmp_path: Path) -> None:
    channel = LostRankChannel()
    with closing(CacheServer(None)) as service:
        address = service.open(str(tmp_path / "door"), None)
        copying = copying_of(1, 0, None, [address, address])
        with pytest.raises(CheckpointError, match="rank 1 died"):
            replicate_checkpoint(copying, (channel, channel), dial)
    assert [text[:1] for text in channel.sent] == [b"-", b"-"]

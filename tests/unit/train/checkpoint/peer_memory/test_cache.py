"""The memory in which a launcher keeps copies of checkpoints."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from checkpoint_copies import ROOT

from paceline.errors import CheckpointError
from paceline.train.checkpoint.peer_memory.cache import CheckpointCache, RefusedError, available_nbytes, new_file
from paceline.train.checkpoint.peer_memory.client import dial
from paceline.train.checkpoint.peer_memory.protocol import (
    BeginCopy,
    Commit,
    Finish,
    Read,
)
from paceline.train.checkpoint.peer_memory.server import CacheServer


def begin(token: str, keep: str | None = None, nbytes: int = 10) -> BeginCopy:
    return BeginCopy(ROOT, token, int(token), int(token), keep, nbytes)


def put(vault: CheckpointCache, token: str, data: bytes) -> None:
    file = new_file()
    os.write(file, data)
    vault.finish(Finish(ROOT, token, "file", len(data)), file)


def test_a_vault_keeps_two_generations_of_a_root_at_most() -> None:
    with closing(CheckpointCache()) as vault:
        for number in range(1, 6):
            vault.begin(begin(str(number), str(number - 1)))
            put(vault, str(number), b"%d" % number)
            assert [each.token for each in vault.look(ROOT)] == [str(each) for each in (number - 1, number) if each]
        assert vault.read(Read(ROOT, "4", "file", 0, 10)) == b"4"
        with pytest.raises(RefusedError, match="another one was started"):
            vault.read(Read(ROOT, "3", "file", 0, 10))
        vault.begin(begin("7"))
        assert [each.token for each in vault.look(ROOT)] == ["7"]


def test_a_vault_refuses_what_the_memory_is_too_small_for() -> None:
    with closing(CheckpointCache(available=lambda: 1000)) as vault:
        vault.begin(begin("1", nbytes=900))
        with pytest.raises(RefusedError, match="is too large for the 1.0 kB of memory that are left"):
            vault.begin(begin("2", keep="1", nbytes=950))
        assert [each.token for each in vault.look(ROOT)] == ["1"]


def test_a_file_of_a_copy_that_was_given_up_is_refused() -> None:
    with closing(CheckpointCache()) as vault:
        vault.begin(begin("1"))
        vault.begin(begin("2"))
        with pytest.raises(RefusedError, match="discarded"):
            put(vault, "1", b"late")
        with pytest.raises(RefusedError, match="discarded"):
            vault.commit(Commit(ROOT, "1", {}, {}, 0), b"")


def test_memory_outlives_the_doors_and_then_goes(tmp_path: Path) -> None:
    with closing(CacheServer("127.0.0.1")) as service:
        address = service.open(str(tmp_path / "first"), None)
        with closing(dial(address)) as client:
            client.begin(BeginCopy(ROOT, "t", 1, 1, None, 4))
            client.write(ROOT, "t", "file", [memoryview(b"kept")])
            client.finish(ROOT, "t", "file")
            service.shut()
            with pytest.raises(OSError, match=r".*"):
                client.look(ROOT)
        with pytest.raises(OSError, match=r".*"):
            dial(address)
        buffer = bytearray(4)
        with closing(dial(service.open(str(tmp_path / "second"), None))) as client:
            elsewhere = client.listen()
            with closing(dial(elsewhere.address)) as other:
                assert other.look(ROOT).vault == elsewhere.vault
                assert other.read_into(ROOT, "t", "file", 0, memoryview(buffer)) == 4
                with pytest.raises(CheckpointError, match="only workers of the vault's own host"):
                    other.listen()
        assert buffer == b"kept"


def test_memory_is_not_granted_twice() -> None:
    free = 1000
    with closing(CheckpointCache(available=lambda: free)) as vault:
        vault.begin(begin("1", nbytes=600))  # from one rank
        with pytest.raises(RefusedError, match="the 1.0 kB of memory that are left, of which 600 B are for other"):
            vault.begin(begin("1", nbytes=600))  # from another rank, before the first has written anything
        free = 700
        vault.wrote(ROOT, "1", 300)
        vault.begin(begin("1", nbytes=300))
        free = 400
        vault.wrote(ROOT, "1", 300)
        vault.commit(Commit(ROOT, "1", {}, {}, 0), b"")  # releases the announced memory that the rank did not use
        vault.begin(begin("2", keep="1", nbytes=360))


def test_copies_of_roots_left_behind_make_room() -> None:
    left = iter([1000, 1000, 100, 100, 1000, 100])
    with closing(CheckpointCache(available=lambda: next(left))) as vault:
        for root in ("/first", "/second"):
            vault.begin(BeginCopy(root, "1", 1, 1, None, 10))
        vault.begin(BeginCopy("/third", "1", 1, 1, None, 500))
        assert [len(vault.look(root)) for root in ("/first", "/second", "/third")] == [0, 0, 1]
        with pytest.raises(RefusedError, match="use fewer hosts for peer_copies, or none"):
            vault.begin(BeginCopy("/third", "2", 2, 2, "1", 500))


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_cgroup_counts(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert available_nbytes(tmp_path) == 8192
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n" if version == 2 else "4:cpu:/\n3:memory:/job/step\n")
    names = ["memory.max", "memory.current"] if version == 2 else ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    reclaimable = "inactive_file" if version == 2 else "total_inactive_file"
    base = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    for path, limit in (("", "max"), ("job", "5000"), ("job/step", "7000")):
        (base / path).mkdir(parents=True, exist_ok=True)
        for name, text in zip([*names, "memory.stat"], (limit, "4000", f"anon 1\n{reclaimable} 500\n"), strict=True):
            (base / path / name).write_text(text)
    assert available_nbytes(tmp_path) == 5000 - 4000 + 500


def test_a_limit_of_a_cgroup_that_is_mounted_elsewhere_counts(tmp_path: Path) -> None:
    for path in ("proc/self", "elsewhere/job"):
        (tmp_path / path).mkdir(parents=True)
    for path, text in (
        ("proc/meminfo", "MemAvailable: 8 kB\n"),
        ("proc/self/cgroup", "0::/job\n"),
        ("proc/self/mountinfo", "30 1 0:26 / /elsewhere rw - cgroup2 cgroup2 rw\n"),
        ("elsewhere/job/memory.max", "5000\n"),
        ("elsewhere/job/memory.current", "4000\n"),
        ("elsewhere/job/memory.stat", "inactive_file 500\n"),
    ):
        (tmp_path / path).write_text(text)
    assert available_nbytes(tmp_path) == 5000 - 4000 + 500

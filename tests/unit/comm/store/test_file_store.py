"""File stores with data from earlier runs, killed writers and forked child processes."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from store_kinds import DEADLINE_S, exit_code

from paceline import FileStore
from paceline.comm.store.store import StoreOp
from paceline.errors import StoreError

pytestmark = pytest.mark.usefixtures("no_secret")


def test_a_file_left_by_an_earlier_run_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    earlier = FileStore(path)
    assert earlier.path == str(path)
    earlier.set("stale", b"yes")
    earlier.close()
    assert path.stat().st_size > 0
    later = FileStore(path)
    assert not later.check(["stale"])
    later.close()


def test_a_file_of_a_killed_process_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    script = (
        "import paceline, sys, time\n"
        f"store = paceline.FileStore({str(path)!r})\n"
        "store.set('stale', 'yes')\n"
        "print('set', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    other = FileStore(path)
    assert other.check(["stale"])  # the member that set it is still running
    other.close()
    process.kill()
    process.wait(DEADLINE_S)
    process.stdout.close()
    store = FileStore(path)
    assert not store.check(["stale"])
    store.close()


def test_half_a_record_of_a_killed_writer_is_dropped(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    first.set("whole", b"1")
    one_record = record(2, struct.pack("<Bq", StoreOp.SET, 0) + 2 * (struct.pack("<I", 1) + b"x"))
    for nbytes in range(1, len(one_record)):
        with open(tmp_path / "store", "ab") as file:
            file.write(one_record[:nbytes])
        second.set("after", str(nbytes))
        assert first.multi_get(["whole", "after"]) == [b"1", str(nbytes).encode()]
        assert not first.check(["x"])


def test_a_damaged_record_hides_no_later_record(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    for number in range(3):
        store.set(f"key{number}", b"x" * 5)
    whole = path.read_bytes()
    start = whole.index(b"key1") - 29
    for changed in range(start, whole.index(b"key2") - 29):
        damaged = bytearray(whole)
        damaged[changed] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=rf"the record at byte {start} of .*checksum.* the later ones; end all"):
            FileStore(path).check(["key2"])
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    assert FileStore(path).get("key2") == b"x" * 5
    path.write_bytes(whole[:start])
    with pytest.raises(StoreError, match=r"has already read \d+, so another program has truncated it"):
        store.get("key0")


def test_an_operation_without_disk_space_has_no_effect(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    first.add("n", 1)
    nbytes = (tmp_path / "store").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes + 20, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write \d+ bytes for add \(File too large\).* had no effect"):
            first.add("n", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "store").stat().st_size == nbytes
    assert second.add("n", 1) == first.add("n", 0) == 2


def test_a_file_removed_in_use_is_noticed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    (tmp_path / "store").unlink()
    with pytest.raises(StoreError, match="was removed while"):
        store.set("key", b"")


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", 2)
    child = os.fork()
    if child == 0:
        for _ in range(100):
            store.add("n", 1)
        os._exit(0)
    for _ in range(100):
        store.add("n", 1)
    assert exit_code(child) == 0
    assert store.get("n") == b"200"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"directory of .* does not exist"):
        FileStore(tmp_path / "no" / "store")


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.num_keys()


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=rf"FileStore\('{tmp_path}'\): process \d+ cannot open the file \(Is a directory\)"
    ):
        FileStore(tmp_path, 1)


def record(count: int, body: bytes) -> bytes:
    numbers = struct.pack("<III", len(body), zlib.crc32(body), count)
    return numbers + struct.pack("<I", zlib.crc32(numbers)) + body


@pytest.mark.parametrize(
    "data",
    [
        record(0, b""),
        record(2**32 - 1, bytes(200)),
        record(1, bytes(9) + struct.pack("<I", 1000) + b"a"),
        record(0, b"\x0f" + bytes(8)),
        record(3, b"\x0f" + bytes(8) + 3 * (struct.pack("<I", 1) + b"x")),
        record(3, b"\x0f" + bytes(8) + 2 * (struct.pack("<I", 1) + b"x") + struct.pack("<I", 40) + b"9" * 40),
    ],
    ids=["no operation", "2^32 fields", "a long field", "a will of nothing", "a will of nobody", "a will of a number"],
)
def test_a_record_that_no_store_writes_is_named(tmp_path: Path, data: bytes) -> None:
    store = FileStore(tmp_path / "store", 1)
    store.set("key", "value")
    with (tmp_path / "store").open("ab") as file:
        file.write(data)
    for each in (store, FileStore(tmp_path / "store", 1)):
        with pytest.raises(StoreError, match=r"the record at byte \d+ of the file was not written by a store"):
            each.get("key")

"""Large files are written with direct I/O, correctly for any memory layout."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sampling import examples

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.local_storage import ALIGNMENT, DirectWriter, Disk, LocalStorage
from paceline.train.checkpoint.format.part_writer import write_part
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.safetensors_header import header_of
from paceline.train.checkpoint.pytree import memory_with
from paceline.train.checkpoint.save import Staging, outgoing_of
from paceline.train.checkpoint.shard_layout import whole_of

MIB = 1 << 20


class Noting(Disk):
    """Records the size and the parts of each write, and whether it was direct; can reject direct writes."""

    def __init__(self, refuses: str = "") -> None:
        self.is_direct = False
        self.writes: list[tuple[bool, int]] = []
        self.views: list[memoryview] = []
        self._refuses = refuses

    def set_direct(self, descriptor: int, is_direct: bool) -> bool:
        self.is_direct = is_direct and self._refuses != "flag"
        return self.is_direct

    def write(self, descriptor: int, views: Sequence[memoryview]) -> int:
        if self.is_direct and self._refuses == "write":
            raise OSError(errno.EINVAL, "not so")
        nbytes = sum(len(view) for view in views)
        assert not self.is_direct or all(len(view) % ALIGNMENT == 0 for view in views)
        self.writes.append((self.is_direct, nbytes))
        self.views += views
        return super().write(descriptor, views)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) and not view.readonly else 0


def written(path: Path, disk: Disk, views: Sequence[Sequence[memoryview]]) -> bytes:
    descriptor = disk.create(path)
    try:
        writer = DirectWriter(disk, descriptor, is_wanted=True)
        for each in views:
            writer.write(each)
        writer.finish()
    finally:
        os.close(descriptor)
    return path.read_bytes()


@pytest.mark.parametrize("refuses", ["", "flag", "write"])
def test_all_bytes_come_in_order(tmp_path: Path, refuses: str) -> None:
    for seed in range(examples(5)):
        draw = random.Random(seed)
        memory = memoryview(mmap.mmap(-1, 12 * MIB))
        memory[:] = draw.randbytes(len(memory))
        at = draw.choice([0, 0, 100, ALIGNMENT])
        views, expected = [], b""
        while at < len(memory) and len(views) < 12:
            size = draw.choice([0, 1, 7, 64 << 10, MIB, MIB + 5, draw.randrange(5 * MIB)])
            size = min(size, len(memory) - at)
            views.append(memory[at : at + size])
            expected += bytes(views[-1])
            at += size + draw.choice([0, 0, 0, 3])
        views.append(memoryview(b"of bytes that cannot be written to"))
        expected += bytes(views[-1])
        cut = draw.randrange(len(views))
        disk = Noting(refuses)
        assert written(tmp_path / f"{refuses}{seed}", disk, [views[:cut], views[cut:]]) == expected, seed
        assert refuses == "" or not any(is_direct for is_direct, _ in disk.writes)


def test_no_bytes_need_no_alignment(tmp_path: Path) -> None:
    empty, block = memoryview(bytearray()), memoryview(mmap.mmap(-1, ALIGNMENT))
    assert written(tmp_path / "file", Noting(), [[empty, block], [empty]]) == bytes(block)


def test_a_small_file_is_written_at_once(tmp_path: Path) -> None:
    disk = Noting()
    assert written(tmp_path / "small", disk, [[memoryview(b"a" * 5000)], [memoryview(b"b" * 5000)]])[4999:5001] == b"ab"
    assert disk.writes == [(False, 10_000)]


def test_copies_are_written_from_where_they_are(tmp_path: Path) -> None:
    tensors = [torch.randn(size) for size in (1_000_003, 3, 700_001)] + [torch.arange(300_001)]
    held = Staging().copied([whole_of(str(number), each) for number, each in enumerate(tensors)])
    copies = [held[number] for number in (3, 0, 1, 2)]  # larger elements precede smaller ones in a file
    header, _ = header_of([(each.name, each.dtype, each.shape) for each in copies])
    assert len(header) % ALIGNMENT == 0
    views = [memoryview(bytearray(header)), *(memory_with(each.elements()) for each in copies)]
    disk = Noting()
    data = written(tmp_path / "file", disk, [[view] for view in views])
    assert data == b"".join(views)
    copied = [range(address_of(view), address_of(view) + len(view)) for view in views[1:]]
    in_place = [view for view in disk.views if any(address_of(view) in each for each in copied)]
    assert sum(map(len, in_place)) > len(data) - 10 * ALIGNMENT, "only what does not fill a block is collected"


def test_large_pieces_are_written_in_large_writes(tmp_path: Path) -> None:
    tensors = [torch.randn(2 * MIB), torch.tensor(7.0), torch.randn(2 * MIB)]  # the third starts within a page
    held = Staging().copied([whole_of(str(number), each) for number, each in enumerate(tensors)])
    disk = Noting()
    root = Root(LocalStorage(tmp_path, disk=disk))
    write_part(root.storage, root.begin(), 0, [outgoing_of(each) for each in held])
    assert len(disk.writes) <= 6, "of 16 MiB, each of at most 8 MiB"


def test_a_copy_that_does_not_fit_is_refused() -> None:
    wanted = torch.zeros(1).expand(1 << 46)
    with pytest.raises(
        CheckpointError, match=r"not enough memory for a copy of the 281,474,976,710,656 bytes .*asynchronous=False"
    ):
        Staging().copied([whole_of("w", wanted)])

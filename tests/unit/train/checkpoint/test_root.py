"""A directory of checkpoints: saving, loading, damage reports, retention, and errors with solutions."""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_states import NAMES, SHAPE, floats, pieces, save, steps_in, write

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.checkpoint import listing_of, open_checkpoint
from paceline.train.checkpoint.format.local_storage import Disk, LocalStorage
from paceline.train.checkpoint.format.manifest import BLOCK_NBYTES
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import Box, Flat, whole
from paceline.train.checkpoint.format.root import Root


def newest(root: Root) -> str:
    found, skipped = root.newest_whole(digests=True)
    assert found is not None and skipped == []
    return found.name


def test_what_was_saved_is_read(tmp_path):
    root = Root(tmp_path / "a" / "b")
    assert save(root, 3) == newest(root) == "step_0000000003"
    assert steps_in(root, "step_0000000003") == {3}
    assert (tmp_path / "a" / "b" / "latest").read_text() == "step_0000000003\n"
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["latest", "step_0000000003"]


def test_any_part_of_a_tensor_is_read_on_its_own(tmp_path):
    root = Root(tmp_path)
    data = struct.pack("<300f", *range(300))
    draft = root.begin()
    halves = [
        WriteItem("w", "F32", SHAPE, Flat(0, 130), data[:520]),
        WriteItem("w", "F32", SHAPE, Flat(130, 300), data[520:]),
    ]
    parts = [write_part(root.storage, draft, rank, [half]) for rank, half in enumerate(halves)]
    root.publish(draft, parts, None, world_size=2)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w") == data
        assert checkpoint.read("w", Flat(120, 140)) == data[480:560]
        columns = struct.unpack("<18f", checkpoint.read("w", Box((0, 10), (6, 3))))
        assert columns == tuple(float(50 * row + column) for row in range(6) for column in (10, 11, 12))


def test_large_tensors_are_read_by_blocks(tmp_path):
    root = Root(tmp_path)
    data = os.urandom(3 * BLOCK_NBYTES + 100)
    draft = root.begin(1)
    pieces = [
        WriteItem("w", "U8", (len(data),), whole((len(data),)), data),
        WriteItem("e", "F32", (0, 3), Flat(0, 0), b""),
    ]
    root.publish(draft, [write_part(root.storage, draft, 0, pieces)], None, world_size=1)
    with root.open(newest(root)) as checkpoint:
        assert checkpoint.read("w") == data and checkpoint.read("e") == b""
        before = checkpoint.nbytes_read
        start = BLOCK_NBYTES + 70_000
        assert checkpoint.read("w", Flat(start, start + 10)) == data[start : start + 10]
        assert checkpoint.nbytes_read - before <= BLOCK_NBYTES


def test_files_are_those_that_safetensors_reads(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    root = Root(tmp_path)
    save(root, 5)
    read = {}
    for file in (tmp_path / "step_0000000005").glob("*.safetensors"):
        read.update(numpy.load_file(file))
    assert sorted(read) == [
        "model/bias",
        "model/weight[0:150]",
        "model/weight[150:300]",
        "optimizer/avg[0:6, 0:25]",
        "optimizer/avg[0:6, 25:50]",
    ]
    assert read["optimizer/avg[0:6, 0:25]"].shape == (6, 25) and set(read["model/bias"]) == {5}


def test_the_same_step_may_be_saved_again(tmp_path):
    root = Root(tmp_path)
    assert [save(root, 3), save(root, 3)] == ["step_0000000003", "step_0000000003.2"]
    assert newest(root) == "step_0000000003.2"


def test_what_was_saved_last_is_the_newest(tmp_path):
    root = Root(tmp_path)
    save(root, 100)
    save(root, 7)  # the training was begun anew, or went on from an older one
    assert newest(root) == "step_0000000007"


def test_old_ones_are_removed_and_others_left_alone(tmp_path):
    root = Root(tmp_path)
    for step in range(1, 5):
        save(root, step)
    (tmp_path / "step_0000000001").rename(tmp_path / "best")
    assert root.retire(2) == ["step_0000000002"]
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "step_0000000003", "step_0000000004"]
    assert steps_in(root, "best") == {1}


def test_one_that_is_being_read_is_not_removed(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    with root.open("step_0000000001"):
        save(root, 2)
        assert root.retire(1) == []
    assert root.retire(1) == ["step_0000000001"]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    root = Root(tmp_path)
    for step in (1, 2, 3):
        save(root, step)
    os.truncate(tmp_path / "step_0000000003" / "rank_00001_000.safetensors", 50)
    assert root.retire(1) == ["step_0000000001"]
    found, skipped = root.newest_whole()
    assert (
        found is not None and found.name == "step_0000000002" and [each.name for each in skipped] == ["step_0000000003"]
    )


def test_nothing_is_removed_if_none_is_whole(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    os.truncate(tmp_path / "step_0000000001" / "rank_00001_000.safetensors", 50)
    assert root.retire(1) == [] and root.newest_whole()[0] is None


def test_every_flipped_byte_is_found_and_the_older_one_taken(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    save(root, 2)
    for file in sorted((tmp_path / "step_0000000002").iterdir()):
        whole_one = file.read_bytes()
        for at in range(0, len(whole_one), 97):
            file.write_bytes(whole_one[:at] + bytes([whole_one[at] ^ 16]) + whole_one[at + 1 :])
            found, skipped = root.newest_whole(digests=True)
            assert found is not None and found.name == "step_0000000001"
            assert str(file) in str(skipped[0].fault)
        file.write_bytes(whole_one)
    assert newest(root) == "step_0000000002"


@pytest.mark.parametrize("keep", [0, 1, -1, None])
def test_cut_and_missing_files_are_found(tmp_path, keep):
    root = Root(tmp_path)
    save(root, 1)
    save(root, 2)
    for file in sorted((tmp_path / "step_0000000002").iterdir()):
        whole_one = file.read_bytes()
        file.unlink()
        if keep is not None:
            file.write_bytes(whole_one[:keep])
        found, skipped = root.newest_whole()
        assert found is not None and found.name == "step_0000000001"
        assert str(file) in str(skipped[0].fault) or "manifest.json" in str(skipped[0].fault)
        file.write_bytes(whole_one)


def test_a_flipped_byte_is_named_when_it_is_read(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    file = tmp_path / "step_0000000001" / "rank_00000_000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with root.open("step_0000000001") as checkpoint:
        damaged = [name for name in NAMES if any(piece.file == file.name for piece in checkpoint.entry(name).pieces)]
        with pytest.raises(CheckpointDamagedError, match=rf"{file} was changed: bytes .* of the tensor {damaged[0]}"):
            checkpoint.read(damaged[0])


def test_left_overs_of_dead_saves_are_removed(tmp_path):
    root = Root(tmp_path)
    dead = Root(tmp_path)
    draft = dead.begin(1)
    write(dead, draft, 1, 0)
    assert dead.storage.is_held(draft.directory)
    assert save(root, 2) == newest(root)  # a checkpoint in use is kept
    assert (tmp_path / draft.directory).exists()
    dead.abandon(replace(draft, directory="none"))  # closes the manifest, as the end of the process would
    save(root, 3)
    assert not (tmp_path / draft.directory).exists()


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    root = Root(tmp_path)
    draft = root.begin(1)
    part = write(root, draft, 1, 0)
    with pytest.raises(CheckpointError, match="needs one part from each; there are 1, and none from rank 1"):
        root.publish(draft, [part], None, world_size=2)
    root.abandon(draft)
    assert os.listdir(tmp_path) == []


class Refusing(Disk):
    """A disk on which one operation fails."""

    def __init__(self, operation: str, code: int) -> None:
        self.operation, self.code = operation, code

    def _maybe(self, operation: str) -> None:
        if operation == self.operation:
            raise OSError(self.code, os.strerror(self.code))

    def write(self, descriptor, views):
        self._maybe("write")
        return super().write(descriptor, views)

    def sync(self, descriptor):
        self._maybe("sync")
        super().sync(descriptor)

    def create(self, path: Path) -> int:
        self._maybe("create")
        return super().create(path)


@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        ("write", errno.ENOSPC, r"No space left on device \(.* are free\), after .* bytes. Free some space"),
        ("sync", errno.EIO, r"Input/output error, after .* bytes. The disk or its connection is failing"),
        ("create", errno.EACCES, "Permission denied. Grant this user write permission there"),
        ("create", errno.EROFS, "Read-only file system. The file system is mounted read-only"),
    ],
)
def test_refusals_name_the_file_the_rank_and_what_to_do(tmp_path, operation, code, said):
    draft = Root(tmp_path).begin(1)
    refusing = LocalStorage(tmp_path, Refusing(operation, code))
    with pytest.raises(CheckpointError, match=r"rank 1 \(.*pid \d+\) could not .*/rank_00001_000.safetensors: " + said):
        write_part(refusing, draft, 1, pieces(1, 1))


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"would need 1000000000.0 GB for a checkpoint in .*, where .* are free"):
        Root(tmp_path / "x").begin(1, nbytes=10**18)
    assert not (tmp_path / "x").exists()


def test_progress_is_told_and_may_stop_the_save(tmp_path):
    root = Root(tmp_path)
    told = []
    draft = root.begin(1)
    write_part(root.storage, draft, 0, pieces(1, 0), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (1200, 1200)


def test_data_of_the_wrong_size_is_refused(tmp_path):
    root = Root(tmp_path)
    with pytest.raises(CheckpointError, match=r"was given 8 bytes for w, which has 12 \(F32 \[3\]\)"):
        write_part(root.storage, root.begin(1), 0, [WriteItem("w", "F32", (3,), whole((3,)), floats(1, 2))])


def test_disks_that_hosts_do_not_share_hold_their_own_files(tmp_path):
    first, second = Root(tmp_path / "0"), Root(tmp_path / "1")
    draft = first.begin(9, unique=True, sequence=4)
    second.join(draft)
    parts = [write(root, draft, 9, rank) for rank, root in enumerate((first, second))]
    for root, part in zip((first, second), parts, strict=True):
        root.publish(draft, parts, {"step": 9}, world_size=2, here=list(part.files))
    assert newest(first) == newest(second) == draft.name and first.next_sequence() == 5
    with second.open(draft.name) as checkpoint:
        assert checkpoint.read("model/bias") == struct.pack("<3q", 9, 9, 9)
        with pytest.raises(CheckpointDamagedError, match=r"rank_00000_000.safetensors is on another host"):
            checkpoint.read("model/weight")


def test_one_that_a_save_removes_meanwhile_is_not_opened(tmp_path, monkeypatch):
    root = Root(tmp_path)
    save(root, 1)
    listings = []

    def list_and_go_on(place):
        listings.append(listing_of(place))
        if len(listings) == 1:
            save(root, 2)
            root.retire(1)
        return listings[-1]

    monkeypatch.setattr("paceline.train.checkpoint.format.checkpoint.listing_of", list_and_go_on)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.manifest.step == 2


def test_directories_that_cannot_be_synced_are_accepted(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    root = Root(tmp_path)
    assert save(root, 1) == newest(root)


def test_an_empty_place_has_no_checkpoint(tmp_path):
    assert Root(tmp_path / "none").newest_whole() == (None, [])
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        open_checkpoint(tmp_path)

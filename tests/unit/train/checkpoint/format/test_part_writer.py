"""Files that a rank writes into a checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from checkpoint_states import floats, pieces, save

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.local_storage import Disk, LocalStorage
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import whole
from paceline.train.checkpoint.format.root import Root


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

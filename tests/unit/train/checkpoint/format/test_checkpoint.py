"""Reading and verification of a complete checkpoint."""

from __future__ import annotations

import os
import struct

import pytest
from checkpoint_states import NAMES, SHAPE, newest_whole, save

from paceline.errors import CheckpointDamagedError
from paceline.train.checkpoint.format.manifest import BLOCK_NBYTES
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import Flat, TensorBlock, whole
from paceline.train.checkpoint.format.root import Root, open_checkpoint


def newest(root: Root) -> str:
    found, skipped = newest_whole(root, digests=True)
    assert found is not None and skipped == []
    return found.name


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
        columns = struct.unpack("<18f", checkpoint.read("w", TensorBlock((0, 10), (6, 3))))
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


def test_every_flipped_byte_is_found_and_the_older_one_taken(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    save(root, 2)
    for file in sorted((tmp_path / "step_0000000002").iterdir()):
        whole_one = file.read_bytes()
        for at in range(0, len(whole_one), 97):
            file.write_bytes(whole_one[:at] + bytes([whole_one[at] ^ 16]) + whole_one[at + 1 :])
            found, skipped = newest_whole(root, digests=True)
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
        found, skipped = newest_whole(root)
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

"""Metadata of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as torchs
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch_files import same, trained

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.dcp import read_metadata
from paceline.train.checkpoint.foreign.foreign_file import open_foreign, state_of


def metadata_of(
    shape: tuple[int, ...], blocks: list[tuple[tuple[int, ...], tuple[int, ...]]], **changes: object
) -> bytes:
    """Returns the metadata of a float32 tensor `a` whose blocks have these offsets and sizes."""
    kinds = {"dtype": torch.float32, "file": "__0_0.distcp", "at": 0, "nbytes": 8, "path": ("a",), **changes}
    described = torchs.TensorStorageMetadata(
        torchs.TensorProperties(kinds["dtype"]),
        torch.Size(shape),
        [torchs.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in blocks],
    )
    places = {
        torchs.MetadataIndex("a", torch.Size(offset)): _StorageInfo(kinds["file"], kinds["at"], kinds["nbytes"])
        for offset, _ in blocks
    }
    return pickle.dumps(torchs.Metadata({"a": described}, {"a": kinds["path"]}, places))


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((), [((), ())]),
        ((0, 3), []),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]),
        ((5, 3), [((0, 0), (3, 3)), ((3, 0), (2, 3)), ((5, 0), (0, 3))]),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))]),
    ],
    ids=["a scalar", "an empty tensor", "rows", "an empty block", "a pinwheel"],
)
def test_blocks_that_cover_a_tensor_are_read(shape, blocks):
    item = read_metadata(metadata_of(shape, blocks), "x")["a"]
    assert (item.dtype, item.shape) == ("float32", shape)
    assert [(each.offset, each.shape) for each in item.chunks] == [each for each in blocks if 0 not in each[1]]


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4, 4), [((0, 0), (2, 4))]),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]),
        ((4, 4), [((0, 0), (2, 4)), ((3, 0), (2, 4))]),
        ((4,), [((0, 0), (4, 1))]),
        ((3, 3), [((0, 0), (1, 2)), ((0, 1), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))]),
    ],
    ids=["a gap", "an overlap", "beyond the end", "other dimensions", "an overlap in a pinwheel"],
)
def test_blocks_that_do_not_cover_a_tensor_once_are_refused(shape, blocks):
    with pytest.raises(CheckpointError, match=r"the blocks of a do not cover its shape .* exactly once"):
        read_metadata(metadata_of(shape, blocks), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": -8}, r"the location of a in '__0_0.distcp' does not consist of sizes"),
        ({"nbytes": -1}, r"the location of a in '__0_0.distcp' does not consist of sizes"),
        ({"nbytes": 1 << 70}, r"the location of a in '__0_0.distcp' does not consist of sizes"),
        ({"file": "a\0b"}, r"the file of a is not text"),
        ({"file": 7}, r"the file of a is not text"),
        ({"dtype": "load"}, r"a has an unknown type"),
        ({"path": ()}, r"the path of a is not a tuple of keys"),
        ({"path": ("a",) * 1000}, r"the path of a is not a tuple of keys"),
        ({"path": (None,)}, r"the path of a is not a tuple of keys"),
    ],
)
def test_a_number_or_name_that_leads_elsewhere_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_metadata(metadata_of((2,), [((0,), (2,))], **change), "x")


def test_a_value_within_another_is_refused():
    whole = pickle.loads(metadata_of((2,), [((0,), (2,))]))
    whole.state_dict_metadata["b"] = whole.state_dict_metadata["a"]
    whole.storage_data[torchs.MetadataIndex("b", torch.Size((0,)))] = _StorageInfo("f", 0, 8)
    whole.planner_data["b"] = ("a", "b")
    with pytest.raises(CheckpointError, match="two values at one place, or one within another"):
        read_metadata(pickle.dumps(whole), "x")


@given(st.data())
def test_metadata_with_a_changed_byte_is_read_or_refused(data):
    whole = bytearray(metadata_of((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):  # such as CheckpointDamagedError
        assert len(read_metadata(bytes(whole), "x")) == 1


def test_directories_of_dcp_are_read(tmp_path):
    state = trained()
    dcp.save(
        {**state, "nested": {"list": [1, torch.ones(2)], "dict": {"a": 1.5}}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    found = open_foreign(tmp_path / "dcp")
    assert found is not None and "distributed.checkpoint" in found.kind
    read = state_of(found)
    assert isinstance(read, dict)
    assert same(read["model"], dict(state["model"]))
    assert (read["epoch"], read["name"], read["nested"]["dict"]) == (3, "digits", {"a": 1.5})
    assert read["nested"]["list"][0] == 1 and torch.equal(read["nested"]["list"][1], torch.ones(2))
    averages = [each["exp_avg"] for each in read["optimizer"]["state"].values()]
    assert all(map(torch.equal, averages, [each["exp_avg"] for each in state["optimizer"]["state"].values()]))


def test_dcp_metadata_that_wants_more_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata was not read: it refers to posix.mkdir"):
        open_foreign(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["eval", "exec", "__import__", "getattr"])
def test_no_builtin_is_reached_through_dcp_metadata(tmp_path, name):
    program = f"cbuiltins\n{name}\n(cbuiltins\nset\nS'__class__'\ntR.".encode()
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError, match=r"\.metadata was not read"):
        open_foreign(tmp_path)


def test_damaged_directories_of_dcp_are_named(tmp_path):
    dcp.save(trained(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = next((tmp_path / "dcp").glob("*.distcp"))
    os.truncate(data, 100)
    with pytest.raises(CheckpointDamagedError, match=rf"{data} (is truncated|has no readable)"):
        state_of(open_foreign(tmp_path / "dcp"))
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:200])
    with pytest.raises(CheckpointDamagedError, match=r"\.metadata cannot be read"):
        open_foreign(tmp_path / "dcp")


def save_sharded(directory: str) -> None:
    """Saves a DTensor as FSDP does, on two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(12.0).reshape(2, 6), mesh, [Shard(1)])
    dcp.save(OrderedDict(rows=rows, columns=columns), checkpoint_id=directory)
    torch.distributed.destroy_process_group()


def test_tensors_of_several_ranks_are_put_together(tmp_path, ranks):
    ranks(2)(save_sharded, str(tmp_path / "dcp"))
    assert len(list(Path(tmp_path / "dcp").glob("*.distcp"))) == 2
    read = state_of(open_foreign(tmp_path / "dcp"))
    assert isinstance(read, dict) and torch.equal(read["rows"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(read["columns"], torch.arange(12.0).reshape(2, 6))


@pytest.mark.parametrize(
    ("payload", "nbytes", "said"),
    [
        (torch.arange(4, dtype=torch.int32), None, "does not hold a at"),
        (torch.arange(4.0).to_sparse(), None, "does not hold a at"),
        (torch.empty(4, device="meta"), None, "does not hold a at"),
        (torch.arange(4.0), 8, "too few bytes for the block .4. of a at"),
    ],
    ids=["another type", "a sparse tensor", "no data", "a small chunk"],
)
def test_a_block_of_another_kind_is_refused(tmp_path, payload, nbytes, said):
    torch.save(payload, tmp_path / "__0_0.distcp")
    size = (tmp_path / "__0_0.distcp").stat().st_size if nbytes is None else nbytes
    (tmp_path / ".metadata").write_bytes(metadata_of((4,), [((0,), (4,))], nbytes=size))
    with pytest.raises(CheckpointDamagedError, match=said):
        state_of(open_foreign(tmp_path))


def test_a_block_that_is_smaller_than_its_tensor_says_is_refused(tmp_path):
    torch.save(torch.arange(4.0), tmp_path / "whole")
    with zipfile.ZipFile(tmp_path / "whole") as source, zipfile.ZipFile(tmp_path / "__0_0.distcp", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name)[:8] if name.endswith("data/0") else source.read(name))
    size = (tmp_path / "__0_0.distcp").stat().st_size
    (tmp_path / ".metadata").write_bytes(metadata_of((4,), [((0,), (4,))], nbytes=size))
    with pytest.raises(CheckpointDamagedError, match="a tensor of 16 bytes is listed in its record 0"):
        state_of(open_foreign(tmp_path))


def test_objects_that_share_bytes_are_refused():
    places = {
        torchs.MetadataIndex(name): _StorageInfo(f"{dot}__0_0.distcp", 0, 8) for name, dot in (("a", ""), ("b", "./"))
    }
    described = {name: torchs.BytesStorageMetadata() for name in "ab"}
    data = pickle.dumps(torchs.Metadata(described, {"a": ("a",), "b": ("b",)}, places))
    with pytest.raises(CheckpointError, match="two of its objects have the byte 0 of '__0_0.distcp'"):
        read_metadata(data, "x")

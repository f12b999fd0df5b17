"""Files from torch.save, torch.distributed.checkpoint and safetensors are read without running code from them."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import open_foreign, state_of


def trained() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "digits"}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return one == other


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_torch_save_are_read(tmp_path, is_zip):
    state = trained()
    torch.save(state, tmp_path / "state.pt", _use_new_zipfile_serialization=is_zip)
    found = open_foreign(tmp_path / "state.pt")
    assert found is not None and found.kind == "a file of torch.save"
    assert same(state_of(found), {**state, "model": dict(state["model"])})
    assert found.tensors["model/0.weight"].shape == (4, 3)


def test_a_file_with_objects_is_refused(tmp_path):
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "model.pt")
    with pytest.raises(
        CheckpointError, match=r"model.pt contains more than tensors and plain values.*Save state_dicts"
    ):
        open_foreign(tmp_path / "model.pt")


def test_a_cut_file_is_named(tmp_path):
    torch.save(trained(), tmp_path / "state.pt")
    os.truncate(tmp_path / "state.pt", (tmp_path / "state.pt").stat().st_size // 2)
    with pytest.raises(CheckpointDamagedError, match=r"state.pt cannot be read as a file of torch.save"):
        open_foreign(tmp_path / "state.pt")


def test_safetensors_files_are_read(tmp_path):
    torchs = pytest.importorskip("safetensors.torch")
    tensors = {"a/b": torch.arange(6.0).reshape(2, 3), "c": torch.ones(3, dtype=torch.bfloat16), "e": torch.empty(0, 2)}
    torchs.save_file(tensors, tmp_path / "m.safetensors")
    found = open_foreign(tmp_path / "m.safetensors")
    assert found is not None and same(dict(sorted(state_of(found).items())), tensors)
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with pytest.raises(
        CheckpointDamagedError, match=r"m.safetensors is truncated: it has \d+ bytes, but its tensors end at"
    ):
        open_foreign(tmp_path / "m.safetensors")


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


def test_other_files_and_directories_are_told_apart(tmp_path):
    (tmp_path / "text").write_text("something else that is longer than a header")
    with pytest.raises(CheckpointError, match=r"is neither a checkpoint of Paceline, nor a file of torch.save"):
        open_foreign(tmp_path / "text")
    assert open_foreign(tmp_path) is None


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

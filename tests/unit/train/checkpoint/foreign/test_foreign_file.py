"""Files from torch.save, torch.distributed.checkpoint and safetensors are read without running code from them."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch_files import same, trained

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import open_foreign, state_of


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


def test_other_files_and_directories_are_told_apart(tmp_path):
    (tmp_path / "text").write_text("something else that is longer than a header")
    with pytest.raises(CheckpointError, match=r"is neither a checkpoint of Paceline, nor a file of torch.save"):
        open_foreign(tmp_path / "text")
    assert open_foreign(tmp_path) is None

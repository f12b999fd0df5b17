"""Files from torch.save, torch.distributed.checkpoint and safetensors are read without running code from them."""

from __future__ import annotations

import collections
import os
import re

import pytest
import torch
from torch import nn
from torch_files import same, trained

import paceline
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import open_foreign, state_of


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_torch_save_are_read(tmp_path, is_zip):
    state = trained()
    torch.save(state, tmp_path / "state.pt", _use_new_zipfile_serialization=is_zip)
    found = open_foreign(tmp_path / "state.pt")
    assert found is not None and found.kind == "a torch.save file"
    assert same(state_of(found), {**state, "model": dict(state["model"])})
    assert found.tensors["model/0.weight"].shape == (4, 3)


def test_a_file_with_objects_is_refused(tmp_path):
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "model.pt")
    with pytest.raises(
        CheckpointError, match=r"model.pt contains more than tensors and plain values.*Save state_dicts"
    ) as caught:
        open_foreign(tmp_path / "model.pt")
    # the reason comes from the unpickler
    assert re.search(r"the file specifies: Unsupported global: GLOBAL torch.nn.*linear.Linear", str(caught.value))


def test_a_cut_file_is_named(tmp_path):
    torch.save(trained(), tmp_path / "state.pt")
    os.truncate(tmp_path / "state.pt", (tmp_path / "state.pt").stat().st_size // 2)
    with pytest.raises(CheckpointDamagedError, match=r"state.pt cannot be read as a torch.save file"):
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
    with pytest.raises(CheckpointError, match=r"is neither a Paceline checkpoint nor a torch.save or safetensors file"):
        open_foreign(tmp_path / "text")
    assert open_foreign(tmp_path) is None


def test_every_kind_of_plain_value_is_read(tmp_path):
    shared = [1, 2.5]
    weight = torch.arange(12.0)
    state = {
        "views": [weight, weight[3:7], weight.view(3, 4).t(), torch.ones(1).expand(1000), torch.empty(0, 1 << 40)],
        "dtypes": [
            torch.zeros(3, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.uint16, torch.complex128)
        ],
        "float8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "ordered": collections.OrderedDict(a=1, b=[1, (2, 3)]),
        "others": [{1, 2}, b"abc", bytearray(b"xyz"), 1 + 2j, 2**500, None, "\ud800"],
        "shared": [shared] * 100,
        (1, (2, 3)): 4,
        None: collections.Counter("abca"),
    }
    for is_zip in (True, False):
        if not is_zip:  # torch's format from before version 1.6 has no such types
            state = {key: value for key, value in state.items() if key not in ("dtypes", "float8")}
        torch.save(state, tmp_path / "state.pt", _use_new_zipfile_serialization=is_zip)
        expected = torch.load(tmp_path / "state.pt", weights_only=True)
        found = open_foreign(tmp_path / "state.pt")
        assert found is not None and same(state_of(found), expected)


@pytest.mark.parametrize("length", [120, 128, 136, 384])
def test_safetensors_with_a_header_of_any_length_are_read(tmp_path, length):
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(length)
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    found = open_foreign(tmp_path / "m.safetensors")
    assert found is not None and found.kind == "a safetensors file"
    assert same(state_of(found), {"w": torch.zeros(2)})


def test_a_module_is_not_loaded_from_a_dict_with_other_keys(tmp_path):
    torch.save({"model": {None: 1, "weight": torch.ones(2, 2)}}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"'model' is a module here, but .* with a key of type NoneType"):
        paceline.load({"model": nn.Linear(2, 2)}, tmp_path / "state.pt")


@pytest.mark.parametrize("dtype", [torch.complex32, torch.quint8])
def test_a_type_that_checkpoints_lack_is_named(tmp_path, dtype):
    torch.save({"dtype": dtype}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=rf"state.pt cannot be read: a checkpoint cannot hold tensors of {dtype}"):
        open_foreign(tmp_path / "state.pt")

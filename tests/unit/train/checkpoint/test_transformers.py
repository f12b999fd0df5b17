"""transformers can read an exported model."""

from __future__ import annotations

import ctypes

import pytest
import torch

from paceline.cli.main import main
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.regions import whole
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import join
from paceline.train.checkpoint.pytree import name_of

pytestmark = pytest.mark.soak  # importing transformers is slow


def outgoing(name: str, tensor: torch.Tensor) -> WriteItem:
    tensor = tensor.detach().contiguous()
    data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    shape = tuple(tensor.shape)
    return WriteItem(join("model", name), name_of(tensor.dtype), shape, whole(shape), data)


def test_transformers_reads_what_was_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(settings)
    root = Root(tmp_path / "run")
    draft = root.begin(1)
    pieces = [outgoing(name, tensor) for name, tensor in model.state_dict().items()]
    root.publish(draft, [write_part(root.storage, draft, 0, pieces)], None, world_size=1)

    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hub" / "model.safetensors")]) == 0
    settings.save_pretrained(tmp_path / "hub")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hub")
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())

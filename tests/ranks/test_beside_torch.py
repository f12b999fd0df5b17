"""Paceline and torch.distributed in one program: each can use the default group that the other created."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_programs import torch_group
from world import reserved_port

import paceline
import paceline.interop.torch_backend


def use_torchs(directory: str) -> None:
    assert not paceline.is_initialized()
    with torch_group("paceline", directory):
        rank, size = paceline.get_rank(), paceline.get_world_size()
        assert (rank, size) == (torch_dist.get_rank(), torch_dist.get_world_size())
        assert paceline.is_initialized() and paceline.get_backend() == "paceline"
        paceline.all_reduce(tensor := torch.ones(3))
        assert tensor.tolist() == [size] * 3
        model = paceline.DistributedDataParallel(nn.Linear(4, 1))
        model(torch.full((2, 4), float(rank))).sum().backward()
        assert model.module.weight.grad.tolist() == [[size - 1.0] * 4]
        group = paceline.new_group([1, 0])
        if rank < 2:
            paceline.all_gather(outs := [torch.empty(1), torch.empty(1)], torch.tensor([float(rank)]), group)
            assert [out.item() for out in outs] == [1.0, 0.0]
        torch_dist.all_reduce(tensor)
        assert tensor.tolist() == [size * size] * 3
        paceline.destroy_process_group()
        if rank < 2:
            with pytest.raises(ValueError, match="was destroyed"):
                paceline.barrier(group)
        torch_dist.barrier()
    assert not paceline.is_initialized() and paceline.GroupMember.WORLD is None
    with pytest.raises(ValueError, match=r"call paceline.init_process_group\(\) first$"):
        paceline.barrier()


def pass_a_group_of_torchs(backend: str, directory: str) -> None:
    with torch_group(backend, directory):
        if backend == "gloo":
            paceline.init_process_group()
        theirs = torch_dist.new_group([0, 1])
        told = r"rank \d: the process group belongs to torch\.distributed .* call, on every rank, paceline\.new_group\("
        for call in (paceline.all_reduce, paceline.broadcast):
            with pytest.raises(TypeError, match=told):
                call(torch.ones(1), group=theirs)
        ours = paceline.new_group(torch_dist.get_process_group_ranks(theirs))
        paceline.all_reduce(tensor := torch.ones(1), group=ours)
        assert tensor.item() == 2
        if backend == "gloo":
            paceline.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_group_of_torchs_is_refused_with_what_to_pass(ranks, tmp_path, backend):
    ranks(2)(pass_a_group_of_torchs, backend, str(tmp_path))


def test_torchs_default_group_is_paceline_s(ranks, tmp_path):
    ranks(3)(use_torchs, str(tmp_path))


def keep_apart(directory: str) -> None:
    told = r"torch.distributed's default group has the backend 'gloo'"
    with torch_group("gloo", directory), pytest.raises(ValueError, match=told):
        paceline.barrier()
    with torch_group("paceline", directory):
        paceline.init_process_group()
        assert paceline.GroupMember.WORLD is not torch_dist.group.WORLD.world.group
        paceline.destroy_process_group()
        assert paceline.GroupMember.WORLD is torch_dist.group.WORLD.world.group


def test_a_group_of_its_own_takes_precedence(ranks, tmp_path):
    ranks(2)(keep_apart, str(tmp_path))


def shard_fully() -> None:
    paceline.interop.torch_backend.register()
    paceline.init_process_group()
    port = [reserved_port()]
    paceline.broadcast_object_list(port, 0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))  # not the port of Paceline's own store
    model = fully_shard(nn.Linear(4, 2))
    assert torch_dist.group.WORLD.name() == "paceline"
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 2
    torch_dist.destroy_process_group()
    paceline.destroy_process_group()
    assert torch_dist.Backend.default_device_backend_map["cpu"] == "gloo"


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="fully_shard needs a later torch on CPU")
def test_fully_shard_makes_a_group_of_paceline_s(ranks):
    ranks(2)(shard_fully)


def lend_the_default_group(directory: str) -> None:
    with pytest.raises(ValueError, match=r"call paceline.init_process_group\(\) first"):
        paceline.interop.torch_backend.lend_default_group()
    paceline.init_process_group()
    paceline.interop.torch_backend.lend_default_group()
    group = torch_dist.new_group([1, 0])
    for each in (None, group):
        torch_dist.all_reduce(tensor := torch.ones(3), group=each)
        assert tensor.tolist() == [2, 2, 2]
    assert torch_dist.get_backend() == "paceline"
    with pytest.raises(ValueError, match="twice"):
        paceline.interop.torch_backend.lend_default_group()
    torch_dist.destroy_process_group()
    with torch_group("gloo", directory):  # a program may still choose a different backend
        assert torch_dist.get_backend() == "gloo"
        torch_dist.all_reduce(tensor)
        paceline.all_reduce(tensor)
        assert tensor.tolist() == [8, 8, 8]


def test_a_lent_default_group_is_torchs(ranks, tmp_path):
    ranks(2)(lend_the_default_group, str(tmp_path))

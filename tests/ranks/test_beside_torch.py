"""Paceline and torch.distributed in one program: either uses the default group that the other made."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as torch_dist
from against_gloo import torch_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from world import free_port

import paceline


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


def test_torchs_default_group_is_paceline_s(ranks, tmp_path):
    ranks(3)(use_torchs, str(tmp_path))


def keep_apart(directory: str) -> None:
    with torch_group("gloo", directory):
        with pytest.raises(ValueError, match=r"torch.distributed's default group has the backend 'gloo'"):
            paceline.barrier()
    with torch_group("paceline", directory):
        paceline.init_process_group()
        assert paceline.GroupMember.WORLD is not torch_dist.group.WORLD.world.group
        paceline.destroy_process_group()
        assert paceline.GroupMember.WORLD is torch_dist.group.WORLD.world.group


def test_a_group_of_its_own_takes_precedence(ranks, tmp_path):
    ranks(2)(keep_apart, str(tmp_path))

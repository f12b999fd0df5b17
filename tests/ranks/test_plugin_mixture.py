"""A process group with a backend for each device type, one of which is Paceline."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.interop.torch_backend

NEEDED = (2, 14)  # older versions do not allow Python subclasses of Backend


def mix_with_gloo(directory: str, backend: str) -> None:
    paceline.interop.torch_backend.register()
    rank = int(os.environ["RANK"])
    torch_dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=2)
    world = torch_dist.group.WORLD
    names = {device.type: world._get_backend(device).name() for device in world._device_types}
    assert names == {"cpu": "paceline", "cuda": "gloo"}
    torch_dist.all_reduce(tensor := torch.ones(3))
    torch_dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [4, 4, 4]
    torch_dist.reduce_scatter_tensor(part := torch.empty(2), torch.ones(4))
    torch_dist.all_gather_into_tensor(whole := torch.empty(4), part * rank)
    assert whole.tolist() == [0, 0, 2, 2]
    torch_dist.all_gather_object(objects := [None, None], {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    if rank == 0:
        torch_dist.send(part, 1)
    else:
        assert torch_dist.recv(part.zero_(), 0) == 0
        assert part.tolist() == [2, 2]
    with pytest.raises(paceline.CollectiveMismatchError, match="3 elements.*4 elements"):
        torch_dist.all_reduce(torch.ones(3 + rank))
    paceline.all_reduce(tensor)
    torch_dist.all_reduce(tensor, group=torch_dist.new_group([1, 0]))
    assert tensor.tolist() == [16, 16, 16]
    model = DistributedDataParallel(nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1, 1]]
    group, ran = torch_dist.new_group(), []
    backend = group._get_backend(torch.device("cpu"))
    backend.register_abort_hook(0, lambda: ran.append(True))
    assert backend.get_error().name == "SUCCESS"
    torch_dist.all_reduce(tensor)  # so that no rank aborts before all have queried the state
    group.abort()
    assert backend.get_error().name == "COMM_ERROR" and ran == [True]
    with pytest.raises(paceline.GroupAbortedError):
        torch_dist.all_reduce(tensor, group=group)
    torch_dist.destroy_process_group()
    assert not paceline.is_initialized()


@pytest.mark.skipif(torch.__version__ < NEEDED, reason="PyTorch hands the whole group to a backend in Python")
def test_a_mixture_takes_cpu_tensors_to_paceline(ranks, tmp_path):
    ranks(2)(mix_with_gloo, str(tmp_path), "cuda:gloo,cpu:paceline")

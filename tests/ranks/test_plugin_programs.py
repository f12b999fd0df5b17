"""Features based on torch.distributed: meshes, DTensor, functional collectives, compiled programs, checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_programs import Comparison
from values import make

Result = list[torch.Tensor]
LARGEST = "max" if torch.__version__ >= (2, 7) else "sum"  # before 2.7, gloo's reduce_scatter always computes the sum


def new_groups() -> Result:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    pair = torch_dist.new_group([size - 1, 0])
    assert (torch_dist.get_rank(pair) >= 0) == (rank in (0, size - 1))
    tensor, results = make(torch.float32, 1000, rank), []
    if rank in (0, size - 1):
        torch_dist.all_reduce(tensor, group=pair)
        results.append(tensor.clone())
        torch_dist.broadcast(tensor.add_(rank), src=size - 1, group=pair)
        results.append(tensor.clone())
        torch_dist.barrier(pair)
        torch_dist.destroy_process_group(pair)
    alone = torch_dist.new_subgroups(group_size=1)[0]
    torch_dist.all_reduce(tensor, group=alone)
    torch_dist.all_reduce(tensor)
    return [*results, tensor]


def mesh() -> Result:
    rank = torch_dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    results = []
    for name in ("rows", "columns"):
        tensor = make(torch.float32, 1000, rank)
        torch_dist.all_reduce(tensor, group=mesh.get_group(name))
        gathered = torch.empty(2000)
        torch_dist.all_gather_into_tensor(gathered, tensor, group=mesh[name].get_group())
        results += [tensor, gathered]
    flat = mesh["rows", "columns"]._flatten("all").get_group()
    torch_dist.all_reduce(results[0], group=flat)
    return results


def tensors() -> Result:
    size = torch_dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = make(torch.float32, 7 * 12, 0).view(7, 12)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    replicated = distribute_tensor(whole, mesh, [Replicate()])
    other = sharded.redistribute(mesh, [Shard(1)])
    product = sharded.t() @ sharded
    assert product.placements == (Partial(),)
    reduced = product.redistribute(mesh, [Shard(0)])
    torch.testing.assert_close(sharded.full_tensor(), whole)
    return [
        other.to_local(),
        replicated.to_local(),
        product.full_tensor(),
        reduced.to_local(),
        (other + 1).sum().full_tensor(),
    ]


def collectives(tensor: torch.Tensor, size: int) -> Result:
    group = torch_dist.group.WORLD
    gathered = functional.all_gather_tensor(tensor, 0, group)
    return [
        functional.all_reduce(tensor, "sum", group),
        gathered,
        functional.reduce_scatter_tensor(gathered, LARGEST, 0, group),
        functional.broadcast(tensor, 1, group),
        functional.all_to_all_single(tensor, None, None, group),
        *functional.all_reduce_coalesced([tensor, tensor * 2], "sum", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor * 2], group),
        *functional.reduce_scatter_tensor_coalesced([gathered, gathered * 2], "sum", [0, 0], group),
    ]


def functional_collectives() -> Result:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    return [functional.wait_tensor(each) for each in collectives(make(torch.float32, 12, rank), size)]


def compiled() -> Result:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    run = torch.compile(collectives, fullgraph=True, backend="aot_eager")
    results = [each.clone() for each in run(make(torch.float32, 12, rank), size)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        torch_dist.all_reduce(tensor)
        whole = tensor.new_empty(size * tensor.numel())
        torch_dist.all_gather_into_tensor(whole, tensor)
        return whole * 2

    @torch.compile(fullgraph=True, backend="aot_eager")
    def with_methods(tensor: torch.Tensor) -> torch.Tensor:
        group = torch_dist.group.WORLD
        order = [(peer + 1) % group.size() for peer in range(size)]
        return functional.permute_tensor(tensor, order, group) * (1 + group.rank())

    return [*results, in_place(make(torch.float32, 12, rank)), with_methods(make(torch.float32, 12, rank))]


def compiled_ddp() -> Result:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    run = torch.compile(model, backend="aot_eager")
    run(make(torch.float32, 32, torch_dist.get_rank()).view(4, 8)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def saved_and_loaded() -> Result:
    box = [tempfile.mkdtemp()]
    torch_dist.broadcast_object_list(box)
    torch.manual_seed(3)
    model = fully_shard(nn.Sequential(nn.Linear(8, 33), nn.Linear(33, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(2):
        model(make(torch.float32, 32, torch_dist.get_rank()).view(4, 8)).sum().backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 2}
    checkpoint.save(state, checkpoint_id=box[0])
    wanted = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = {"model": get_model_state_dict(model), "step": 0}
    checkpoint.load(loaded, checkpoint_id=box[0])
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.full_tensor(), value)
    running = checkpoint.async_save({"model": get_model_state_dict(model)}, checkpoint_id=str(Path(box[0], "later")))
    running.result()
    return wanted


# Before torch 2.7, torch's compiler accepts no call without a group, and `fully_shard` needs an accelerator.
NEWER = [compiled, saved_and_loaded] if torch.__version__ >= (2, 7) else []
WORLDS = {
    2: Comparison(new_groups, tensors, functional_collectives, compiled_ddp, *NEWER),
    3: Comparison(new_groups, tensors),
    4: Comparison(mesh),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("size", "program"), [(size, program) for size, world in WORLDS.items() for program in world.programs]
)
def test_a_program_of_torchs_agrees_with_gloo(size, program):
    WORLDS[size].require(size, program)

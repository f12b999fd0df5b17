"""Programs in which tensors on the device `HERE` are staged in host memory; they require a small chunk size."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from values import COMPLEX, FLOATS, INTEGERS, make, supported

import paceline as dist
from paceline.comm.engine.staged import channel

HERE = "cpu"  # set by the caller of the programs


def same(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Returns True if tensors are bitwise equal."""
    assert there.device == torch.device(HERE)
    return torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))


def every_reduction_has_the_bits_of_the_cpu():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in supported(dtype):
            for count in (0, 1, 3001):
                here = make(dtype, count, rank)
                there = here.to(HERE)
                dist.all_reduce(here, op)
                dist.all_reduce(there, op)
                assert same(there, here), (dtype, op, count)
                for root in range(size):
                    here = make(dtype, count, rank)
                    there = here.to(HERE)
                    dist.reduce(here, root, op)
                    dist.reduce(there, root, op)
                    assert same(there, here)
                inputs = [make(dtype, count, 10 * rank + r) for r in range(size)]
                here = torch.empty(count, dtype=dtype)
                there = here.to(HERE)
                dist.reduce_scatter(here, inputs, op)
                dist.reduce_scatter(there, [each.to(HERE) for each in inputs], op)
                assert same(there, here)
    scaled = torch.full((3,), rank + 1.0, device=HERE)
    dist.all_reduce(scaled, dist.PremulSum(0.5))
    assert scaled.tolist() == [size * (size + 1) / 4] * 3
    with pytest.raises(TypeError, match="BAND is not defined for torch.float32; convert the tensor first"):
        dist.all_reduce(scaled, dist.ReduceOp.BAND)


def every_copy_arrives_whole():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128):
        for count in (0, 3, 3001):
            everyones = [make(dtype, count, r) for r in range(size)]
            mine = everyones[rank].to(HERE)
            gathered = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(gathered, mine)
            assert all(map(same, gathered, everyones))
            whole = torch.empty(size * count, dtype=dtype, device=HERE)
            dist.all_gather_into_tensor(whole, mine)
            assert same(whole, torch.cat(everyones))
            for root in range(size):
                tensor = mine.clone()
                dist.broadcast(tensor, root)
                assert same(tensor, everyones[root])
                lists = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
                dist.gather(mine, lists, dst=root)
                assert all(map(same, lists or [], everyones))
                dist.scatter(tensor, [each.to(HERE) for each in everyones] if rank == root else None, src=root)
                assert same(tensor, everyones[rank])
    for longest in (1, 5000):  # one chunk on some ranks, and several on others
        sent = [torch.full((1 + longest * rank * r,), 10.0 * rank + r, device=HERE) for r in range(size)]
        received = [torch.empty(1 + longest * rank * r, device=HERE) for r in range(size)]
        dist.all_to_all(received, sent)
        assert all(bool((each == 10.0 * r + rank).all()) for r, each in enumerate(received))


def tensors_that_are_not_contiguous_are_written_back():
    size = dist.get_world_size()
    columns = torch.ones(40, 60, device=HERE).t()
    images = torch.ones(2, 3, 20, 10, device=HERE).to(memory_format=torch.channels_last)
    some = torch.ones(90, 40, device=HERE)[::2, ::3]
    pieces = [torch.ones(count, device=HERE) for count in (1, 400, 0, *range(1, 30))]
    for tensor in (columns, images, some):
        dist.all_reduce(tensor)
        assert bool((tensor == size).all())
    dist.all_reduce_coalesced(pieces)
    assert all(bool((each == size).all()) for each in pieces)


def calls_that_differ_are_described_as_they_were_made():
    rank = dist.get_rank()
    group = dist.new_group()
    many, few = 3 * channel.SLOT_BYTES, 7
    for here, there in ((few, many), (many, many + 1)):
        tensor = torch.ones(here if rank == 0 else there, device=HERE)
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            dist.all_reduce(tensor, group=group)
        for count in (here, there):
            assert f"called all_reduce(float32, {count} elements, SUM)" in str(caught.value)
        assert "The group remains usable" in str(caught.value)
    tensor = torch.ones(3, device=HERE)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group(group)


def a_rank_that_does_not_come_is_named():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    tensor = torch.ones(3, device=HERE)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match="timed out after") as caught:
            dist.all_reduce(tensor, group=group, async_op=True, timeout=timedelta(seconds=0.3)).wait()
        assert caught.value.missing == tuple(range(1, size))
        with pytest.raises(dist.CollectiveError):
            dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def an_abort_ends_the_calls_of_all_ranks():
    rank = dist.get_rank()
    group = dist.new_group()
    tensor = torch.ones(3, device=HERE)
    dist.all_reduce(tensor, group=group)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        dist.barrier()
        with pytest.raises(dist.GroupAbortedError):
            work.wait()
    else:
        dist.barrier()
        if rank == 1:
            group.abort()
    with pytest.raises(dist.GroupAbortedError):
        dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def trained(device: str, overlap: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 100), torch.nn.ReLU(), torch.nn.Linear(100, 3)).to(device)
    replica = dist.DistributedDataParallel(model, overlap=overlap, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        replica(torch.randn(5, 40, generator=generator).to(device)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def data_parallel_training_has_the_bits_of_the_cpu():
    for overlap in (False, True):
        assert all(map(torch.equal, trained(HERE, overlap), trained("cpu", overlap)))


ON_ANY_DEVICE = (
    every_reduction_has_the_bits_of_the_cpu,
    every_copy_arrives_whole,
    tensors_that_are_not_contiguous_are_written_back,
    calls_that_differ_are_described_as_they_were_made,
    a_rank_that_does_not_come_is_named,
    an_abort_ends_the_calls_of_all_ranks,
)

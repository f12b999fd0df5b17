"""Compares Paceline with torch's gloo on random inputs, for every collective, type and reduction that gloo supports."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as gloo

import paceline as dist

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
BIT_OPS = ["BAND", "BOR", "BXOR"]


def agree_with_gloo(
    file: str, algorithm: str | None, interface: str = "lo", backend: str | None = None, rounds: int = 1
) -> int:
    """Compares calls in `rounds` rounds with different sizes, roots and values; returns the number of calls."""
    dist.init_process_group(backend, algorithm=algorithm)
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    compared = 0
    for seed, dtype in enumerate([*FLOATS, *INTEGERS] * rounds):
        ops = OPS if dtype in FLOATS or backend == "nccl" else OPS + BIT_OPS
        shared = torch.Generator().manual_seed(seed)
        for op in ops:
            count = int(torch.randint(1, 30_000, (), generator=shared))
            root = int(torch.randint(0, size, (), generator=shared))
            for call in (all_reduce, reduce, reduce_scatter):
                if not has(call, dtype, op):
                    continue
                _close(*(call(module, _random(dtype, count, seed, rank), op, root) for module in (dist, gloo)))
                compared += 1
        for call in (broadcast, all_gather, gather, scatter, all_to_all):
            if not has(call, dtype, "SUM"):
                continue
            ours, theirs = (call(module, _random(dtype, count, seed, rank), "SUM", root) for module in (dist, gloo))
            assert torch.equal(ours, theirs), (call.__name__, dtype)
            compared += 1
    gloo.destroy_process_group()
    dist.destroy_process_group()
    return compared


def has(call, dtype: torch.dtype, op: str) -> bool:
    """Returns True if this version of torch implements the call in gloo."""
    if call in (broadcast, all_gather, gather, scatter):
        return True
    return _can(all_reduce if call is reduce else call, dtype, op)


@functools.cache
def _can(call, dtype: torch.dtype, op: str) -> bool:
    """Runs a call in a gloo group of one rank; returns True if gloo implements it."""
    alone = gloo.new_group([gloo.get_rank()], use_local_synchronization=True)
    tensor = torch.ones(2, dtype=dtype)
    try:
        if call in (all_reduce, reduce_scatter):
            gloo.all_reduce(tensor, getattr(gloo.ReduceOp, op), group=alone)
        if call is reduce_scatter:
            gloo.reduce_scatter(torch.empty_like(tensor), [tensor], getattr(gloo.ReduceOp, op), group=alone)
        if call is all_to_all:
            gloo.all_to_all_single(torch.empty_like(tensor), tensor, group=alone)
    except RuntimeError:
        return False
    finally:
        gloo.destroy_process_group(alone)
    return True


def all_reduce(module, tensor, op, root):
    module.all_reduce(tensor, getattr(module.ReduceOp, op))
    return tensor


def reduce(module, tensor, op, root):
    module.reduce(tensor, root, getattr(module.ReduceOp, op))
    return tensor if module.get_rank() == root else torch.empty(0, dtype=tensor.dtype)


def reduce_scatter(module, tensor, op, root):
    inputs = [tensor.roll(shift) for shift in range(module.get_world_size())]
    output = torch.empty_like(tensor)
    module.reduce_scatter(output, inputs, getattr(module.ReduceOp, op))
    return output


def broadcast(module, tensor, op, root):
    module.broadcast(tensor, root)
    return tensor


def all_gather(module, tensor, op, root):
    outputs = [torch.empty_like(tensor) for _ in range(module.get_world_size())]
    module.all_gather(outputs, tensor)
    return torch.cat(outputs)


def gather(module, tensor, op, root):
    here = module.get_rank() == root
    outputs = [torch.empty_like(tensor) for _ in range(module.get_world_size())] if here else None
    module.gather(tensor, outputs, dst=root)
    return torch.cat(outputs) if outputs else tensor


def scatter(module, tensor, op, root):
    here = module.get_rank() == root
    inputs = [tensor.roll(shift) for shift in range(module.get_world_size())] if here else None
    output = torch.empty_like(tensor)
    module.scatter(output, inputs, src=root)
    return output


def all_to_all(module, tensor, op, root):
    rows = tensor[: len(tensor) // module.get_world_size() * module.get_world_size()]
    output = torch.empty_like(rows)
    module.all_to_all_single(output, rows)
    return output


def _random(dtype: torch.dtype, count: int, seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in FLOATS:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 5, (count,), generator=generator).to(dtype)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    half = ours.dtype in (torch.float16, torch.bfloat16)
    if ours.dtype in FLOATS:
        torch.testing.assert_close(ours, theirs, rtol=0.03 if half else 1e-5, atol=0.05 if half else 1e-6)
    else:
        assert torch.equal(ours, theirs)

"""Reductions in a group, with every engine."""

from __future__ import annotations

import torch
from values import COMPLEX, FLOATS, INTEGERS, expected, make, supported

import paceline as dist
from paceline import ReduceOp

_WIDE_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
_COUNTS = [0, 7, 1000]


def _same(seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares integers exactly and other types with a tolerance, because engines may sum in any order."""
    if seen.is_floating_point() or seen.is_complex():
        rtol = 2e-2 if seen.dtype in (torch.float16, torch.bfloat16) else 1e-5
        torch.testing.assert_close(seen, wanted, rtol=rtol, atol=5 * rtol)
    else:
        assert torch.equal(seen, wanted), (seen, wanted)


def all_types_and_reductions(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in supported(dtype):
            for count in _COUNTS:
                wanted = expected(op, [make(dtype, count, r) for r in range(size)])
                tensor = make(dtype, count, rank)
                dist.all_reduce(tensor, op, group)
                _same(tensor, wanted)
            everywhere = make(dtype, 7, rank)
            dist.reduce(everywhere, op=op, group=group, group_dst=size - 1)
            last = expected(op, [make(dtype, 7, r) for r in range(size)])
            _same(everywhere, last if rank == size - 1 else make(dtype, 7, rank))
            part = torch.empty(5, dtype=dtype)
            dist.reduce_scatter(part, [make(dtype, 5, 10 * rank + r) for r in range(size)], op, group)
            _same(part, expected(op, [make(dtype, 5, 10 * r + rank) for r in range(size)]))


def unsigned_and_scaled(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in _WIDE_UNSIGNED:
        for op, wanted in ((ReduceOp.SUM, sum(range(1, size + 1))), (ReduceOp.MAX, size), (ReduceOp.BOR, None)):
            tensor = torch.full((9,), rank + 1, dtype=torch.int64).to(dtype)
            dist.all_reduce(tensor, op, group)
            bits = 0
            for r in range(size):
                bits |= r + 1
            assert tensor.tolist() == [bits if wanted is None else wanted] * 9
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((6,), float(rank + 1), dtype=dtype)
        dist.all_reduce(tensor, dist.PremulSum(0.5), group)
        assert tensor.tolist() == [0.5 * sum(range(1, size + 1))] * 6


def large_and_whole(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in (torch.float32, torch.bfloat16):
        tensor = make(dtype, 300_001, rank)
        dist.all_reduce(tensor, ReduceOp.AVG, group)
        _same(tensor, expected(ReduceOp.AVG, [make(dtype, 300_001, r) for r in range(size)]))
    whole = torch.cat([torch.full((1000,), float(r)) for r in range(size)])
    part = torch.empty(1000)
    dist.reduce_scatter_tensor(part, whole, ReduceOp.SUM, group)
    assert part.eq(size * rank).all()
    dist.reduce_scatter_tensor(whole[1000 * rank : 1000 * (rank + 1)], whole, ReduceOp.SUM, group)
    assert whole[1000 * rank : 1000 * (rank + 1)].eq(size * rank).all()


def in_one_call(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    several = [make(torch.float32, count, rank) for count in (3, 0, 50)]
    dist.all_reduce_coalesced(several, group=group)
    for tensor, count in zip(several, (3, 0, 50), strict=True):
        _same(tensor, expected(ReduceOp.SUM, [make(torch.float32, count, r) for r in range(size)]))
    parts = [torch.empty(4), torch.empty(2)]
    dist.reduce_scatter_tensor_coalesced(parts, [torch.ones(4 * size), torch.ones(2 * size)], group=group)
    assert all(part.eq(size).all() for part in parts)
    devices = [torch.full((3,), float(rank)), torch.full((3,), 1.0)]
    dist.all_reduce_multigpu(devices, group=group)
    assert all(each.eq(sum(range(size)) + size).all() for each in devices)
    pieces = [torch.full((2,), float(rank)), torch.full((5,), 2.0)]
    dist.all_reduce(pieces, group=group)
    assert pieces[0].eq(sum(range(size))).all() and pieces[1].eq(2 * size).all()


PROGRAMS = [all_types_and_reductions, unsigned_and_scaled, large_and_whole, in_one_call]

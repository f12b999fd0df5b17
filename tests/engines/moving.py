"""Calls that move tensors and objects, in a group with any engine."""

from __future__ import annotations

import torch
from values import make

import paceline as dist

_TYPES = [torch.bool, torch.int16, torch.float32, torch.complex128, torch.float8_e4m3fn]


def _sent(dtype: torch.dtype, count: int, number: int) -> torch.Tensor:
    kind = torch.float32 if dtype is torch.float8_e4m3fn else dtype
    return make(kind, count, number).to(dtype)


def _same(seen: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(seen.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def every_type(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in _TYPES:
        for count in (0, 3, 5000):
            for root in {0, size - 1}:
                tensor = _sent(dtype, count, rank)
                dist.broadcast(tensor, group=group, group_src=root)
                _same(tensor, _sent(dtype, count, root))
                gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
                dist.gather(_sent(dtype, count, rank), gathered, group=group, group_dst=root)
                for r, each in enumerate(gathered or []):
                    _same(each, _sent(dtype, count, r))
                parts = [_sent(dtype, count, 10 * r) for r in range(size)] if rank == root else None
                dist.scatter(tensor, parts, group=group, group_src=root)
                _same(tensor, _sent(dtype, count, 10 * rank))
            outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, _sent(dtype, count, rank), group)
            for r in range(size):
                _same(outputs[r], _sent(dtype, count, r))
            dist.all_to_all(outputs, [_sent(dtype, count, 100 * rank + r) for r in range(size)], group)
            for r in range(size):
                _same(outputs[r], _sent(dtype, count, 100 * r + rank))


def whole_and_uneven(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    whole = torch.empty(size, 40)
    dist.all_gather_into_tensor(whole, torch.full((40,), float(rank)), group)
    assert whole.tolist() == [[float(r)] * 40 for r in range(size)]
    whole.zero_()
    whole[rank] = rank + 1
    dist.all_gather_into_tensor(whole, whole[rank], group)
    assert whole.tolist() == [[r + 1.0] * 40 for r in range(size)]
    # Rank r sends r + peer rows to each peer, so that rank 0 sends none to itself.
    sizes = [rank + peer for peer in range(size)]
    received = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(received, torch.full((sum(sizes), 2), float(rank)), sizes, sizes, group)
    assert received[:, 0].tolist() == [float(peer) for peer in range(size) for _ in range(rank + peer)]
    several = [torch.empty(size * 2), torch.empty(size)]
    dist.all_gather_into_tensor_coalesced(several, [torch.full((2,), float(rank)), torch.full((1,), 7.0)], group)
    assert several[0].tolist() == [float(r) for r in range(size) for _ in range(2)] and several[1].eq(7).all()


def every_layout(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    across = torch.full((4, 6), float(rank)).t()
    dist.all_reduce(across, group=group)
    assert across.eq(sum(range(size))).all() and across.stride() == (1, 6)
    scalar = torch.tensor(float(rank))
    dist.broadcast(scalar, group=group, group_src=size - 1)
    assert scalar.item() == size - 1
    every_other = torch.zeros(20)[::2]
    dist.broadcast(every_other.add_(rank), group=group, group_src=0)
    assert every_other.eq(0).all()
    conjugate = torch.full((3,), complex(rank, 1)).conj()
    dist.all_reduce(conjugate, group=group)
    assert conjugate.eq(complex(sum(range(size)), -size)).all()
    lists = [[torch.empty(2), torch.empty(2, 2)] for _ in range(size)]
    dist.all_gather(lists, [torch.full((2,), float(rank)), torch.full((2, 2), 10.0 * rank)], group)
    assert all(first.eq(r).all() and second.eq(10 * r).all() for r, (first, second) in enumerate(lists))


def objects(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 1000 * rank}, group)
    assert [each["rank"] for each in gathered] == list(range(size))
    listed: list[object] = [1, "two", torch.ones(3)] if rank == 0 else [None] * 3
    dist.broadcast_object_list(listed, group=group, group_src=0)
    assert listed[:2] == [1, "two"] and torch.equal(listed[2], torch.ones(3))
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, group=group, group_src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([{"answer": 42}], group=group, group_dst=1)
    elif rank == 1:
        received: list[object] = [None]
        dist.recv_object_list(received, group=group, group_src=0)
        assert received == [{"answer": 42}]


PROGRAMS = [every_type, whole_and_uneven, every_layout, objects]

"""Asynchronous calls, messages, and groups, with any engine."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import paceline as dist


def asynchronous_calls(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    tensors = [torch.full((1000,), float(at + rank)) for at in range(8)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    between = torch.full((3,), float(rank))
    dist.all_reduce(between, group=group)  # this call runs after the others
    assert between.eq(sum(range(size))).all()
    for at, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert tensor.eq(size * at + sum(range(size))).all()
    across = torch.full((2, 3), 1.0).t()
    work = dist.all_reduce(across, group=group, async_op=True)
    (value,) = work.get_future().then(lambda future: [each.clone() for each in future.value()]).wait()
    assert value.eq(size).all() and across.eq(size).all()
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)), group, async_op=True).wait()
    assert [each[0].item() for each in gathered] == list(range(size))
    dist.barrier(group, async_op=True).wait(timedelta(seconds=20))


def messages(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((count,), float(rank + count)) for count in (4, 0, 70_000)]
    works = [dist.isend(tensor, group=group, group_dst=following, tag=at) for at, tensor in enumerate(sent)]
    for at in (2, 0, 1):  # not in the order in which they were sent
        received = torch.empty_like(sent[at])
        dist.recv(received, group=group, group_src=preceding, tag=at)
        assert received.eq(preceding + len(received)).all()
    assert all(work.wait() for work in works)
    listed = [torch.empty(2), torch.empty(3)]
    pair = [torch.full((2,), 1.0), torch.full((3,), float(rank))]
    operations = [
        dist.P2POp(dist.irecv, listed, group=group, group_peer=preceding, tag=9),
        dist.P2POp(dist.isend, pair, group=group, group_peer=following, tag=9),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert listed[0].eq(1).all() and listed[1].eq(preceding).all()
    if rank:
        dist.send(torch.tensor(rank), group=group, group_dst=0, tag=3)
        return
    heard = {}
    for _ in range(size - 1):
        number = torch.tensor(0)
        source = dist.recv(number, group=group, tag=3)
        heard[dist.get_group_rank(group, source)] = number.item()
    assert heard == {r: r for r in range(1, size)}


def a_message_that_does_not_fit(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        work = dist.isend(torch.ones(2), group=group, group_dst=1)
        work.pause(5_000_000_000)
    elif group.rank() == 1:
        with pytest.raises(dist.CollectiveMismatchError, match="sends 8 bytes of float32, .*receives 12 bytes"):
            dist.recv(torch.ones(3), group=group, group_src=0)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == group.size()


def groups(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    backend = dist.get_backend(group)
    backwards = dist.new_group(list(reversed(range(size))), backend=backend)
    assert dist.get_backend(backwards) == backend
    assert (backwards.rank(), backwards.ranks) == (size - 1 - rank, list(reversed(range(size))))
    outputs = [torch.empty(1) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([float(rank)]), backwards)
    assert [each.item() for each in outputs] == [float(r) for r in reversed(range(size))]
    last = dist.new_group([size - 1], backend=backend)
    assert (last is dist.GroupMember.NON_GROUP_MEMBER) == (rank != size - 1)
    alone = torch.ones(2)
    dist.all_reduce(alone, dist.ReduceOp.AVG, last)
    assert alone.eq(1).all()
    half = dist.split_group(group, [[0], list(range(1, size))], backend=backend)
    assert half.size() == (1 if rank == 0 else size - 1)
    native = dist.new_group(backend="paceline")
    total = torch.ones(1)
    dist.all_reduce(total, group=native)
    assert (total.item(), dist.get_backend(native)) == (size, "paceline")
    dist.monitored_barrier(group)
    dist.barrier(group)


def refusals(group: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match="has no engine for it: pass tensor.cpu"):
        dist.all_reduce(torch.ones(3, device="meta"), group=group)
    with pytest.raises(TypeError, match="not defined for"):
        dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn), group=group)
    with pytest.raises(TypeError, match="not defined for"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=group)


PROGRAMS = [asynchronous_calls, messages, a_message_that_does_not_fit, groups, refusals]

"""Synchronous and asynchronous collectives with all forms of arguments, all reductions, sparse tensors and lists."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from torch_calls.case import case, plain, sparse, tensor


@case
def async_op_true(d: Any, r: int, n: int) -> object:
    t = tensor(r, 4)
    work = d.all_reduce(t, async_op=True)
    assert work.wait() is True
    assert work.is_completed() and work.is_success()
    return [t, work.result()]


@case
def every_collective_with_async_op(d: Any, r: int, n: int) -> object:
    def done(work: Any) -> None:
        assert work.wait()

    a, outputs = tensor(r, 4), [torch.empty(4) for _ in range(n)]
    done(d.broadcast(a, src=0, async_op=True))
    done(d.reduce(a.clone(), dst=0, async_op=True))
    done(d.all_gather(outputs, a, async_op=True))
    done(d.gather(a, outputs if r == 0 else None, dst=0, async_op=True))
    done(d.scatter(a, outputs if r == 0 else None, src=0, async_op=True))
    done(d.reduce_scatter(a, [each.clone() for each in outputs], async_op=True))
    done(d.all_to_all_single(whole := torch.empty(4), a, async_op=True))
    done(d.barrier(async_op=True))
    return [outputs if r == 0 else a, whole]


@case
def reductions(d: Any, r: int, n: int) -> object:
    results = []
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        d.all_reduce(t := tensor(r, 5, dtype=torch.int32), op=getattr(d.ReduceOp, name))
        results.append(t)
    for op in (d.ReduceOp.RedOpType.MAX, d.ReduceOp(d.ReduceOp.SUM), d.reduce_op.SUM):
        d.all_reduce(t := tensor(r, 5), op)
        results.append(t)
    return results


@case
def sparse_all_reduce(d: Any, r: int, n: int) -> object:
    results = []
    for t in (sparse(r), sparse(r, coalesced=False), sparse(r, 3 * r), sparse(r, dtype=torch.int64), sparse(r, 0)):
        d.all_reduce(t)
        results += plain(t)
    return results


@case
def sparse_all_reduce_async(d: Any, r: int, n: int) -> object:
    work = d.all_reduce(t := sparse(r, 2 + r), async_op=True)
    work.wait()
    return plain(t)


@case
def all_reduce_by_keywords(d: Any, r: int, n: int) -> object:
    d.all_reduce(tensor=(t := tensor(r, 3)), op=d.ReduceOp.MAX, group=None, async_op=False)
    d.all_reduce(t, d.ReduceOp.SUM, d.group.WORLD)
    d.all_reduce(t, group=d.GroupMember.WORLD)
    return t


@case
def ranks_of_other_types(d: Any, r: int, n: int) -> object:
    t = tensor(r, 3)
    d.broadcast(t, numpy.int64(1))
    d.broadcast(t, torch.tensor(1).item())
    d.reduce(t, dst=numpy.int32(0))  # on the other ranks, gloo leaves unspecified values
    return t if r == 0 else None


@case
def group_src_and_group_dst(d: Any, r: int, n: int) -> object:
    t = tensor(r, 3)
    d.broadcast(t, group_src=1)
    d.reduce(t.clone(), group_dst=0)
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(t, outputs if r == 1 else None, group_dst=1)
    d.scatter(t, outputs if r == 1 else None, group_src=1)
    d.send(t, group_dst=1) if r == 0 else d.recv(t, group_src=0)
    return [t, outputs if r == 1 else None]


@case
def gather_and_scatter_without_a_root(d: Any, r: int, n: int) -> object:
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(tensor(r, 3), outputs if r == 0 else None)
    d.scatter(t := torch.empty(3), outputs if r == 0 else None)
    return t


@case
def gather_positionally(d: Any, r: int, n: int) -> object:
    outputs = [torch.empty(3) for _ in range(n)]
    d.gather(tensor(r, 3), outputs if r == 1 else None, 1, None, False)
    d.scatter(t := torch.empty(3), outputs if r == 1 else None, 1, None, False)
    return t


@case
def a_list_to_reduce(d: Any, r: int, n: int) -> object:
    d.reduce_scatter(t := torch.empty(3), [tensor(r, 3), tensor(r + 5, 3)])
    return t


@case
def all_gather_into_one(d: Any, r: int, n: int) -> object:
    d.all_gather_into_tensor(concatenated := torch.empty(6), tensor(r, 3))
    d.all_gather_single(single := torch.empty(6), tensor(r, 3))
    return [concatenated, single]


@case
def reduce_scatter_of_one(d: Any, r: int, n: int) -> object:
    d.reduce_scatter_tensor(a := torch.empty(3), tensor(r, 6))
    d.reduce_scatter_tensor(b := torch.empty(3), tensor(r, 6), op=d.ReduceOp.MAX)
    d.reduce_scatter_single(c := torch.empty(3), tensor(r, 6))
    return [a, b, c]


@case
def all_to_all_forms(d: Any, r: int, n: int) -> object:
    d.all_to_all_single(a := torch.empty(4), tensor(r, 4))
    d.all_to_all_single(b := torch.empty(4), tensor(r, 4), [], [])
    d.all_to_all_single(c := torch.empty(2 + 2 * r), tensor(r, 3), [1 + r] * 2, [1, 2])
    d.all_to_all_single(e := torch.empty(4, 2), tensor(r, 4, 2), output_split_sizes=None, input_split_sizes=None)
    return [a, b, c, e]


@case
def coalesced(d: Any, r: int, n: int) -> object:
    tensors = [tensor(r, 3), tensor(r, 2)]
    d.all_reduce_coalesced(tensors)
    d.all_reduce_coalesced(tensors, op=d.ReduceOp.MAX, group=None, async_op=True).wait()
    return tensors

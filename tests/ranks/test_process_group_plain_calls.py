"""The fast path for calls on plain tensors: the calls that use it, and their results.

`timeout=` makes a call use the slow path, which otherwise only unusual calls use. `test_persistent.py` checks that both
paths give the same results for random tensors, because persistent calls are prepared on the slow path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from one_world import OneWorld, name_of
from torch._subclasses.fake_tensor import FakeTensorMode

import paceline as dist
from paceline.comm.group.process_group import ProcessGroup

LONG = 100.0


def ways_of(make: Callable[[], object]) -> list[bool]:
    """Runs calls; returns, for each attempt to use the fast path, True if the attempt succeeded.

    all_reduce and broadcast have their own paths.
    """
    taken: list[bool] = []
    run_plainly = ProcessGroup.try_fast_call

    def noting(*args: object, **kwargs: object) -> bool:
        taken.append(run_plainly(*args, **kwargs))
        return taken[-1]

    with mock.patch.object(ProcessGroup, "try_fast_call", noting):
        make()
    return taken


def calls_of(part: torch.Tensor, like: Callable[..., torch.Tensor]) -> Iterator[Callable[..., object]]:
    """Returns the calls that have a fast path; `like(n)` creates n elements. Only the last call does not use `part`."""
    rank = dist.get_rank()
    n = part.numel()
    at_root = rank == 1
    yield lambda **kw: dist.reduce(part, 1, **kw)
    yield lambda **kw: dist.all_gather([like(n), like(n)], part, **kw)
    yield lambda **kw: dist.all_gather_into_tensor(like(2 * n), part, **kw)
    yield lambda **kw: dist.gather(part, [like(n), like(n)] if at_root else None, 1, **kw)
    yield lambda **kw: dist.scatter(part, [like(n), like(n)] if at_root else None, 1, **kw)
    yield lambda **kw: dist.reduce_scatter(part, [like(n), like(n)], **kw)
    yield lambda **kw: dist.reduce_scatter_tensor(part, like(2 * n), **kw)
    yield lambda **kw: dist.all_to_all([like(n), like(n)], [part, like(n)], **kw)
    yield lambda **kw: dist.all_to_all_single(like(2 * n), like(2 * n), **kw)


def plain_tensors_take_it() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        for n in (0, 1, 5000):
            for call in calls_of(torch.ones(n, dtype=dtype), lambda n, dtype=dtype: torch.ones(n, dtype=dtype)):
                assert ways_of(call) == [True]
                # Asynchronous calls and calls with a timeout do not even attempt to use the fast path.
                assert ways_of(lambda call=call: call(timeout=LONG)) == []
                assert ways_of(lambda call=call: call(async_op=True).wait()) == []


def unusual_tensors_do_not() -> None:
    strided = torch.ones(6, 2)[:, 0]
    negative = torch.ones(4, dtype=torch.complex64).conj().imag.contiguous()._neg_view()
    for part in (strided, negative, torch.ones(3, dtype=torch.complex64).conj()):
        *calls, exchange = calls_of(part, lambda n, dtype=part.dtype: torch.ones(n, dtype=dtype))
        assert not any(any(ways_of(call)) for call in calls)
        assert any(ways_of(exchange)) is not part.is_complex()  # the only one that has no `part`


def all_reduces_of(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Runs an all_reduce; returns whether Python inspected the tensor, and whether the call was planned."""
    looked, planned = mock.MagicMock(), mock.MagicMock()
    look, run = ProcessGroup.fast_all_reduce, dist.ProcessGroup._run
    with (
        mock.patch.object(ProcessGroup, "fast_all_reduce", lambda *a: looked() and look(*a)),
        mock.patch.object(dist.ProcessGroup, "_run", lambda *a: planned() and run(*a)),
    ):
        dist.all_reduce(tensor)
    return looked.called, planned.called


class Marked(torch.Tensor):
    """A user-defined tensor class, whose methods may do anything."""


def all_reduce_goes_the_shortest_way_that_there_is() -> None:
    looks = not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # before 2.10, only Python can inspect tensors
    ones = torch.ones(4)
    plain = [
        *(torch.ones(n, dtype=dtype) for n in (1, 5000) for dtype in (torch.float32, torch.bfloat16, torch.int8)),
        *(torch.ones(shape) for shape in ((), (0,), (3, 0), (1, 4), (2, 3, 1))),
        torch.ones(6, dtype=torch.bool)[2:],
        torch.ones(3, requires_grad=True).detach(),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
    ]
    for tensor in plain:
        wanted = torch.ones_like(tensor) if tensor.dtype is torch.bool else torch.full_like(tensor, 2)
        assert all_reduces_of(tensor) == (looks, False), tensor
        assert torch.equal(tensor, wanted)
    strided, negative = torch.ones(6, 2)[:, 0], ones.neg()._neg_view()
    for tensor in (strided, negative, ones.expand(3, 4).t().clone().t(), torch.ones(2, dtype=torch.complex64).conj()):
        assert all_reduces_of(tensor) == (True, True), tensor
        assert torch.equal(tensor, torch.full_like(tensor, 2))
    # Python inspects the unknown class, and finds that it can be reduced directly.
    for tensor in (torch.ones(3).as_subclass(Marked), torch.ones(3, dtype=torch.uint16)):
        assert all_reduces_of(tensor) == (True, False), tensor
        assert tensor.tolist() == [2] * 3


def ranks_meet_on_different_ways() -> None:
    rank = dist.get_rank()
    limit = LONG if rank == 0 else None
    whole, part = torch.zeros(4), torch.full((2,), 1.0 + rank)
    dist.all_gather_into_tensor(whole, part, timeout=limit)
    assert whole.tolist() == [1, 1, 2, 2]
    dist.reduce_scatter_tensor(part, whole, timeout=limit)
    assert part.tolist() == [[2, 2], [4, 4]][rank]
    dist.all_to_all_single(whole, torch.arange(4.0) + 10 * rank, timeout=limit)
    assert whole.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
    dist.barrier(timeout=limit)


def error_of(call: Callable[..., object], **kwargs: object) -> tuple[type[BaseException], str]:
    with pytest.raises((TypeError, ValueError, dist.CollectiveError)) as caught:
        call(**kwargs)
    return caught.type, str(caught.value).partition(" as call ")[0]


def mistakes_are_told_alike() -> None:
    one, two, other = torch.ones(2), torch.ones(4), torch.ones(2, dtype=torch.int32)
    mistakes: list[Callable[..., object]] = [
        lambda **kw: dist.all_gather([two], one, **kw),
        lambda **kw: dist.all_gather(two, one, **kw),
        lambda **kw: dist.all_gather([two, two], one, **kw),
        lambda **kw: dist.all_gather([one, other], one, **kw),
        lambda **kw: dist.all_gather_into_tensor(one, one, **kw),
        lambda **kw: dist.all_gather_into_tensor(torch.ones(4, 2)[:, 0], one, **kw),
        lambda **kw: dist.reduce_scatter(one, [two], **kw),
        lambda **kw: dist.reduce_scatter(one, [one, one], dist.ReduceOp.BAND, **kw),
        lambda **kw: dist.reduce_scatter_tensor(one, one, **kw),
        lambda **kw: dist.gather(one, [one, one] if dist.get_rank() else None, 0, **kw),
        lambda **kw: (
            dist.scatter(one, [one] if dist.get_rank() else None, 1, **kw)
            if dist.get_rank()
            else dist.scatter(one, [one, one], 1, **kw)
        ),
        lambda **kw: dist.all_to_all([one, two], [one], **kw),
        lambda **kw: dist.all_to_all_single(torch.ones(3), torch.ones(3), **kw),
        lambda **kw: dist.reduce(one, 0, dist.ReduceOp.PREMUL_SUM, **kw),
        lambda **kw: dist.all_reduce(one, dist.ReduceOp.PREMUL_SUM, **kw),
        lambda **kw: dist.all_reduce(one, dist.ReduceOp.BAND, **kw),
        lambda **kw: dist.all_reduce(one, 1, **kw),
        lambda **kw: dist.all_reduce(one.tolist(), **kw),
        lambda **kw: dist.reduce(one.to_sparse(), 0, **kw),
    ]
    for mistake in mistakes:
        assert error_of(mistake) == error_of(mistake, timeout=LONG)


def mismatches_name_both_calls() -> None:
    rank = dist.get_rank()
    part = torch.ones(2 + rank)
    for call in calls_of(part, torch.ones):
        short, long = error_of(call), error_of(call, timeout=LONG)
        assert short == long and short[0] is dist.CollectiveMismatchError
    short, long = error_of(dist.all_reduce, tensor=part), error_of(dist.all_reduce, tensor=part, timeout=LONG)
    assert short == long and short[0] is dist.CollectiveMismatchError
    dist.barrier()


def tensors_without_memory_are_refused() -> None:
    freed = torch.ones(2)
    *calls, _ = calls_of(freed, torch.ones)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        traced = torch.ones(2)
    all_reduces = [functools.partial(dist.all_reduce, tensor) for tensor in (freed, traced)]
    for call in (
        *calls,
        *all_reduces,
        lambda **kw: dist.broadcast(freed, 0, **kw),
        lambda **kw: dist.send(freed, 1 - dist.get_rank()),
    ):
        for options in ({}, {"timeout": LONG}):
            with pytest.raises(ValueError, match=r"of shape \(2,\) has no memory: its storage was freed"):
                call(**options)
    dist.all_reduce(torch.empty(0))


def reduction_of_torch_is_taken() -> None:
    part = torch.full((2,), 1.0 + dist.get_rank())
    dist.reduce_scatter_tensor(part, torch.full((4,), 1.0 + dist.get_rank()), torch.distributed.ReduceOp.MAX)
    assert part.tolist() == [2, 2]
    with pytest.raises(TypeError, match=r"op must be a paceline\.ReduceOp, .*, not None"):
        dist.reduce(part, 0, None)
    dist.reduce(part, 0, torch.distributed.ReduceOp.SUM)
    assert part.tolist() == ([4, 4] if dist.get_rank() == 0 else [2, 2])


def closed_group_is_named() -> None:
    group = dist.new_group()
    part = torch.ones(2)
    dist.destroy_process_group(group)
    others = (lambda group: dist.barrier(group), lambda group: dist.all_reduce(part, group=group))
    for call in (*calls_of(part, torch.ones), *others):
        with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: this process group was destroyed"):
            call(group=group)


def compiled_calls_break_the_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(2 * x.numel())
        dist.all_gather_into_tensor(whole, x * 2)
        dist.reduce(x, 0)
        return whole + 1

    assert torch.compile(step, backend="eager")(torch.ones(2)).tolist() == [3.0] * 4


TOGETHER = [
    plain_tensors_take_it,
    unusual_tensors_do_not,
    all_reduce_goes_the_shortest_way_that_there_is,
    ranks_meet_on_different_ways,
    mistakes_are_told_alike,
    mismatches_name_both_calls,
    tensors_without_memory_are_refused,
    reduction_of_torch_is_taken,
    closed_group_is_named,
    compiled_calls_break_the_graph,
]
WORLD = OneWorld(*TOGETHER)


@pytest.mark.parametrize("program", list(map(name_of, TOGETHER)))
def test_plain_calls_take_the_short_way(program):
    WORLD.require(2, program)

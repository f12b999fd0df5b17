"""Every torch.distributed collective over the backend "paceline", compared with gloo on the same inputs."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp
from torch_programs import agree, torch_group
from values import COMPLEX, FLOATS, make

import paceline.interop.torch_backend

COUNTS = [1, 7, 70_001]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]  # gloo does not have int16
MOVED = [*INTEGERS, torch.float16, torch.float32, torch.float64]  # the types that gloo supports in all collectives


def reductions(dtype: torch.dtype) -> list[ReduceOp]:
    """Returns reductions that both gloo and Paceline support; gloo's products of integers above 127 are undefined."""
    if dtype in COMPLEX:
        return [ReduceOp.SUM]
    if dtype in FLOATS:
        return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def reduce_scatter(
    output: torch.Tensor, parts: list[torch.Tensor], op: ReduceOp, asynchronous: bool
) -> torch_dist.Work | None:
    if torch.__version__ >= (2, 7) or torch_dist.get_backend() != "gloo":
        return torch_dist.reduce_scatter(output, parts, op, async_op=asynchronous)
    torch_dist.all_reduce(whole := torch.stack(parts), op)  # before 2.7, gloo had no reduce_scatter
    output.copy_(whole[torch_dist.get_rank()])
    return torch_dist.barrier(async_op=asynchronous)


def finish(work: torch_dist.Work | None, asynchronous: bool) -> None:
    assert (work is not None) == asynchronous
    if work is not None:
        work.wait()
        assert work.is_completed() or torch_dist.get_backend() == "gloo"  # gloo's reduce_scatter never completes


def reduce_everything(asynchronous: bool) -> list[torch.Tensor]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    results = []
    complex_types = COMPLEX if torch.__version__ >= (2, 7) else []  # before 2.7, gloo's reduce rejects complex types
    for dtype in [*INTEGERS, *FLOATS, *complex_types]:
        for op in reductions(dtype):
            if size > 2 and dtype in (torch.float16, torch.bfloat16) and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
                continue  # gloo rounds after each addition, Paceline only once
            for count in COUNTS:
                values = [make(dtype, count, 10 * rank + r) for r in range(size)]
                tensor = values[0].clone()
                finish(torch_dist.all_reduce(tensor, op, async_op=asynchronous), asynchronous)
                results.append(tensor)

                tensor = values[0].clone()
                finish(torch_dist.reduce(tensor, size - 1, op, async_op=asynchronous), asynchronous)
                results += [tensor] if rank == size - 1 else []

                output = torch.empty(count, dtype=dtype)
                finish(reduce_scatter(output, values, op, asynchronous), asynchronous)
                results.append(output.clone())
                whole = torch.cat(values)
                if torch.__version__ >= (2, 7):
                    finish(torch_dist.reduce_scatter_tensor(output, whole, op, async_op=asynchronous), asynchronous)
                results.append(output)
    return results


def move_everything(asynchronous: bool) -> list[torch.Tensor]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    results = []
    for dtype in MOVED:
        for count in COUNTS:
            mine = make(dtype, count, rank)
            parts = [make(dtype, count, 10 * rank + r) for r in range(size)]
            root = size - 1
            tensor = mine.clone()
            finish(torch_dist.broadcast(tensor, root, async_op=asynchronous), asynchronous)
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            finish(torch_dist.gather(mine, gathered, root, async_op=asynchronous), asynchronous)
            scattered = torch.empty_like(mine)
            finish(
                torch_dist.scatter(scattered, parts if rank == root else None, root, async_op=asynchronous),
                asynchronous,
            )
            everyone = [torch.empty_like(mine) for _ in range(size)]
            finish(torch_dist.all_gather(everyone, mine, async_op=asynchronous), asynchronous)
            whole = torch.empty(size * count, dtype=dtype)
            finish(torch_dist.all_gather_into_tensor(whole, mine, async_op=asynchronous), asynchronous)
            exchanged = torch.empty(size * count, dtype=dtype)
            finish(torch_dist.all_to_all_single(exchanged, torch.cat(parts), async_op=asynchronous), asynchronous)
            results += [tensor, *(gathered or []), scattered, *everyone, whole, exchanged]
    sent = [rank + r for r in range(size)]  # rank a sends a + b rows to rank b
    rows = make(torch.float64, 3 * sum(sent), rank).view(-1, 3)
    received = torch.empty(sum(sent), 3, dtype=torch.float64)
    finish(torch_dist.all_to_all_single(received, rows, sent, sent, async_op=asynchronous), asynchronous)
    finish(torch_dist.barrier(async_op=asynchronous), asynchronous)
    return [*results, received]


def move_objects() -> list[object]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    mine = {"rank": rank, "text": "é" * (rank + 1), "tensor": torch.arange(rank + 2)}
    everyone: list[object] = [None] * size
    torch_dist.all_gather_object(everyone, mine)
    gathered: list[object] = [None] * size
    torch_dist.gather_object(mine, gathered if rank == 0 else None, dst=0)
    sent = [rank, {"from": rank}, None]
    torch_dist.broadcast_object_list(sent, src=size - 1)
    scattered: list[object] = [None]
    torch_dist.scatter_object_list(scattered, [("for", r) for r in range(size)] if rank == 0 else [], src=0)
    received: list[object] = [None, None]
    if rank == 0:
        torch_dist.send_object_list([mine, "next"], dst=1)
    elif rank == 1:
        torch_dist.recv_object_list(received, src=0)
    return [everyone, gathered, sent, scattered, received]


def pass_messages() -> list[object]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    results: list[object] = []
    for count in (0, 1, 70_001):
        mine, theirs = make(torch.float32, count, rank), torch.empty(count)
        sending = torch_dist.isend(mine, to, tag=count)
        assert torch_dist.recv(theirs, source, tag=count) == source
        sending.wait()
        results.append(theirs)

        theirs = torch.empty(count)
        operations = [
            torch_dist.P2POp(torch_dist.isend, mine, to),
            torch_dist.P2POp(torch_dist.irecv, theirs, source),
        ]
        for work in torch_dist.batch_isend_irecv(operations):
            work.wait()
        results.append(theirs)
    if rank == 0:
        for _ in range(size - 1):
            theirs = torch.zeros(3)
            sender = torch_dist.recv(theirs, src=None, tag=9)
            assert (theirs == sender).all()
    else:
        torch_dist.send(torch.full((3,), float(rank)), 0, tag=9)
    return results


def coalesce() -> list[torch.Tensor]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    summed = [make(torch.float32, count, rank) for count in (1, 70_001, 3)]
    with torch_dist._coalescing_manager():
        for tensor in summed:
            torch_dist.all_reduce(tensor)
    gathered = [torch.empty(size * count) for count in (2, 5)]
    with torch_dist._coalescing_manager(async_ops=True) as running:
        for output, count in zip(gathered, (2, 5), strict=True):
            torch_dist.all_gather_into_tensor(output, make(torch.float32, count, rank))
    running.wait()
    scattered = [torch.empty(count) for count in (2, 5)]
    with torch_dist._coalescing_manager():
        for output in scattered:
            torch_dist.reduce_scatter_tensor(output, make(torch.float32, size * output.numel(), rank))
    return [*summed, *gathered, *scattered]


def move_and_reduce(directory: str) -> None:
    moving = [partial(move_everything, False), partial(move_everything, True), move_objects, pass_messages]
    agree(moving, f"{directory}/moving")
    agree(
        [partial(reduce_everything, False), partial(reduce_everything, True), coalesce], f"{directory}/reducing", 1e-6
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 3])
def test_every_call_agrees(ranks, tmp_path, size):
    ranks(size)(move_and_reduce, str(tmp_path), timeout_s=180)


def only_here(directory: str) -> None:
    with torch_group("paceline", directory):
        rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
        assert torch_dist.get_backend() == "paceline" and torch_dist.is_backend_available("paceline")
        mean = torch.full((5,), float(rank))
        torch_dist.all_reduce(mean, ReduceOp.AVG)
        assert (mean == (size - 1) / 2).all()
        scaled = torch.ones(3)
        torch_dist.all_reduce(scaled, torch_dist._make_nccl_premul_sum(0.5))
        assert (scaled == size / 2).all()

        # gloo rejects exchanges of tensor lists, types without arithmetic, and non-contiguous memory.
        outputs = [torch.zeros(2) for _ in range(size)]
        torch_dist.all_to_all(outputs, [torch.full((2,), 10.0 * rank + r) for r in range(size)])
        assert [int(output[0]) for output in outputs] == [10 * r + rank for r in range(size)]
        strided = torch.full((4, 6), float(rank + 1)).t()
        torch_dist.all_reduce(strided)
        assert (strided == size * (size + 1) / 2).all()
        flags = torch.tensor([rank == 0, True])
        torch_dist.all_reduce(flags, ReduceOp.MIN)
        assert flags.tolist() == [size == 1, True]
        stacked = torch.empty(size, 1, dtype=torch.int16)
        torch_dist.all_gather_into_tensor(stacked, torch.tensor([rank], dtype=torch.int16))
        assert stacked[:, 0].tolist() == list(range(size))

        group = torch_dist.group.WORLD
        mine = torch.full((2,), float(rank))
        every_name(group, mine, rank, size)
        group.monitored_barrier()
        group.monitored_barrier(wait_all_ranks=True)
        empty = torch.empty(0)
        torch_dist.all_reduce(empty)


def every_name(group: torch_dist.ProcessGroup, mine: torch.Tensor, rank: int, size: int) -> None:
    """Methods that other releases of torch call: old names, new names, and reductions without options."""
    everyone = [float(r) for r in range(size) for _ in mine]
    for gather in (group._allgather_base, group.all_gather_single):
        gather(whole := torch.empty(2 * size), mine).wait()
        assert whole.tolist() == everyone
    for gather in (group.allgather_into_tensor_coalesced, group.all_gather_single_coalesced):
        gather([whole := torch.empty(2 * size)], [mine]).wait()
        assert whole.tolist() == everyone
    opts = torch_dist.GatherOptions()
    opts.rootRank = 0
    for gather in (group.gather_single, group.gather_into_tensor):
        gather(whole := torch.empty(2 * size if rank == 0 else 0), mine, opts).wait()
        assert whole.tolist() == (everyone if rank == 0 else [])
    whole, part = torch.arange(2.0 * size), torch.empty(2)
    for scatter in (group._reduce_scatter_base, group.reduce_scatter_single):
        scatter(part.zero_(), whole).wait()
        assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    for scatter in (group.reduce_scatter_tensor_coalesced, group.reduce_scatter_single_coalesced):
        scatter([part.zero_()], [whole]).wait()
        assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
    for exchange in (group.alltoall_base, group.all_to_all_single):
        exchange(out := torch.empty(size), torch.full((size,), float(rank)), [], []).wait()
        assert out.tolist() == list(range(size))
    group.allreduce([highest := mine.clone()], ReduceOp.MAX).wait()
    assert highest.tolist() == [size - 1.0] * 2
    assert group.get_backend(torch.device("cpu")) is group._get_backend(torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_gloo_does_not_have(ranks, tmp_path, size):
    ranks(size)(only_here, str(tmp_path))


def coalesce_by_device(directory: str) -> None:
    with torch_group("paceline", directory):
        rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
        for asynchronous in (False, True):
            summed, gathered = torch.ones(1000), [torch.empty(2) for _ in range(size)]
            group = torch_dist.group.WORLD
            with torch_dist._coalescing_manager(device=torch.device("cpu"), async_ops=asynchronous) as running:
                group.allreduce([summed])
                group.allgather([gathered], [torch.full((2,), float(rank))])
            running.wait()
            assert (summed == size).all() and [int(each[0]) for each in gathered] == list(range(size))


def test_calls_coalesced_by_device(ranks, tmp_path):
    ranks(2)(coalesce_by_device, str(tmp_path))


def wait_for_futures(directory: str) -> None:
    with torch_group("paceline", directory):
        size = torch_dist.get_world_size()
        tensor = torch.ones(70_001)
        work = torch_dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert (doubled.wait() == 2 * size).all() and work.is_success() and work.exception() is None
        assert work.result()[0].data_ptr() == tensor.data_ptr()

        works = [torch_dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 100_000, 3)]
        torch.futures.wait_all([work.get_future() for work in works])
        assert all(work.is_completed() for work in works)
        collected = torch.futures.collect_all([work.get_future() for work in works]).wait()
        assert [float(future.value()[0][0]) for future in collected] == [size] * 3


def test_futures_complete_by_themselves(ranks, tmp_path):
    ranks(2)(wait_for_futures, str(tmp_path))


def make_a_group_outside_of_the_world() -> None:
    from torch.distributed import _dist2

    paceline.interop.torch_backend.register()
    limit = timedelta(seconds=30)
    group = _dist2.new_group("paceline", limit, "cpu")
    assert not torch_dist.is_initialized() and group.size() == 2
    group.allreduce([summed := torch.ones(3)]).wait()
    assert summed.tolist() == [2, 2, 2]
    group.shutdown()
    with pytest.raises(ValueError, match="takes CPU tensors and those of .*; got the device meta"):
        _dist2._BACKENDS["paceline"](None, 0, 1, limit, torch.device("meta"))
    with pytest.raises(ValueError, match="has no options; got speed"):
        _dist2._BACKENDS["paceline"](None, 0, 1, limit, torch.device("cpu"), speed=2)


def test_a_group_outside_of_the_world(ranks):
    pytest.importorskip("torch.distributed._dist2", reason="this release of torch has no groups outside of its world")
    ranks(2)(make_a_group_outside_of_the_world)

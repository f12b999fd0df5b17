"""Every collective between hosts, with every algorithm, compared with computed values and with torch's gloo."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from collectives_vs_gloo import agree_with_gloo
from one_world import OneWorld, name_of
from values import COMPLEX, FLOATS, INTEGERS, expected, make, supported

import paceline as dist
from paceline.comm.schedule.algorithms import ALGORITHMS

COUNTS = [0, 1, 5, 70_001]


def same_bits_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(outputs, tensor, group=group)
    for output in outputs:
        assert torch.equal(output.view(torch.uint8), tensor.view(torch.uint8))


def agrees(tensor: torch.Tensor, wanted: torch.Tensor, size: int) -> None:
    """Compares with a tolerance for inexact types, because partial sums are rounded once per step."""
    if tensor.dtype in (*FLOATS, *COMPLEX):
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        torch.testing.assert_close(tensor, wanted, rtol=0.03 if half else 1e-5, atol=0.05 * size if half else 1e-5)
    else:
        assert torch.equal(tensor, wanted)


def reductions(group: dist.ProcessGroup, dtypes: list[torch.dtype]) -> None:
    rank, size = group.rank(), group.size()
    for dtype in dtypes:
        for op in supported(dtype):
            for count in COUNTS:
                values = [make(dtype, count, r) for r in range(size)]
                wanted = expected(op, values)
                tensor = values[rank].clone()
                dist.all_reduce(tensor, op, group=group)
                agrees(tensor, wanted, size)
                same_bits_everywhere(tensor, group)

                root = count % size
                tensor = values[rank].clone()
                dist.reduce(tensor, group_dst=root, op=op, group=group)
                if rank == root:
                    agrees(tensor, wanted, size)
                else:
                    assert torch.equal(tensor, values[rank])

                inputs = [make(dtype, count, 10 * rank + r) for r in range(size)]
                output = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(output, inputs, op, group=group)
                agrees(output, expected(op, [make(dtype, count, 10 * r + rank) for r in range(size)]), size)


def moves(group: dist.ProcessGroup, dtypes: list[torch.dtype]) -> None:
    rank, size = group.rank(), group.size()
    for dtype in dtypes:
        for count in COUNTS:

            def sent(r: int, dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                return make(dtype, count, r)

            for root in range(size):
                tensor = sent(rank)
                dist.broadcast(tensor, group_src=root, group=group)
                assert torch.equal(tensor, sent(root))
                gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
                dist.gather(sent(rank), gathered, group_dst=root, group=group)
                if gathered is not None:
                    assert all(torch.equal(gathered[r], sent(r)) for r in range(size))
                scattered = torch.empty_like(tensor)
                parts = [sent(10 * r) for r in range(size)] if rank == root else None
                dist.scatter(scattered, parts, group_src=root, group=group)
                assert torch.equal(scattered, sent(10 * rank))
            outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, sent(rank), group=group)
            assert all(torch.equal(outputs[r], sent(r)) for r in range(size))
            dist.all_to_all(outputs, [sent(100 * rank + r) for r in range(size)], group=group)
            assert all(torch.equal(outputs[r], sent(100 * r + rank)) for r in range(size))


def every_collective(algorithm: str | None, all_types: bool) -> None:
    dist.init_process_group(algorithm=algorithm)
    every_collective_of(dist.GroupMember.WORLD, all_types)
    dist.destroy_process_group()


def every_collective_by(algorithm: str) -> None:
    every_collective_of(dist.new_group(algorithm=algorithm), all_types=False)


def every_collective_of(group: dist.ProcessGroup, all_types: bool) -> None:
    every = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
    reductions(group, every if all_types else [torch.float32, torch.int64, torch.bfloat16])
    moves(group, every if all_types else [torch.uint8, torch.float64])
    rank, size = group.rank(), group.size()
    rows = [(rank + r) % size * 20_000 for r in range(size)]
    source = torch.cat([torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(rows)])
    output = torch.empty(sum(rows), 2)
    dist.all_to_all_single(output, source, rows, rows, group=group)
    assert torch.equal(output, torch.cat([torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(rows)]))
    several = [torch.full((n,), float(rank)) for n in (3, 0, 100_000, 1)]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (several, torch.ones(1 << 18))]
    scalar = torch.ones(())
    dist.all_reduce(scalar, group=group)  # this call runs after the asynchronous ones
    assert scalar == size and all(work.is_completed() for work in works)
    assert all((tensor == sum(range(size))).all() for tensor in several)
    dist.barrier(group)


@pytest.mark.parametrize("layout", [(2, 2), (3, 1), (4, 2), ([2, 1],)], ids=str)
def test_every_collective_between_hosts(hosts, layout):
    hosts(*layout)(every_collective, None, layout == (2, 2), timeout_s=110)


BY_EACH_ALGORITHM = [partial(every_collective_by, algorithm) for algorithm in ALGORITHMS]
BETWEEN_HOSTS = OneWorld(*BY_EACH_ALGORITHM, timeout_s=110)


@pytest.mark.parametrize("program", list(map(name_of, BY_EACH_ALGORITHM)))
@pytest.mark.parametrize("layout", [(2, 2), (1, 2)], ids=str)
def test_every_algorithm_between_hosts(hosts, program, layout):
    BETWEEN_HOSTS.require(layout, program)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_on_one_host(ranks, algorithm):
    ranks(3)(every_collective, algorithm, False)


def test_random_inputs_agree_with_gloo_between_hosts(hosts, tmp_path):
    assert min(hosts(2, 2)(agree_with_gloo, str(tmp_path / "gloo"), None, "eth0")) > 60


def groups_of_groups() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    across, within = dist.new_group([3, 0]), dist.new_group([2, 3], algorithm="tree")
    for group, members in ((across, [3, 0]), (within, [2, 3])):
        if rank not in members:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        tensor = torch.full((50_000,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(members)).all()
    dist.barrier()


def test_groups_of_some_hosts_and_some_ranks(hosts):
    hosts(2, 2)(groups_of_groups)

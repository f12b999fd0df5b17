"""Every torch.distributed call in all valid forms, with gloo and with Paceline, on the same ranks."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from hosts.talking import await_word, say
from torch_calls import CASES, plain, sparse
from torch_programs import agree, require_equal, torch_group

import paceline as dist

GLOO_REFUSES = {"gather_and_scatter: complex"}


def outcome(module: Any, name: str, rank: int, size: int) -> tuple[object, str]:
    """Returns the result of the case, or the traceback of its error."""
    try:
        return CASES[name](module, rank, size), ""
    except Exception:
        return None, traceback.format_exc()


def meet(directory: str, rank: int, size: int) -> None:
    os.makedirs(directory, exist_ok=True)
    dist.init_process_group(init_method=f"file://{directory}/store", rank=rank, world_size=size, timeout=10.0)


def compare_every_legal_call(directory: str, names: list[str]) -> dict[str, str]:
    """Runs on a rank; returns the difference between the libraries for each case, by name."""
    told: dict[str, str] = {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet(directory, rank, size)
    with torch_group("gloo", directory, timeout_s=30):
        for name in names:
            (theirs, refused), (ours, error) = outcome(torch_dist, name, rank, size), outcome(dist, name, rank, size)
            if error or (refused and name not in GLOO_REFUSES):
                told[name] = f"gloo: {refused or 'works'}\nPaceline: {error or 'works'}"
            elif not refused:
                try:
                    require_equal(ours, theirs, 0.0, name)
                except AssertionError as difference:
                    told[name] = str(difference)
            worst = torch.tensor([bool(error)], dtype=torch.int32)
            torch_dist.all_reduce(worst)
            if worst:  # Paceline's group may be broken
                dist.destroy_process_group()
                meet(f"{directory}/after {name}", rank, size)
    return told


def test_every_legal_call_works_as_over_gloo(ranks, tmp_path: Path):
    for told in ranks(2)(compare_every_legal_call, str(tmp_path / "rendezvous"), sorted(CASES)):
        assert told == {}, "\n".join(told.values())


def reduce_sparse_tensors() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 2 * rank):
        wanted = torch.stack([sparse(r, 3 if count == 3 else 2 * r).to_dense() for r in range(size)]).sum(0)
        for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / size), (dist.PremulSum(0.5), 0.5)):
            dist.all_reduce(summed := sparse(rank, count), op)
            torch.testing.assert_close(summed.to_dense(), wanted * factor)
        first, second = sparse(rank, count), sparse(rank, count)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
        assert works[1].get_future().wait()[0] is second
        works[0].wait()
        assert all(map(torch.equal, plain(first)[2:], plain(second)[2:]))
    average = sparse(rank, dtype=torch.int64)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    total = torch.stack([sparse(r, dtype=torch.int64).to_dense() for r in range(size)]).sum(0)
    assert torch.equal(average.to_dense(), total.div(size, rounding_mode="trunc"))
    with pytest.raises(TypeError, match="MAX.* is not defined for sparse tensors; use SUM, AVG or PremulSum"):
        dist.all_reduce(average, dist.ReduceOp.MAX)
    other = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (5 + rank,))
    with pytest.raises(dist.CollectiveMismatchError, match=rf"which has shape \[{5 + rank}\]") as caught:
        dist.all_reduce(other)
    assert str([r for r in range(size) if r != rank]) in str(caught.value)
    dist.barrier()


def test_sparse_sums_are_coalesced_and_alike(ranks):
    ranks(3)(reduce_sparse_tensors)


def over_the_plug_in(directory: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = ("sparse_all_reduce", "sparse_all_reduce_async")
    agree([partial(CASES[name], torch_dist, rank, size) for name in names], directory)
    os.makedirs(f"{directory}/average", exist_ok=True)
    with torch_group("paceline", f"{directory}/average"):
        torch_dist.all_reduce(numbers := torch.tensor([rank, -7 * rank]), torch_dist.ReduceOp.AVG)
        assert numbers.tolist() == [0, -3]


def test_the_plug_in_sums_sparse_and_averages_integers(ranks, tmp_path: Path):
    ranks(2)(over_the_plug_in, str(tmp_path))


def give_seconds(directory: str) -> None:
    dist.init_process_group(timeout=20)
    rank = dist.get_rank()
    assert dist.group.WORLD.timeout == timedelta(seconds=20)
    group = dist.new_group(timeout=0.2)
    store = dist.HashStore(timeout=0.01)
    with pytest.raises(dist.StoreTimeoutError, match="timed out"):
        store.get("never")
    with pytest.raises(torch_dist.DistStoreError, match="timed out"):
        store.wait(["never"], 0.01)
    with pytest.raises(TypeError, match="timeout is 'soon'; it must be a datetime.timedelta or a number of seconds"):
        dist.barrier(timeout="soon")
    dist.barrier(timeout=20)
    dist.all_reduce(torch.ones(1), timeout=19.5, async_op=True).wait(20.5)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"timed out: all_reduce had not completed after 0\.1 s"):
            work.wait(0.1)
        with pytest.raises(
            torch_dist.DistBackendError, match=r"rank 1 did not reach it within 0\.2 s.* timed out after"
        ):
            dist.monitored_barrier(group, timeout=0.2)
        say(directory, "waited")
        dist.monitored_barrier()
        return
    await_word(directory, "waited")
    dist.all_reduce(torch.ones(1))
    dist.monitored_barrier(timeout=15.0)


def test_timeouts_may_be_numbers_of_seconds(ranks, tmp_path):
    ranks(2)(give_seconds, str(tmp_path))


def name_reductions() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    for op, wanted in (
        (torch_dist.ReduceOp.SUM, size),
        (torch_dist.ReduceOp(torch_dist.ReduceOp.AVG), 1),
        (torch_dist._make_nccl_premul_sum(2.0), 2 * size),
    ):
        dist.all_reduce(tensor := torch.ones(2), op)
        assert tensor.tolist() == [wanted] * 2
    with pytest.raises(
        TypeError, match=r"op must be a paceline.ReduceOp, .*or a torch.distributed.ReduceOp, not 'sum'"
    ):
        dist.all_reduce(torch.ones(1), "sum")
    numbers = torch.tensor([-7, 7, 127, -128], dtype=torch.int8)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)  # two ranks: -14, 14, and wrapped sums -2 and 0
    assert numbers.tolist() == [-7, 7, -1, 0]
    odd = torch.tensor([-7, 7]) * (1 - dist.get_rank())
    dist.all_reduce(odd, dist.ReduceOp.AVG)
    assert odd.tolist() == [-3, 3]


def test_torchs_reductions_are_taken_too(ranks):
    ranks(2)(name_reductions)


def make_groups_of_members() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    if rank < 2:
        for _ in range(2):
            pair = dist.new_group([1, 0], use_local_synchronization=True, group_desc="pair")
            dist.all_reduce(tensor := torch.ones(1), group=pair)
            assert tensor.item() == 2 and pair.group_desc == "pair" and dist.get_rank(pair) == 1 - rank
    everyone = dist.new_group([2, 1, 0], sort_ranks=True)
    dist.barrier(everyone)
    assert everyone.rank() == rank and dist.get_pg_count() == (4 if rank < 2 else 2)


def test_members_alone_can_make_a_group(ranks):
    ranks(3)(make_groups_of_members)


def choose_a_static_graph_late() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    used, unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    model = dist.DistributedDataParallel(torch.nn.ModuleList([used, unused]))
    model.module.forward = used.forward
    model._set_static_graph()
    model._set_static_graph()
    for _ in range(2):
        model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    assert model.static_graph and unused.weight.grad is None
    assert torch.equal(used.weight.grad, torch.full((3, 3), 2.0))
    late = dist.DistributedDataParallel(torch.nn.Linear(3, 3))
    late(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="before the first forward, or wrap the module with static_graph=True"):
        late._set_static_graph()


def test_a_static_graph_can_be_chosen_after_wrapping(ranks):
    ranks(2)(choose_a_static_graph_late)

"""Collectives on objects, on real processes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as torch_dist
from one_world import OneWorld

import paceline as dist


@dataclass
class Setting:
    rate: float


def an_object(rank: int, seed: int) -> object:
    """Returns an object whose size differs between ranks, with no tensors, small tensors, or large tensors."""
    choose = random.Random(1000 * rank + seed)
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    leaves = [None, rank, "ä" * choose.randrange(50), (1, 2.5), {"s": {rank, -1}}, b"x" * choose.randrange(9000)]
    if seed % 3:
        leaves += [torch.randn(choose.randrange(2000), generator=generator) for _ in range(choose.randrange(4))]
    return {"rank": rank, "things": leaves[: choose.randrange(len(leaves) + 1)]}


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def exchange_everything(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    for seed in range(8):
        mine = an_object(rank, seed)
        everyone = [[None] * size for _ in range(2)]
        for library, out in zip((dist, torch_dist), everyone, strict=True):
            library.all_gather_object(out, mine)
        assert equal(everyone[0], everyone[1])
        assert equal(everyone[0], [an_object(r, seed) for r in range(size)])

        root = seed % size
        gathered = [[None] * size if rank == root else None for _ in range(2)]
        for library, out in zip((dist, torch_dist), gathered, strict=True):
            library.gather_object(mine, out, dst=root)
        assert equal(gathered[0], gathered[1])

        lists = [[an_object(rank, 10 * seed + at) for at in range(3)] for _ in range(2)]
        for library, out in zip((dist, torch_dist), lists, strict=True):
            library.broadcast_object_list(out, src=root)
        assert equal(lists[0], lists[1])

        parts = [[None] for _ in range(2)]
        sent = [an_object(r, 99 + seed) for r in range(size)] if rank == root else None
        for library, out in zip((dist, torch_dist), parts, strict=True):
            library.scatter_object_list(out, sent, src=root)
        assert equal(parts[0], parts[1])
    dist.broadcast_object_list([])
    dist.barrier()
    torch_dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_arrive_as_torch_would_bring_them(ranks, size, tmp_path):
    ranks(size)(exchange_everything, str(tmp_path / "rendezvous"))


def in_a_subgroup() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    group = dist.new_group([2, 0])
    out = [None, None]
    dist.all_gather_object(out, rank, group)
    assert out == ([None, None] if rank == 1 else [2, 0])
    values = [rank]
    dist.broadcast_object_list(values, group=group, group_src=0)
    assert values == [1 if rank == 1 else 2]
    dist.gather_object(rank, out if rank == 0 else None, dst=0, group=group)
    one = [None]
    dist.scatter_object_list(one, ["for 2", "for 0"] if rank == 0 else None, src=0, group=group)
    assert one == [{0: "for 0", 1: None, 2: "for 2"}[rank]]


def test_in_a_group_ranks_are_taken_as_torch_takes_them(ranks):
    ranks(3)(in_a_subgroup)


def an_object_that_cannot_be_sent() -> None:
    rank = dist.get_rank()
    out: list[object] = [None, None]
    expected = pytest.raises(TypeError, match=r"rank 1 .*all_gather_object: obj\['a'\]\[1\] is a .*Setting")
    if rank == 0:
        expected = pytest.raises(
            dist.CollectiveObjectError, match="rank 0 .*all_gather_object: rank 1 .* could not send"
        )
    with expected as caught:
        dist.all_gather_object(out, {"a": [1, Setting(1.0)]} if rank == 1 else 1)
    assert rank == 1 or caught.value.rank == 1
    with pytest.raises(TypeError if rank == 1 else dist.CollectiveObjectError):
        dist.broadcast_object_list([1, Setting(1.0)], src=1)
    with pytest.raises(TypeError if rank == 1 else dist.CollectiveObjectError):
        dist.scatter_object_list([None], [1, Setting(1.0)], src=1)
    with pytest.raises(TypeError if rank == 1 else dist.CollectiveObjectError):
        dist.gather_object(Setting(1.0) if rank == 1 else 1, out if rank == 0 else None)


def a_pickle_that_nobody_asked_for() -> None:
    rank = dist.get_rank()
    out: list[object] = [None, None]
    dist.all_gather_object(out, Setting(rank), allow_pickle=True)
    assert out == [Setting(0), Setting(1)]
    one: list[object] = [Setting(2.0) if rank == 1 else None]
    if rank == 0:
        with pytest.raises(
            dist.CollectiveObjectError, match="rank 1 .* sent a pickle, .*allow_pickle=True on this rank"
        ):
            dist.broadcast_object_list(one, src=1)
    else:
        dist.broadcast_object_list(one, src=1, allow_pickle=True)


def arguments_that_do_not_fit() -> None:
    rank = dist.get_rank()
    out: list[object] = [None, None]
    with pytest.raises(ValueError, match="object_list has 1 entries; it must be a list of 2"):
        dist.all_gather_object([None], 1)
    with pytest.raises(ValueError, match="takes object_gather_list on the destination, rank 0"):
        dist.gather_object(1, None if rank == 0 else out)
    with pytest.raises(ValueError, match="at least one entry"):
        dist.scatter_object_list([], [1, 2])
    with pytest.raises(ValueError, match="device is cuda"):
        dist.broadcast_object_list([1], device=torch.device("cuda"))


def different_destinations() -> None:
    rank = dist.get_rank()
    seen = (
        rf"gather_object: the destination is rank {rank} here; it must be the same on all ranks\. .*splits do not match"
    )
    with pytest.raises(dist.CollectiveMismatchError, match=seen):
        dist.gather_object(1, [None, None], dst=rank)


def lists_of_different_lengths() -> None:
    rank = dist.get_rank()
    with pytest.raises(dist.CollectiveMismatchError, match="object_list has .* entries here.*2 elements.*4 elements"):
        dist.broadcast_object_list([1] * (1 + rank))


def exchange_ranks() -> None:
    out: list[object] = [None, None]
    dist.all_gather_object(out, dist.get_rank())
    assert out == [0, 1]


REFUSED = OneWorld(
    an_object_that_cannot_be_sent,
    a_pickle_that_nobody_asked_for,
    arguments_that_do_not_fit,
    different_destinations,
    lists_of_different_lengths,
    exchange_ranks,
)


@pytest.mark.parametrize("case", REFUSED.programs)
def test_what_is_refused_leaves_the_group_usable(case):
    REFUSED.require(2, case)


def send_nonsense() -> None:
    """Rank 1 implements the protocol manually, and sends invalid data."""
    dist.init_process_group()
    rank = dist.get_rank()
    announced = [(0, 0), (-5, 0), (1 << 62, 0), (100, -1), (8, 1), (1 << 61, 1 << 58), (9, 0)]
    for number, (nbytes, buffers) in enumerate(announced):
        if rank == 0:
            with pytest.raises(dist.CollectiveObjectError, match="rank 1 .*sent a malformed object") as caught:
                dist.broadcast_object_list([None], src=1)
            assert caught.value.rank == 1
        else:
            dist.broadcast(torch.tensor([nbytes, buffers]), src=1)
            if number == len(announced) - 1:
                dist.broadcast([torch.full((9,), 0xC1, dtype=torch.uint8)], src=1)
    dist.barrier()


def test_nonsense_is_refused_with_its_senders_name(ranks):
    ranks(2)(send_nonsense)

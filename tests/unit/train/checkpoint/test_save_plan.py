"""The assignment of a checkpoint's data to ranks, without a rank or a file."""

from __future__ import annotations

import doctest
from importlib import import_module
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.checkpoint.format.regions import untiled
from paceline.train.checkpoint.save_plan import assign_bytes
from paceline.train.checkpoint.shard_layout import parts_of_run

MODULES = ("save_plan", "shard_layout", "format.values")


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_parts_of_checkpoints_run(name: str) -> None:
    assert doctest.testmod(import_module(f"paceline.train.checkpoint.{name}")).failed == 0


@given(
    st.lists(st.integers(0, 5000), max_size=12),
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.sampled_from([1, 8, 512]),
)
def test_every_byte_is_dealt_out_once(sizes: list[int], loads: list[int], alignment: int) -> None:
    dealt = assign_bytes(sizes, loads, alignment)
    assert len(dealt) == len(loads)
    shares = sorted(share for shares in dealt for share in shares)
    for index, size in enumerate(sizes):
        mine = [share for share in shares if share.item == index]
        assert mine[0].start == 0
        assert mine[-1].stop == size
        assert all(a.stop == b.start for a, b in pairwise(mine))
        assert all(share.start % alignment == 0 for share in mine)
    totals = [load + sum(share.stop - share.start for share in its) for load, its in zip(loads, dealt, strict=True)]
    even = (sum(sizes) + sum(loads)) / len(loads)
    assert max(totals) <= max([even, *loads]) + 2 * alignment + 2 * len(loads)


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 5)] * 3), st.data())
def test_runs_in_memory_are_found_in_the_tensor(order: list[int], shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = torch.arange(prod(shape)).view(shape)
    permuted = tensor.permute(order)  # its memory is in the order of `tensor`
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    run = tensor.view(-1)[start:stop]
    parts = parts_of_run(tuple(permuted.shape), permuted.stride(), start, stop)
    flat = permuted.contiguous().view(-1)
    filled = torch.full_like(run, -1)
    for part in parts:
        from paceline.train.checkpoint.format.regions import runs

        there = [flat[a:b] for a, b in runs(part.region, tuple(permuted.shape))]
        expected = torch.cat(there) if there else flat[:0]
        assert torch.equal(part.row_major(run), expected)
        part.fill(filled, expected)
    assert torch.equal(filled, run)
    rest = [*parts_of_run(tuple(permuted.shape), permuted.stride(), 0, start), *parts]
    rest += parts_of_run(tuple(permuted.shape), permuted.stride(), stop, prod(shape))
    assert untiled(tuple(permuted.shape), [part.region for part in rest]) is None

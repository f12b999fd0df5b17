"""Ownership of parameters, and parameters that are gathered together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.zero.shards import ALIGNMENT_BYTES, assign_to_ranks, is_elementwise

# The size of each parameter in bytes, and whether the parameter may be split.
PARAMS = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=40)


@given(PARAMS, st.integers(1, 9))
def test_parameters_are_given_to_the_ranks_completely(params, ranks):
    parts = assign_to_ranks([size for size, _ in params], [cut for _, cut in params], [0] * ranks)
    for (size, cut), its_parts in zip(params, parts, strict=True):
        assert [part.start for part in its_parts] == [0, *(part.stop for part in its_parts[:-1])]
        assert its_parts[-1].stop == size
        assert len(its_parts) == len({part.owner for part in its_parts})
        assert cut or len(its_parts) == 1
        assert all(part.start % ALIGNMENT_BYTES == 0 for part in its_parts)


@given(PARAMS, st.integers(1, 9))
def test_no_rank_has_more_than_an_even_part_and_one_uncut(params, ranks):
    sizes, loads = [size for size, _ in params], [0] * ranks
    parts = assign_to_ranks(sizes, [cut for _, cut in params], loads)
    flat = [part for its_parts in parts for part in its_parts]
    assert loads == [sum(part.stop - part.start for part in flat if part.owner == rank) for rank in range(ranks)]
    largest_whole = max((size for size, cut in params if not cut), default=0)
    assert max(loads) <= 1.02 * (sum(sizes) / ranks + 1) + max(ALIGNMENT_BYTES * ranks, largest_whole)


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 50)))
def test_later_parameters_go_to_the_ranks_with_least(first, later):
    loads = [0, 0, 0]
    assign_to_ranks(first, [False] * len(first), loads)
    before = list(loads)
    parts = assign_to_ranks(later, [False] * len(later), loads)
    assert not later or before[parts[later.index(max(later))][0].owner] == min(before)


def test_only_elementwise_optimizers_get_parts_of_parameters():
    class Derived(torch.optim.SGD):
        pass

    assert is_elementwise(torch.optim.AdamW)
    assert not is_elementwise(Derived)
    assert not is_elementwise(torch.optim.LBFGS)

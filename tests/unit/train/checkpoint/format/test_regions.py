"""Regions of tensors: their runs of elements, and the elements that two regions have in common."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.train.checkpoint.format.regions import (
    Flat,
    TensorBlock,
    copies,
    count,
    count_common,
    runs,
    simplified,
    untiled,
)

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def tensor_blocks(draw, shape):
    ranges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return TensorBlock(tuple(first for first, _ in ranges), tuple(last - first for first, last in ranges))


@st.composite
def regions(draw, shape):
    if draw(st.booleans()):
        return draw(tensor_blocks(shape))
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return Flat(start, stop)


def elements(region, shape):
    """Returns the indices of a region's elements in the flattened tensor, in buffer order."""
    if isinstance(region, Flat):
        return list(range(region.start, region.stop))
    axes = [range(first, first + size) for first, size in zip(region.offset, region.shape, strict=True)]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in product(*axes)]


@given(st.data(), shapes)
def test_runs_are_the_elements_of_a_region_in_order(data, shape):
    region = data.draw(regions(shape))
    assert [index for start, stop in runs(region, shape) for index in range(start, stop)] == elements(region, shape)
    assert count(region) == len(elements(region, shape))
    assert elements(simplified(region, shape), shape) == elements(region, shape)


@given(st.data(), shapes)
def test_copies_put_each_common_element_where_it_belongs(data, shape):
    held, wanted = data.draw(regions(shape)), data.draw(regions(shape))
    have, want = elements(held, shape), elements(wanted, shape)
    filled = {}
    found = list(copies(shape, held, wanted))
    assert found == sorted(found) and found == sorted(found, key=lambda each: each.target)
    assert sum(each.nelements for each in found) == count_common(shape, held, wanted)
    for each in found:
        for offset in range(each.nelements):
            assert each.target + offset not in filled
            filled[each.target + offset] = have[each.source + offset]
    assert filled == {at: index for at, index in enumerate(want) if index in set(have)}


def test_the_copies_of_a_column_are_computed_one_at_a_time():
    rows = 1 << 40  # a list of the runs would need terabytes
    shape, column = (rows, 8), TensorBlock((0, 2), (rows, 3))
    for held, wanted, first, last, number in (
        (column, Flat(0, 8 * rows), (0, 2, 3), (3, 10, 3), 3 * rows),
        (Flat(0, 8 * rows), column, (2, 0, 3), (10, 3, 3), 3 * rows),
        (column, TensorBlock((0, 4), (rows, 4)), (2, 0, 1), (5, 4, 1), rows),
        (column, Flat(8 * rows - 16, 8 * rows), (3 * rows - 6, 2, 3), (3 * rows - 3, 10, 3), 6),
    ):
        found = copies(shape, held, wanted)
        assert [next(found), next(found)] == [first, last]
        assert count_common(shape, held, wanted) == number
    assert list(copies(shape, column, TensorBlock((0, 0), (rows, 2)))) == []


@given(st.data(), shapes, st.integers(1, 5))
def test_regions_tile_exactly_if_each_element_is_held_once(data, shape, number):
    found = [data.draw(regions(shape)) for _ in range(number)]
    held = sorted(index for region in found for index in elements(region, shape))
    assert (untiled(shape, found) is None) == (held == list(range(prod(shape))))


@given(st.data(), shapes)
def test_slices_along_a_dimension_tile(data, shape):
    assume(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    first = TensorBlock((0,) * len(shape), (*shape[:axis], cut, *shape[axis + 1 :]))
    offset = tuple(cut if each == axis else 0 for each in range(len(shape)))
    second = TensorBlock(offset, (*shape[:axis], shape[axis] - cut, *shape[axis + 1 :]))
    assert untiled(shape, [second, first]) is None
    if cut < shape[axis]:
        assert "no rank holds" in str(untiled(shape, [first]))


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        ([Flat(0, 4), Flat(5, 6)], "no rank holds the elements 4 to 5"),
        ([Flat(0, 4), Flat(3, 6)], "the elements 3 to 4 are held twice"),
        ([Flat(0, 7)], "elements 0 to 7 of a tensor of 6"),
        ([TensorBlock((0, 0), (2, 2)), TensorBlock((0, 1), (2, 2))], "the blocks at [0, 0] and at [0, 1] overlap"),
        ([TensorBlock((0, 0), (2, 4))], "0 to 4 of 3 in dimension 1"),
        ([], "no rank holds the elements 0 to 6"),
    ],
)
def test_what_is_missing_or_held_twice_is_named(held, fault):
    assert untiled((2, 3), held) == fault


def test_grids_are_checked_without_comparing_their_cells():
    columns = [TensorBlock((0, first), (2, 1)) for first in range(4_000)]
    assert untiled((2, 4_000), columns) is None


def test_blocks_that_would_take_long_to_compare_are_refused(monkeypatch):
    monkeypatch.setattr("paceline.train.checkpoint.format.regions._MOST_COMPARISONS", 1000)
    columns = [TensorBlock((0, first), (2, 1)) for first in range(58)]
    corners = [TensorBlock((0, 58), (1, 2)), TensorBlock((1, 58), (1, 1)), TensorBlock((1, 59), (1, 1))]
    assert "are too irregular to check" in str(untiled((2, 60), [*columns, *corners]))

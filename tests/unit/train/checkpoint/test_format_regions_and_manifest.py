"""The pure parts of a checkpoint: regions, what a reader needs of them, values, headers and manifests."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    Piece,
    RankPart,
    TensorEntry,
    contribution_to_bytes,
    contributions_from_bytes,
    manifest_from_bytes,
    manifest_to_bytes,
    merged,
)
from paceline.train.checkpoint.format.regions import Box, Flat, copies, count, runs, simplified, untiled, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE, header_of, length_of, read_header
from paceline.train.checkpoint.format.values import DType, TensorRef, decode, encode, tensors_in

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    ranges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(first for first, _ in ranges), tuple(last - first for first, last in ranges))


@st.composite
def regions(draw, shape):
    if draw(st.booleans()):
        return draw(boxes(shape))
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
    for each in copies(shape, held, wanted):
        for offset in range(each.nelements):
            assert each.target + offset not in filled
            filled[each.target + offset] = have[each.source + offset]
    assert filled == {at: index for at, index in enumerate(want) if index in set(have)}


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
    first = Box((0,) * len(shape), (*shape[:axis], cut, *shape[axis + 1 :]))
    offset = tuple(cut if each == axis else 0 for each in range(len(shape)))
    second = Box(offset, (*shape[:axis], shape[axis] - cut, *shape[axis + 1 :]))
    assert untiled(shape, [second, first]) is None
    if cut < shape[axis]:
        assert "no rank holds" in str(untiled(shape, [first]))


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        ([Flat(0, 4), Flat(5, 6)], "no rank holds the elements 4 to 5"),
        ([Flat(0, 4), Flat(3, 6)], "the elements 3 to 4 are held twice"),
        ([Flat(0, 7)], "elements 0 to 7 of a tensor of 6"),
        ([Box((0, 0), (2, 2)), Box((0, 1), (2, 2))], "the blocks at [0, 0] and at [0, 1] overlap"),
        ([Box((0, 0), (2, 4))], "0 to 4 of 3 in dimension 1"),
        ([], "no rank holds the elements 0 to 6"),
    ],
)
def test_what_is_missing_or_held_twice_is_named(held, fault):
    assert untiled((2, 3), held) == fault


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(TensorRef, st.text())
    | st.builds(DType, st.sampled_from(sorted(ITEMSIZE))),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=15,
)


@given(plain)
def test_values_come_back_from_json_as_they_were(value):
    returned = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert repr(returned) == repr(value) or returned == value


def test_values_keep_the_types_that_json_does_not_have():
    value = {1: (2, [3.5, math.inf]), "$x": b"\0", "n": None, "big": 2**80, "set": {1, 2}, "zero": -0.0}
    returned = decode(json.loads(json.dumps(encode(value))))
    assert returned == value and type(returned[1]) is tuple and math.copysign(1, returned["zero"]) == -1


def test_a_value_that_cannot_be_held_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a builtins.object, which a checkpoint cannot contain"):
        encode({"a": [1, object()]}, "state")


def test_a_tag_of_a_newer_version_is_refused():
    with pytest.raises(ValueError, match=r"the tag '\$decimal' is not known; the known tags are \$bytes"):
        decode({"$decimal": "1.5"})


def test_tensors_in_a_tree_of_values_are_found():
    assert tensors_in(encode({"a": [TensorRef("x")], 3: (TensorRef("y"), 1)})) == {"x", "y"}


def test_headers_are_those_of_the_safetensors_package():
    safetensors = pytest.importorskip("safetensors")
    header, slots = header_of([("a", "F32", (2, 3)), ("b", "BF16", ()), ("c", "C128", (1,)), ("d", "U8", (0,))])
    data = bytes(range(24 + 2 + 16))
    read = dict(safetensors.deserialize(header + data))
    assert {name: (info["dtype"], info["shape"]) for name, info in read.items()} == {
        "a": ("F32", [2, 3]),
        "b": ("BF16", []),
        "c": ("U8", [16]),  # every version of safetensors can read it as bytes
        "d": ("U8", [0]),
    }
    assert bytes(read["b"]["data"]) == data[24:26] and slots[1].offset == len(header) + 24
    assert len(header) % 8 == 0 and length_of(header) == len(header)
    assert [(each.key, each.offset) for each in read_header(header)[0]] == [(each.key, each.offset) for each in slots]


@pytest.mark.parametrize("header", [b"", b"PK\3\4 zip!", (5).to_bytes(8, "little") + b"[1,2]"])
def test_what_is_no_safetensors_file_is_refused(header):
    with pytest.raises(ValueError, match="safetensors file"):
        read_header(header[: length_of(header)])


def piece_of(region):
    return Piece.of("rank_00000_000.safetensors", "w", 64, region, ("0" * 32,))


PIECE = piece_of(whole((2, 3)))
ENTRY = TensorEntry("F32", (2, 3), (PIECE,))
PART = RankPart(0, {PIECE.file: FileEntry(88, 64, "1" * 32)}, {"w": ENTRY})
MANIFEST = Manifest(7, 3, "ab", 1, 1.5, "0.1.0", PART.files, PART.tensors, {"a": [1, {"$tuple": []}]})


def test_a_manifest_comes_back_as_it_was():
    assert manifest_from_bytes(manifest_to_bytes(MANIFEST), "m") == MANIFEST
    boxed = replace(
        MANIFEST,
        step=None,
        here=(),
        tensors={"w": replace(ENTRY, pieces=(piece_of(Box((0, 0), (2, 3))),))},
    )
    assert manifest_from_bytes(manifest_to_bytes(boxed), "m") == boxed
    assert contributions_from_bytes(b"[" + contribution_to_bytes(PART, {}) + b"]") == (
        [PART],
        {},
    )
    assert json.loads(manifest_to_bytes(MANIFEST))["tensors"]["w"]["pieces"][0]["flat"] == [0, 6]


def test_a_manifest_that_is_cut_or_flipped_anywhere_is_noticed():
    text = manifest_to_bytes(MANIFEST)
    for at in range(len(text)):
        with pytest.raises(CheckpointDamagedError, match="m (is truncated or was changed|was changed|is empty)"):
            manifest_from_bytes(text[:at], "m")
        with pytest.raises(CheckpointError, match=r"^m "):
            manifest_from_bytes(text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :], "m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b'{"format": "paceline-checkpoint", "version": 9}',
            "m has version 9 of the format; this Paceline reads version 1",
        ),
        (b'{"format": "other", "version": 1}', "its format is 'other'"),
    ],
)
def test_foreign_and_newer_manifests_are_refused(text, said):
    with pytest.raises(CheckpointError, match=said):
        manifest_from_bytes(text, "m")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            TensorEntry("F32", (2, 3), (piece_of(Flat(0, 2)),)),
            "the elements 0 to 2 are held twice",
        ),
        (TensorEntry("F64", (2, 3), ()), r"w is F32 \[2, 3\] on rank 0, but F64 \[2, 3\] on rank 1"),
    ],
)
def test_parts_that_do_not_make_up_a_state_are_refused(other, said):
    with pytest.raises(CheckpointError, match=said):
        merged([PART, RankPart(1, {}, {"w": other})])

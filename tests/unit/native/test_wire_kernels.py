"""Packing and unpacking of arbitrary floats: results are equal at every SIMD level, and equal to plain torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, QUANTIZED_TYPES, WIRE_CODES

GROUP = 64
LEVELS = {"int8": 127, "int4": 7}
LEAST, MOST = 2.0**-110, 2.0**127


def packed(wire, level, tensor, residual=None):
    out = torch.zeros(_core.packed_size(WIRE_CODES[wire], tensor.numel()), dtype=torch.uint8)
    at = 0 if residual is None else residual.data_ptr()
    code, count = DTYPE_CODES[tensor.dtype], tensor.numel()
    _core.pack(WIRE_CODES[wire], level, code, tensor.data_ptr(), at, out.data_ptr(), count)
    return out


def unpacked(wire, level, data, like):
    out = torch.empty_like(like)
    code = DTYPE_CODES[like.dtype]
    _core.unpack(WIRE_CODES[wire], level, code, data.data_ptr(), out.data_ptr(), like.numel())
    return out


def rounded(wire, values):
    """Returns float32 values after the wire format's rounding, as described in native/wire/wire.hpp."""
    if wire == "bf16":
        return values.bfloat16().float()
    groups = torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
    most = groups.abs().amax(1, keepdim=True)
    bits = (most / LEVELS[wire]).view(torch.int32)
    scales = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    result = (groups * (1 / scales)).round() * scales
    result = torch.where(most < LEAST, 0.0, result)
    return torch.where(most.isnan() | (most >= MOST), torch.nan, result).view(-1)[: values.numel()]


def same(one, other):
    return torch.equal(one.nan_to_num(1e-3), other.nan_to_num(1e-3)) and torch.equal(one.isnan(), other.isnan())


floats = st.one_of(
    st.floats(width=32),  # also NaN, infinity, zeros and denormals
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-110, 2.0**-111, 2.0**127, 1.7e38, 3.4e38, 1e-45]),
)
tensors = st.lists(floats, max_size=200).map(torch.tensor).map(torch.Tensor.float)
each_wire = pytest.mark.parametrize("wire", WIRE_CODES)


@each_wire
@settings(max_examples=examples(150), deadline=None)
@given(values=tensors)
def test_every_level_rounds_as_written(wire, values):
    expected = rounded(wire, values)
    for level in _core.wire_levels():
        assert same(unpacked(wire, level, packed(wire, level, values), values), expected)


@each_wire
@settings(max_examples=examples(100), deadline=None)
@given(values=tensors, lost=tensors)
def test_residuals_are_added_and_hold_what_is_lost(wire, values, lost):
    lost = torch.nn.functional.pad(lost.nan_to_num(0, 0, 0), (0, max(0, values.numel() - lost.numel())))
    lost = lost[: values.numel()]
    wanted = values + lost
    rests = []
    for level in _core.wire_levels():
        residual = lost.clone()
        got = unpacked(wire, level, packed(wire, level, values, residual), values)
        assert same(got, rounded(wire, wanted))
        assert residual.isfinite().all()
        left = wanted - got
        kept = left.isfinite() & wanted.isfinite()
        assert torch.equal(residual[kept], left[kept])
        rests.append(residual)
    assert all(torch.equal(rest, rests[0]) for rest in rests)


@each_wire
@pytest.mark.parametrize("dtype", QUANTIZED_TYPES)
@pytest.mark.parametrize("divisor", [1, 3, 4])
def test_what_is_added_is_rounded_once(wire, dtype, divisor):
    generator = torch.Generator().manual_seed(1)
    values, onto = (torch.randn(1001, generator=generator).to(dtype) for _ in range(2))
    for level in _core.wire_levels():
        data = packed(wire, level, values)
        total = onto.clone()
        code = DTYPE_CODES[dtype]
        _core.add_packed(WIRE_CODES[wire], level, code, data.data_ptr(), total.data_ptr(), total.numel(), divisor)
        expected = (onto.float() + rounded(wire, values.float())) / divisor
        assert torch.equal(total, expected.to(dtype))


@each_wire
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 129, 1000])
def test_nothing_beyond_the_elements_is_touched(wire, count):
    for level in _core.wire_levels():
        values = torch.ones(count + 8)
        residual = torch.zeros(count + 8)
        data = torch.full((_core.packed_size(WIRE_CODES[wire], count) + 8,), 77, dtype=torch.uint8)
        code, number = DTYPE_CODES[torch.float32], WIRE_CODES[wire]
        _core.pack(number, level, code, values.data_ptr(), residual.data_ptr(), data.data_ptr(), count)
        values[:] = 5
        _core.unpack(number, level, code, data.data_ptr(), values.data_ptr(), count)
        assert torch.equal(data[-8:], torch.full((8,), 77, dtype=torch.uint8))
        assert torch.equal(values[count:], torch.full((8,), 5.0)) and not residual[count:].any()
        assert torch.allclose(values[:count], torch.ones(count), atol=0.01)


@pytest.mark.parametrize(("wire", "nbytes"), [("bf16", 128), ("int8", 66), ("int4", 34)])
def test_a_group_has_the_size_that_is_documented(wire, nbytes):
    assert [_core.packed_size(WIRE_CODES[wire], count) for count in (0, 1, 64, 65)] == [0, nbytes, nbytes, 2 * nbytes]


def test_kernels_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no such kernels"):
        _core.pack(1, "baseline", DTYPE_CODES[torch.float64], 0, 0, 0, 0)
    with pytest.raises(ValueError, match="no such kernels"):
        _core.pack(1, "no level", DTYPE_CODES[torch.float32], 0, 0, 0, 0)

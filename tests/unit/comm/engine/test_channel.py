"""Codes that the engines' channels share: dtypes, reductions and formats."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.engine.channel import DTYPE_CODES, ITEM_SIZES, WIRE_CODES, PremulSum, ReduceOp, byte_view, dtype_name


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_a_dtype_has_its_code_its_name_and_its_size(dtype):
    code = DTYPE_CODES[dtype]
    assert getattr(torch, dtype_name(code)) is dtype
    assert ITEM_SIZES[code] == dtype.itemsize


def test_codes_are_not_shared():
    assert len(set(DTYPE_CODES.values())) == len(DTYPE_CODES)
    assert 0 not in WIRE_CODES.values() and len(set(WIRE_CODES.values())) == len(WIRE_CODES)


def test_reductions_have_the_former_names_of_torch_too():
    assert ReduceOp.RedOpType.SUM is ReduceOp.SUM
    assert PremulSum(0.5) == PremulSum(0.5) != PremulSum(2.0)


def test_a_reduction_is_printed_by_its_name():
    assert f"{ReduceOp.SUM} {ReduceOp.MAX!s:>13}" == "ReduceOp.SUM  ReduceOp.MAX"


@pytest.mark.parametrize(
    "tensor", [torch.ones(4)[::4], torch.ones(4, 2)[::4, :1], torch.ones(()), torch.ones(3, 2)[1:], torch.ones(0, 3)]
)
def test_a_contiguous_tensor_is_seen_as_bytes(tensor):
    view = byte_view(tensor)
    assert (view.shape, view.stride(), view.data_ptr()) == ((tensor.nbytes,), (1,), tensor.data_ptr())
    assert view.numpy().tobytes() == tensor.numpy().tobytes()

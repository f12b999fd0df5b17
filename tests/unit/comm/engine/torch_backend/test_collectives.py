"""Conversion of calls to PyTorch's process groups: reductions, and tensors in several pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.channel import DTYPE_CODES, CollectiveCall, DevicePieces, ReduceOp
from paceline.comm.engine.torch_backend.collectives import (
    CallSettings,
    DeviceBuffer,
    TorchReduction,
    find_reduction,
    start_call,
)
from paceline.comm.schedule.steps import Operation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "op", "wanted"),
    [
        (torch.float32, ReduceOp.SUM, (torch.float32, c10d.ReduceOp.SUM)),
        (torch.bfloat16, ReduceOp.AVG, (torch.bfloat16, c10d.ReduceOp.AVG)),
        (torch.int64, ReduceOp.MIN, (torch.int64, c10d.ReduceOp.MIN)),
        (torch.float16, ReduceOp.PREMUL_SUM, (torch.float16, c10d.ReduceOp.SUM)),
        (torch.bool, ReduceOp.BAND, (torch.uint8, c10d.ReduceOp.MIN)),
        (torch.bool, ReduceOp.SUM, (torch.uint8, c10d.ReduceOp.MAX)),
        (torch.bool, ReduceOp.BXOR, None),
        (torch.complex64, ReduceOp.SUM, (torch.float32, c10d.ReduceOp.SUM)),
        (torch.complex64, ReduceOp.PRODUCT, None),
        (torch.uint64, ReduceOp.SUM, (torch.int64, c10d.ReduceOp.SUM)),
        (torch.uint64, ReduceOp.MAX, None),
        (torch.int16, ReduceOp.SUM, None),
        (torch.int32, ReduceOp.BOR, None),
        (torch.float8_e5m2, ReduceOp.SUM, None),
    ],
)
def test_types_and_reductions_are_those_of_a_process_group(dtype, op, wanted):
    found = find_reduction(DTYPE_CODES[dtype], op)
    assert found == (None if wanted is None else TorchReduction(*wanted))


def test_numbers_of_8_bits_are_reduced_where_the_device_can():
    for op, wanted in ((ReduceOp.SUM, c10d.ReduceOp.SUM), (ReduceOp.AVG, c10d.ReduceOp.AVG)):
        found = find_reduction(DTYPE_CODES[torch.float8_e4m3fn], op, has_float8=True)
        assert found == TorchReduction(torch.float8_e4m3fn, wanted)


def test_adjacent_pieces_are_used_where_they_are():
    memory = torch.arange(6, dtype=torch.float32)
    address = memory.data_ptr()
    buffer = DeviceBuffer([[address, 8, address + 8, 4], [address + 12, 12]], CPU)
    buffer.copy_in().tensor(torch.float32).mul_(2)
    buffer.copy_out()
    assert memory.tolist() == [0, 2, 4, 6, 8, 10]
    assert DeviceBuffer([[0, 0], []], CPU).copy_in().tensor(torch.int64).tolist() == []


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    places = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return [after - before for before, after in zip([0, *places], [*places, total], strict=True)]


@given(st.data(), st.integers(1, 20))
def test_pieces_are_one_tensor_in_order(data, nbytes):
    memory = torch.zeros(200, dtype=torch.uint8)
    at = 0
    pieces: list[int] = []
    covered: list[int] = []
    for length in data.draw(cuts(nbytes)):
        at += data.draw(st.integers(0, 1))
        pieces += (memory.data_ptr() + at, length)
        covered += range(at, at + length)
        at += length
    memory[covered] = torch.arange(1, nbytes + 1, dtype=torch.uint8)
    buffer = DeviceBuffer([pieces], CPU)
    flat = buffer.copy_in().tensor()
    assert flat.tolist() == list(range(1, nbytes + 1))
    flat.add_(100)
    buffer.copy_out()
    assert memory[covered].tolist() == list(range(101, nbytes + 101))
    assert memory.count_nonzero() == nbytes


@pytest.mark.skipif(not hasattr(c10d.AllreduceOptions, "asyncOp"), reason="since PyTorch 2.8")
@pytest.mark.parametrize(("device", "is_async"), [("cpu", True), ("cuda:0", False)])
def test_a_call_on_a_device_runs_on_the_stream_of_its_group(device, is_async):
    """PyTorch's group then needs no stream of its own, of which there are only 32."""
    seen: list[bool] = []
    group = SimpleNamespace(
        allreduce=lambda tensors, options: seen.append(options.asyncOp),
        broadcast=lambda tensors, options: seen.append(options.asyncOp),
    )
    settings = CallSettings(0, torch.device(device), reduction=TorchReduction(torch.float32, c10d.ReduceOp.SUM))
    pieces = DevicePieces([torch.ones(3)])
    for operation, root in ((Operation.ALL_REDUCE, -1), (Operation.BROADCAST, 0)):
        call = CollectiveCall(operation, DTYPE_CODES[torch.float32], ReduceOp.SUM, root, 3, 1, [], [pieces])
        assert start_call(group, call, settings).work is None
    assert seen == [is_async] * 2

"""Splitting a call into chunks: the chunks cover all bytes in order, and are the same on all ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.comm.engine.channel import DTYPE_CODES, NO_REDUCTION, CollectiveCall, DevicePieces, ReduceOp
from paceline.comm.engine.staged import memory
from paceline.comm.engine.staged.memory import (
    ALIGNMENT,
    DeviceBytes,
    PinnedMemory,
    StagedLayout,
    copy_to_device,
    copy_to_host,
    divide,
)
from paceline.comm.schedule.steps import Operation

SIZE = 3
SLOT = 1024


def layout_of(operation: Operation, inputs: list[list[torch.Tensor]], outputs: list[list[torch.Tensor]], rank: int = 0):
    every = [tensor for tensors in (*inputs, *outputs) for tensor in tensors]
    op = ReduceOp.SUM if "reduce" in str(operation) else NO_REDUCTION
    root = 0 if operation in (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER) else -1
    count = sum(tensor.numel() for tensor in (outputs or inputs)[0])
    pieces = [[DevicePieces(tensors) for tensors in side] for side in (inputs, outputs)]
    call = CollectiveCall(operation, DTYPE_CODES[every[0].dtype], op, root, count, 10**9, *pieces)
    return divide(call, rank, SIZE, SLOT)


def test_the_chunks_of_an_all_reduce_are_its_bytes_in_order():
    pieces = [torch.arange(start, start + count) for start, count in ((0, 1), (1, 0), (1, 300), (301, 40))]
    layout = layout_of(Operation.ALL_REDUCE, [], [pieces])
    assert (layout.part_nbytes, layout.longest_nbytes) == (SLOT, 341 * 8)
    chunks = layout.chunks_of(layout.longest_nbytes)
    assert chunks == 3
    read: list[int] = []
    for chunk in range(chunks):
        ((buffer, offset, start, stop),) = layout.parts(chunk)
        assert offset == 0 and buffer.source is buffer.target
        host = torch.empty(stop - start, dtype=torch.uint8)
        copy_to_host(host, buffer.source.part(start, stop))
        read += host.view(torch.int64).tolist()
        call = layout.chunk_call(chunk, 4096, 7)
        assert (call.count, call.outputs, call.timeout_ns) == ((stop - start) // 8, [[4096, stop - start]], 7)
        copy_to_device(buffer.target.part(start, stop), (host.view(torch.int64) + 1000).view(torch.uint8))
    assert read == [*range(341)]
    assert torch.cat(pieces).tolist() == [*range(1000, 1341)]


def test_many_pieces_are_copied_as_one():
    parts = [torch.full((count,), count, dtype=torch.uint8) for count in range(1, 20)]
    whole = torch.cat(parts)
    host = torch.zeros_like(whole)
    copy_to_host(host, parts)
    assert torch.equal(host, whole)
    copy_to_device(parts, host + 1)
    assert torch.equal(torch.cat(parts), whole + 1)


@pytest.mark.parametrize("rank", range(SIZE))
def test_only_inputs_are_read_and_only_outputs_are_written(rank):
    tensor = torch.zeros(5)

    def directions(layout: StagedLayout) -> list[tuple[bool, bool]]:
        return [(buffer.source is not None, buffer.target is not None) for buffer in (*layout.inputs, *layout.outputs)]

    assert directions(layout_of(Operation.BROADCAST, [], [[tensor]], rank)) == [(rank == 0, rank != 0)]
    assert directions(layout_of(Operation.REDUCE, [], [[tensor]], rank)) == [(True, rank == 0)]
    assert directions(layout_of(Operation.ALL_REDUCE, [[tensor]], [[tensor]], rank)) == [(True, True)]
    gathered = [[torch.zeros(5)] for _ in range(SIZE)]
    assert directions(layout_of(Operation.ALL_GATHER, [[tensor]], gathered, rank)) == [(True, False)] + 3 * [
        (False, True)
    ]


def test_all_ranks_divide_alike_without_overlap():
    tensor = torch.zeros(500)
    on_root = layout_of(Operation.GATHER, [[tensor]], [[torch.zeros(500)] for _ in range(SIZE)], 0)
    elsewhere = layout_of(Operation.GATHER, [[tensor]], [], 1)
    assert on_root.part_nbytes == elsewhere.part_nbytes == SLOT // 4 // ALIGNMENT * ALIGNMENT
    assert on_root.chunks_of(2000) == elsewhere.chunks_of(2000) == 8
    places = [range(offset, offset + stop - start) for _, offset, start, stop in on_root.parts(7)]
    assert places[-1].stop <= SLOT
    assert all(early.stop <= late.start for early, late in pairwise(places))


def test_an_empty_call_has_a_chunk_and_short_parts_end_early():
    assert layout_of(Operation.ALL_REDUCE, [], [[torch.zeros(0)]]).chunks_of(0) == 1
    inputs = [[torch.zeros(count)] for count in (1, 100, 0)]
    layout = layout_of(Operation.ALL_TO_ALL, inputs, [[torch.zeros(1)] for _ in range(SIZE)])
    assert layout.longest_nbytes == 400
    lengths = [stop - start for _, _, start, stop in layout.parts(2)]
    assert layout.part_nbytes == 128
    assert lengths == [0, 128, 0, 0, 0, 0]
    assert layout.chunk_call(2, 0, 1).count == 0


def test_memory_is_read_in_its_own_order():
    images = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    (part,) = DeviceBytes(DevicePieces([images])).part(0, 96)
    assert part.view(torch.float32).tolist() == images.permute(0, 2, 3, 1).flatten().tolist()


class RefusingRuntime:
    """Replaces `torch.cuda.cudart()`: after a failed call, the thread's next kernel raises an error."""

    def __init__(self) -> None:
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.last_error = 2
        return self.last_error

    def launch(self, *size: int, device: torch.device) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


def test_memory_that_cannot_be_pinned_leaves_no_error(monkeypatch):
    runtime = RefusingRuntime()
    monkeypatch.setattr(memory, "_cuda", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    pinned = PinnedMemory(4096, torch.device("cuda", 0), is_shared=True)
    assert runtime.last_error == 0 and pinned.bytes.numel() == 4096
    pinned.close()  # without calling cudaHostUnregister, which this runtime lacks

"""Memory for staged calls: division of tensors into chunks, pinned host memory, and copies.

All buffers in a call are divided at the same positions, so each chunk is itself a call with the same operation. The
division depends only on the operation, the number of ranks and the sizes, and is therefore the same on all ranks.
Copies are enqueued on the calling thread's current stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import copy_pieces
from paceline.comm.engine.channel import ITEM_SIZES, CollectiveCall, DevicePieces, Pieces, byte_view
from paceline.comm.schedule.steps import Operation

_NO_FLAGS = 0
_MANY = 8  # with this many pieces or more, it is faster to join them with a kernel and copy once

ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of every dtype


@dataclass(frozen=True)
class StagedBuffer:
    """A buffer in a call; it occupies the same part of the slot for every chunk.

    Attributes:
        nbytes: the length of the whole buffer.
        source: the device memory to copy to the slot before the call for a chunk, or None.
        target: the device memory that receives a copy of the slot after the call, or None.
    """

    nbytes: int
    source: DeviceBytes | None
    target: DeviceBytes | None


class DeviceBytes:
    """The memory of dense tensors on one device, viewed as a single sequence of bytes; keeps the tensors alive."""

    def __init__(self, pieces: Pieces) -> None:
        assert isinstance(pieces, DevicePieces), "calls on a device carry their tensors"
        self._views = [byte_view(tensor) for tensor in pieces.tensors if tensor.numel()]
        self.nbytes = sum(view.numel() for view in self._views)

    def part(self, start: int, stop: int) -> list[torch.Tensor]:
        """Returns views of the bytes from `start` up to, but not including, `stop`."""
        found: list[torch.Tensor] = []
        begin = 0
        for view in self._views:
            end = begin + view.numel()
            if begin < stop and start < end:
                found.append(view[max(start - begin, 0) : min(stop, end) - begin])
            begin = end
        return found


@dataclass(frozen=True)
class StagedLayout:
    """The buffers of a call and their division into chunks.

    Attributes:
        call: the call, whose tensors are on the device.
        inputs, outputs: the buffers for the entries in the call's inputs and outputs; an all_reduce has a single
            output.
        part_nbytes: the number of bytes of one buffer in a chunk.
    """

    call: CollectiveCall
    inputs: Sequence[StagedBuffer]
    outputs: Sequence[StagedBuffer]
    part_nbytes: int

    @property
    def longest_nbytes(self) -> int:
        """The length of the longest buffer in bytes, which determines this rank's number of chunks."""
        return max((buffer.nbytes for buffer in (*self.inputs, *self.outputs)), default=0)

    def chunks_of(self, nbytes: int) -> int:
        """Returns the number of chunks for a buffer of `nbytes` bytes; an empty buffer has one chunk."""
        return max(1, -(-nbytes // self.part_nbytes))

    def parts(self, chunk: int) -> Iterator[tuple[StagedBuffer, int, int, int]]:
        """Yields each buffer with the chunk's offset in the slot and its start and stop in the buffer, in bytes."""
        for place, buffer in enumerate((*self.inputs, *self.outputs)):
            start = min(chunk * self.part_nbytes, buffer.nbytes)
            yield buffer, place * self.part_nbytes, start, min(start + self.part_nbytes, buffer.nbytes)

    def chunk_call(self, chunk: int, address: int, timeout_ns: int) -> CollectiveCall:
        """Returns the call for a chunk whose slot in host memory begins at `address`."""
        pieces = [[address + offset, stop - start] for _, offset, start, stop in self.parts(chunk)]
        call = self.call
        operation, count = call.operation, 0
        if operation not in (Operation.ALL_TO_ALL, Operation.BARRIER):
            count = pieces[0][1] // ITEM_SIZES[call.dtype]
        inputs, outputs = pieces[: len(self.inputs)], pieces[len(self.inputs) :]
        return CollectiveCall(operation, call.dtype, call.reduce_op, call.root, count, timeout_ns, inputs, outputs)


def divide(call: CollectiveCall, rank: int, size: int, slot_nbytes: int) -> StagedLayout:
    """Returns the layout of a call.

    Args:
        call: the call, whose inputs and outputs contain `DevicePieces`.
        slot_nbytes: the size of a slot, which must hold `ALIGNMENT` bytes of every buffer on every rank.
    """
    operation = call.operation
    inputs, outputs = [DeviceBytes(pieces) for pieces in call.inputs], [DeviceBytes(pieces) for pieces in call.outputs]
    # `most` is the largest number of buffers on any rank, because the parts must have the same size on all ranks.
    most = 1
    read: list[StagedBuffer] = []
    if operation in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE):
        source, target = (inputs or outputs)[0], outputs[0]
        reads = operation != Operation.BROADCAST or rank == call.root
        writes = operation == Operation.ALL_REDUCE or (rank == call.root) == (operation == Operation.REDUCE)
        written = [StagedBuffer(target.nbytes, source if reads else None, target if writes else None)]
    else:
        if operation != Operation.BARRIER:
            most = 2 * size if operation == Operation.ALL_TO_ALL else size + 1
        read = [StagedBuffer(buffer.nbytes, buffer, None) for buffer in inputs]
        written = [StagedBuffer(buffer.nbytes, None, buffer) for buffer in outputs]
    return StagedLayout(call, read, written, slot_nbytes // most // ALIGNMENT * ALIGNMENT)


class PinnedMemory:
    """Host memory for copies, pinned if the device's module supports it; valid until `close` is called.

    Args:
        is_shared: whether to share the memory with the other ranks on the host, if shared memory can be pinned (as with
            CUDA). The core reduces shared memory without another copy.

    Attributes:
        bytes: the memory as a flat tensor of uint8.
    """

    def __init__(self, nbytes: int, device: torch.device, is_shared: bool) -> None:
        self._registered = False
        if is_shared and device.type == "cuda":
            self.bytes = _core.shared_tensor(nbytes)
            self._registered = int(_cuda().cudaHostRegister(self.bytes.data_ptr(), nbytes, _NO_FLAGS)) == 0
            if not self._registered:
                _clear_error(device)
        if not self._registered:  # a limit on locked memory may prevent pinning memory not allocated by CUDA
            self.bytes = pinned_bytes(nbytes, device)

    def close(self) -> None:
        """Releases the memory, which must not be in use by a copy; idempotent."""
        if self._registered:
            self._registered = False
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns `nbytes` bytes of PyTorch's cached pinned memory, or of ordinary memory if pinning is not supported."""
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # includes NotImplementedError
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def copy_to_host(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Enqueues a copy from device memory to host memory.

    Args:
        host: the host memory, as bytes.
        parts: the device memory, as bytes in one or more tensors, with the same total length as `host`.
    """
    if len(parts) > _MANY:
        parts = [torch.cat(list(parts))]
    for target, part in _side_by_side(host, parts):
        target.copy_(part, non_blocking=True)


def copy_to_device(parts: Sequence[torch.Tensor], host: torch.Tensor) -> None:
    """Enqueues a copy from host memory to device memory; see `copy_to_host` for the arguments."""
    if len(parts) > _MANY:
        whole = torch.empty(host.numel(), dtype=torch.uint8, device=parts[0].device)
        whole.copy_(host, non_blocking=True)
        copy_pieces(parts, [source for source, _ in _side_by_side(whole, parts)])
        return
    for source, part in _side_by_side(host, parts):
        part.copy_(source, non_blocking=True)


def _side_by_side(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields, for each part, the corresponding bytes of `whole` and the part itself."""
    at = 0
    for part in parts:
        yield whole[at : at + part.numel()], part
        at += part.numel()


def _clear_error(device: torch.device) -> None:
    """Clears the error left by a failed CUDA call, which the thread's next kernel launch would otherwise report.

    PyTorch does not provide `cudaGetLastError`, but calls it whenever it launches a kernel.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _cuda() -> Any:
    return torch.cuda.cudart()

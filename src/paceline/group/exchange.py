"""Collectives on bytes whose known lengths differ between ranks, as lists of tensors.

The tensors are on the CPU, whatever torch.set_default_device says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline.durations import Timeout
from paceline.group.base import BaseGroup


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Returns `data` as a one-dimensional uint8 tensor; a bytearray is not copied."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor without a copy; they are valid as long as the tensor exists."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def room_for(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Returns uninitialised uint8 tensors of these lengths, each with memory of its own.

    Raises:
        RuntimeError: the memory cannot be allocated.
    """
    return [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]


def all_gather_pieces(
    group: BaseGroup,
    mine: Sequence[torch.Tensor],
    rooms: Sequence[Sequence[torch.Tensor]],
    timeout: Timeout | None,
) -> None:
    """Copies every rank's pieces to all ranks, those of rank r to `rooms[r]`."""
    totals = {sum(room.numel() for room in each) for each in rooms}
    if totals == {0}:
        return
    if len(totals) == 1:
        group.all_gather(rooms, mine, timeout=timeout)
    else:
        group.all_to_all(rooms, [mine] * group.size(), timeout=timeout)


def gather_pieces(
    group: BaseGroup,
    mine: Sequence[torch.Tensor],
    rooms: Sequence[Sequence[torch.Tensor]],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Copies every rank's pieces to the root, those of rank r to `rooms[r]`; `rooms` is empty on other ranks."""
    nothing: list[list[torch.Tensor]] = [[] for _ in group.ranks]
    inputs = [mine if rank == root else [] for rank in range(group.size())]
    group.all_to_all(rooms if group.rank() == root else nothing, inputs, timeout=timeout)


def scatter_pieces(
    group: BaseGroup,
    theirs: Sequence[Sequence[torch.Tensor]],
    room: Sequence[torch.Tensor],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Copies the root's `theirs[r]` to rank r's `room`; `theirs` is empty on other ranks."""
    nothing: list[list[torch.Tensor]] = [[] for _ in group.ranks]
    outputs = [room if rank == root else [] for rank in range(group.size())]
    group.all_to_all(outputs, theirs if group.rank() == root else nothing, timeout=timeout)

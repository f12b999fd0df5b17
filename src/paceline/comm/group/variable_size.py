"""Collectives on data whose size differs between ranks: sparse tensors, and byte buffers of known lengths.

For a sparse tensor, each rank gathers the rows (indices and values) from all ranks and adds them in rank order, so the
result is bitwise equal on every rank. Byte buffers are lists of uint8 tensors on the CPU, regardless of
torch.set_default_device.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.comm.engine.channel import PremulSum, ReduceOp, Reduction, byte_view
from paceline.comm.group.work import Work, join_works
from paceline.durations import Timeout
from paceline.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from paceline.comm.group.process_group import ProcessGroup


def all_reduce_sparse(
    group: ProcessGroup, tensor: torch.Tensor, op: Reduction, async_op: bool, timeout: Timeout | None
) -> Work | None:
    """Reduces a sparse COO tensor over all ranks, in place, and leaves it coalesced.

    The ranks first exchange their row counts, so even with `async_op` this function blocks until all ranks have
    called it. The rows are then sent in the background.

    Raises:
        TypeError: the reduction is not SUM, AVG or a `PremulSum`.
        CollectiveMismatchError: the ranks' tensors differ in shape, dtype or number of sparse dimensions.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and not isinstance(op, PremulSum):
        raise TypeError(
            f"all_reduce: {op.name} is not defined for sparse tensors; use SUM, AVG or PremulSum, or to_dense()"
        )
    mine = tensor.detach().coalesce()
    if isinstance(op, PremulSum):
        mine = mine * op.factor
    counts = _counts_of_all(group, mine, timeout)
    gathered = GatheredRows(group, mine, counts)
    work = group.all_to_all(gathered.received, [gathered.mine] * group.size(), async_op, timeout)

    def write() -> None:
        total = gathered.total()
        if op is ReduceOp.AVG:
            rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
            total = torch.sparse_coo_tensor(
                total.indices(),
                torch.div(total.values(), group.size(), rounding_mode=rounding),
                total.shape,
                is_coalesced=True,
                check_invariants=False,
                device=total.device,
            )
        with torch.no_grad():
            tensor.copy_(total)

    return join_works([work], "all_reduce", [tensor], write)


class GatheredRows:
    """Memory for the rows gathered from all ranks, all of one shape and dtype; `counts[r]` rows are from rank r.

    Attributes:
        mine: the bytes that this rank sends.
        received: the bytes from all ranks; `received[r]` contains the bytes from rank r.
    """

    def __init__(self, group: ProcessGroup, mine: torch.Tensor, counts: Sequence[int]) -> None:
        self._shape = mine.shape
        indices, values = mine.indices().T.contiguous(), mine.values().contiguous()
        self._rows = [
            (indices.new_empty(count, *indices.shape[1:]), values.new_empty(count, *values.shape[1:]))
            for count in counts
        ]
        self.mine = [byte_view(indices), byte_view(values)]
        self.received = [[byte_view(tensor) for tensor in pair] for pair in self._rows]

    def total(self) -> torch.Tensor:
        """Returns the coalesced sum of all ranks' tensors; `received` must have been filled."""
        indices = torch.cat([indices for indices, _ in self._rows]).T
        values = torch.cat([values for _, values in self._rows])
        return torch.sparse_coo_tensor(
            indices, values, self._shape, check_invariants=False, device=values.device
        ).coalesce()


def _counts_of_all(group: ProcessGroup, mine: torch.Tensor, timeout: Timeout | None) -> list[int]:
    kind = f"shape {list(mine.shape)}, {mine.dtype}, {mine.sparse_dim()} sparse dimensions"
    row_count = torch.tensor([mine._nnz(), zlib.crc32(kind.encode())], device="cpu")
    everyone = [torch.empty_like(row_count) for _ in group.ranks]
    group.all_gather(everyone, row_count, timeout=timeout)
    counts, kinds = torch.stack(everyone).T.tolist()
    others = [rank for rank, other in zip(group.ranks, kinds, strict=True) if other != kinds[group.rank()]]
    if others:
        raise CollectiveMismatchError(
            f"{group.me}: all_reduce of a sparse tensor: ranks {others} pass tensors that differ from this rank's, "
            f"which has {kind}. Pass tensors with the same properties on all ranks. The group remains usable"
        )
    return [int(count) for count in counts]


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Returns `data` as a one-dimensional uint8 tensor; a bytearray is not copied."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor as a view, which is valid while the tensor exists."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def empty_buffers(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Allocates uninitialized uint8 tensors of the given lengths, each with its own memory.

    Raises:
        RuntimeError: the memory cannot be allocated.
    """
    return [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]


def all_gather_pieces(
    group: ProcessGroup,
    mine: Sequence[torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    timeout: Timeout | None,
) -> None:
    """Gathers every rank's pieces on all ranks; `received[r]` receives rank r's pieces."""
    totals = {sum(piece.numel() for piece in pieces) for pieces in received}
    if totals == {0}:
        return
    if len(totals) == 1:
        group.all_gather(received, mine, timeout=timeout)
    else:
        group.all_to_all(received, [mine] * group.size(), timeout=timeout)


def gather_pieces(
    group: ProcessGroup,
    mine: Sequence[torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Gathers every rank's pieces into the root's `received`, in rank order; `received` is empty on other ranks."""
    nothing: list[list[torch.Tensor]] = [[] for _ in group.ranks]
    inputs = [mine if rank == root else [] for rank in range(group.size())]
    group.all_to_all(received if group.rank() == root else nothing, inputs, timeout=timeout)


def scatter_pieces(
    group: ProcessGroup,
    pieces: Sequence[Sequence[torch.Tensor]],
    received: Sequence[torch.Tensor],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Sends the root's `pieces[r]` to rank r's `received`; `pieces` is empty on other ranks."""
    nothing: list[list[torch.Tensor]] = [[] for _ in group.ranks]
    outputs = [received if rank == root else [] for rank in range(group.size())]
    group.all_to_all(outputs, pieces if group.rank() == root else nothing, timeout=timeout)

"""Sums of sparse tensors over all ranks.

Each rank gathers the rows (indices and values) from all ranks and adds them in rank order, so the result is bitwise
equal on every rank. The caller performs the collectives: an all_gather of the headers, and an all_to_all of the rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from paceline.comm.engine.channel import PremulSum, ReduceOp, Reduction, byte_view
from paceline.comm.group.call_plan import RankMap
from paceline.errors import CollectiveMismatchError


class SparseSum:
    """The reduction of a sparse COO tensor over all ranks, in place, with SUM, AVG or a `PremulSum`.

    `header` contains the number of this rank's rows and a checksum of the tensor's properties. The caller gathers the
    headers of all ranks.
    """

    def __init__(self, tensor: torch.Tensor, op: Reduction) -> None:
        if op not in (ReduceOp.SUM, ReduceOp.AVG) and not isinstance(op, PremulSum):
            raise TypeError(
                f"all_reduce: {op.name} is not defined for sparse tensors; use SUM, AVG or PremulSum, or to_dense()"
            )
        mine = tensor.detach().coalesce()
        if isinstance(op, PremulSum):
            mine = mine * op.factor
        self._tensor = tensor
        self._op = op
        self._mine = mine
        self._kind = f"shape {list(mine.shape)}, {mine.dtype}, {mine.sparse_dim()} sparse dimensions"
        self.header = torch.tensor([mine._nnz(), zlib.crc32(self._kind.encode())], device="cpu")

    def allocate(self, headers: Sequence[torch.Tensor], rank_map: RankMap) -> GatheredRows:
        """Allocates memory for the rows of all ranks. The tensors must agree in shape, dtype and sparse dimensions."""
        counts, kinds = torch.stack(list(headers)).T.tolist()
        others = [rank for rank, kind in zip(rank_map.ranks, kinds, strict=True) if kind != kinds[rank_map.rank]]
        if others:
            raise CollectiveMismatchError(
                f"{rank_map.me}: all_reduce of a sparse tensor: ranks {others} pass tensors that differ from this "
                f"rank's, which has {self._kind}. Pass tensors with the same properties on all ranks. The group "
                "remains usable"
            )
        return GatheredRows(self._mine, counts)

    def write(self, rows: GatheredRows) -> None:
        """Copies the result to the tensor, once the rows have been received."""
        total = rows.total()
        if self._op is ReduceOp.AVG:
            rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
            total = torch.sparse_coo_tensor(
                total.indices(),
                torch.div(total.values(), len(rows.received), rounding_mode=rounding),
                total.shape,
                is_coalesced=True,
                check_invariants=False,
                device=total.device,
            )
        with torch.no_grad():
            self._tensor.copy_(total)


class GatheredRows:
    """Memory for the rows gathered from all ranks, all of one shape and dtype; `counts[r]` rows are from rank r.

    This rank sends the bytes in `mine`; `received[r]` receives the bytes from rank r.
    """

    def __init__(self, mine: torch.Tensor, counts: Sequence[int]) -> None:
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

"""Sparse sums of several ranks in one process: the test moves the rows between the ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.engine.channel import PremulSum, ReduceOp, Reduction
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group.call_plan import RankMap
from paceline.comm.group.sparse_sum import SparseSum
from paceline.errors import CollectiveMismatchError

MEMBERS = [RankIdentity(rank, "node", 100 + rank) for rank in range(2)]


def sparse(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to_sparse()


def reduced(tensors: list[torch.Tensor], op: Reduction) -> list[torch.Tensor]:
    sums = [SparseSum(tensor, op) for tensor in tensors]
    headers = [each.header for each in sums]
    rows = [each.allocate(headers, RankMap(MEMBERS, rank, "group")) for rank, each in enumerate(sums)]
    for each in rows:
        for received, sent in zip(each.received, rows, strict=True):
            for target, source in zip(received, sent.mine, strict=True):
                target.copy_(source)
    for total, each in zip(sums, rows, strict=True):
        total.write(each)
    return tensors


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [1.0, 5.0, 0.0, 4.0]),
        (ReduceOp.AVG, [0.5, 2.5, 0.0, 2.0]),
        (PremulSum(2.0), [2.0, 10.0, 0.0, 8.0]),
    ],
)
def test_every_rank_has_the_sum_of_rows_that_differ_in_number(op, expected):
    for result in reduced([sparse(1, 2, 0, 0), sparse(0, 3, 0, 4)], op):
        assert result.is_coalesced()
        assert result.to_dense().tolist() == expected


def test_an_average_of_integers_is_rounded_toward_zero():
    first, _ = reduced([sparse(-3, 2, dtype=torch.int64), sparse(0, 3, dtype=torch.int64)], ReduceOp.AVG)
    assert first.to_dense().tolist() == [-1, 2]


def test_tensors_that_differ_are_reported_before_rows_are_sent():
    with pytest.raises(
        CollectiveMismatchError, match=r"ranks \[1\] pass tensors that differ.*shape \[2\], torch.float32"
    ):
        reduced([sparse(1, 2), sparse(1, 2, 3)], ReduceOp.SUM)


def test_a_maximum_is_not_defined():
    with pytest.raises(TypeError, match="MAX is not defined for sparse tensors; use SUM, AVG or PremulSum"):
        SparseSum(sparse(1), ReduceOp.MAX)

"""Single-element tensors whose stride is not 1: torch treats them as contiguous, but cannot view them as bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from world import Ranks

import paceline as dist


def single(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4,), value).to(dtype)[::4]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.scale = nn.Parameter(single(2))
        self.register_buffer("seen", single(0, torch.int64))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (self.table(indices) * self.scale).sum()


def averaged(rank: int, stage: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Scaled() if stage is None else nn.ParameterDict({"scale": nn.Parameter(single(2))})
    if stage is None:
        wrapped = dist.DistributedDataParallel(model)
        for _ in range(2):
            wrapped(torch.tensor([rank])).backward()  # one row of the table
        return [model.scale.grad, model.seen, model.table.weight.grad.coalesce().indices()]
    optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, momentum=0.9, stage=stage)
    model["scale"].grad = single(1)
    optimizer.step()
    optimizer.consolidate_state_dict()
    return [model["scale"].detach()]


def call_everything(root: Path) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    gradient, seen, rows = averaged(rank, None)
    assert gradient.shape == (1,)
    assert (seen.item(), rows.tolist()) == (2, [[0, 1]])
    assert averaged(rank, 1)[0].item() == 1
    objects = [None, None]
    dist.all_gather_object(objects, single(rank, torch.float16))
    assert objects == [single(0), single(1)]
    sparse = torch.sparse_coo_tensor([[rank, rank]], [1.0, 2.0], (3,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [3, 3, 0]
    dist.save({"values": single(7), "model": Scaled()}, root)
    state = {"values": single(0), "model": Scaled()}
    dist.load(state, root)
    assert state["values"].item() == 7


def test_a_single_element_has_any_stride(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(2)(call_everything, tmp_path)

"""Wrappers that average over logical shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as dist


class Several(nn.Module):
    """Returns nested outputs, and skips a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.norm = nn.Linear(3, 2), nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
        y = self.norm(self.used(x)) * scale
        return {"y": y, "norms": (y.square().sum(1), y.mean())}


def wrap_deterministically() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    model = dist.DistributedDataParallel(Several(), deterministic=True, logical_shards=4)
    reference, expected = Several(), []
    for shard in range(4):
        out = reference(data[shard::4], scale=2.0)
        (out["norms"][0].mean() / 4).backward()
        expected.append(out["y"].detach())
    out = model(data[rank::size], scale=2.0)
    assert out["norms"][1].shape == (4 // size,)
    torch.testing.assert_close(out["y"], torch.stack(expected, 1).flatten(0, 1)[rank::size])
    loss = out["norms"][0].mean()
    loss.backward(retain_graph=True)
    for (name, mine), other in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == ("unused" in name)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert model.module.norm.num_batches_tracked == 1
    with pytest.raises(RuntimeError, match=r"rank \d: a second backward of one forward"):
        loss.backward()
    model.zero_grad()
    model(data[rank::size], scale=2.0)["norms"][0].mean().backward()  # training continues after the error
    torch.testing.assert_close(model.module.used.weight.grad, reference.used.weight.grad)
    with torch.no_grad():
        assert model(data[:3])["y"].shape == (3, 2)  # any batch size is valid, because there are no gradients to add


def test_a_deterministic_wrapper_averages_over_the_shards(ranks):
    ranks(2)(wrap_deterministically)

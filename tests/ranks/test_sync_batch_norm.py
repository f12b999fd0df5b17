"""SyncBatchNorm, compared with BatchNorm on the batches of all ranks together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import batches, require_equal_on_all_ranks

import paceline as dist

SHAPES = {1: (5, 6), 2: (4, 6, 3, 3), 3: (3, 6, 2, 3, 2)}
LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def close(mine: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def like_one_process(dims: int, options: dict[str, object], uneven: bool) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = LAYERS[dims](6, **options).double()
    if whole.affine:
        nn.init.normal_(whole.weight)
        nn.init.normal_(whole.bias)
    mine = dist.convert_sync_batchnorm(copy.deepcopy(whole))
    assert isinstance(mine, dist.SyncBatchNorm)
    for step in range(3):
        parts = [x.double() * (r + 1) + r for r, x in enumerate(batches(*SHAPES[dims], step=step))]
        if uneven:
            parts = [x[: len(x) - r] for r, x in enumerate(parts)]
        parts = [part.requires_grad_() for part in parts]
        weights = torch.linspace(-1, 1, 6, dtype=torch.float64).view(1, 6, *[1] * (parts[0].dim() - 2))

        output = mine(parts[rank])
        (output.square() * weights).sum().backward()
        own_gradient, parts[rank].grad = parts[rank].grad, None
        whole_output = whole(torch.cat(parts))
        (whole_output.square() * weights).sum().backward()

        close(output, whole_output.split([len(part) for part in parts])[rank])
        close(own_gradient, parts[rank].grad)
        for part_of, total in zip(mine.parameters(), whole.parameters(), strict=True):
            summed = part_of.grad.clone()
            dist.all_reduce(summed)
            close(summed, total.grad)
        for own, other in zip(mine.buffers(), whole.buffers(), strict=True):
            close(own, other)
        require_equal_on_all_ranks(mine.buffers())
    assert len(list(mine.buffers())) == len(list(whole.buffers()))
    mine.eval()
    whole.eval()
    if whole.track_running_stats and rank == 0:  # the call does not wait for other ranks
        close(mine(parts[0]), whole(parts[0]))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"affine": False}),
        (2, {"momentum": None}),
        (2, {"track_running_stats": False, "eps": 1e-3}),
    ],
)
def test_it_equals_batch_norm_on_the_whole_batch(ranks, dims, options, uneven):
    ranks(3)(like_one_process, dims, options, uneven)


def in_float32() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(6)
    mine = dist.convert_sync_batchnorm(copy.deepcopy(whole))
    parts = [x.requires_grad_() for x in batches(4, 6, 3, 3)]
    output = mine(parts[rank])
    output.pow(3).mean().backward()
    gradient, parts[rank].grad = parts[rank].grad, None
    whole_output = whole(torch.cat(parts))
    whole_output.pow(3).mean().mul(2).backward()
    close(output, whole_output.chunk(2)[rank])
    close(gradient, parts[rank].grad)
    close(mine.running_var, whole.running_var)
    with torch.autocast("cpu", torch.bfloat16):
        assert mine(parts[rank].bfloat16()).dtype is torch.bfloat16


def test_it_equals_batch_norm_in_float32_too(ranks):
    ranks(2)(in_float32)


def train_a_wrapped_model() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    synchronized = dist.DistributedDataParallel(dist.convert_sync_batchnorm(copy.deepcopy(model)))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, synchronized)]
    for step in range(5):
        parts = [x.double() for x in batches(4, 2, 6, 6, step=step)]
        for optimizer, each, x in zip(optimizers, (model, synchronized), (torch.cat(parts), parts[rank]), strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.state_dict().values(), synchronized.state_dict().values(), strict=True):
        close(one, other)


def test_a_wrapped_model_trains_as_one_process_would(ranks):
    ranks(2)(train_a_wrapped_model)


def empty_and_single() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    layer = dist.SyncBatchNorm(2)
    x = torch.randn(3 - 3 * rank, 2, requires_grad=True)  # no samples on rank 1
    layer(x).square().sum().backward()
    assert x.grad.shape == x.shape and x.grad.isfinite().all()
    with pytest.raises(
        ValueError, match=r"1 value for each channel from all 2 ranks.*larger batches, or call eval\(\)"
    ):
        layer(torch.ones(1 - rank, 2))
    with pytest.raises(ValueError, match=r"shape \[3, 5\].*num_features = 2"):
        layer(torch.ones(3, 5))
    dist.barrier()


def test_a_rank_may_have_no_sample_but_all_together_need_two(ranks):
    ranks(2)(empty_and_single)
